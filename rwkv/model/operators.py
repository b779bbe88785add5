"""The operator that a kernel's name means for a model. Models are given theirs; programs and from_pretrained choose it here."""

from functools import cache
from typing import Any

import torch

from kernels.matvec import FEWEST_ROWS, FORMS, LEAST_NUMBERS, MOST_ROWS, MatVec, pays
from kernels.registry import UnknownKernel, all_names
from kernels.select import AUTO, runnable_on, select, why_auto
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.model.base import generation


def operator_for(config: ModelConfig, kernel: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The operator of a model of `config` under the kernel of that name, for inputs of `dtype`.

    Raises UnknownKernel where the kernel is of another generation's operator alone, and as kernels.select.select does.
    """
    model = generation(config)
    if kernel != AUTO and kernel not in all_names(model.OPERATOR):
        others = [generation(ModelConfig(generation=name)) for name in GENERATIONS]
        owners = [other.NAME for other in others if kernel in all_names(other.OPERATOR)]
        if owners:
            raise UnknownKernel(f"{kernel} computes the operator of {' and '.join(owners)}; for {model.NAME} there are: "
                                f"{', '.join(runnable_on(model.OPERATOR, torch.device(device).type))}")
    return select(model.OPERATOR, kernel, device, dtype)


@cache
def matvec_for(form: str) -> MatVec:
    """The operator that multiplies a few rows by weights of the form, on a CPU."""
    matvec: MatVec = select("matvec", AUTO, "cpu", FORMS[form])
    return matvec


def matvec_line(form: str, head: int) -> str | None:
    """One line to print: what multiplies few rows by weights of the form while a text is generated on a CPU.

    head: the numbers of the largest matrix, the head. None where it is torch's matrix product alone.
    """
    if not pays(form, head):
        return None
    least = LEAST_NUMBERS[form]
    which = f", matrices of {least:,} numbers and more" if least else ""
    rows = f"{FEWEST_ROWS[form]} to {MOST_ROWS} rows"
    return f"products in {form}: {why_auto('matvec', 'cpu', FORMS[form])}{which}, {rows}; others by torch"
