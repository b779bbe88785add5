"""The operator that a kernel's name means for a model. Models are given theirs; programs and from_pretrained choose it here."""

from functools import cache
from typing import Any

import torch

from kernels.matvec import FORMS, MatVec
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


def matvec_line(form: str) -> str:
    """One line to print: what multiplies rows by weights of the form while a text is generated on a CPU."""
    most = matvec_for(form).most_rows(form)
    rows = "" if most is None else f", up to {most} {'row' if most == 1 else 'rows'}; more by a matrix product"
    return f"products in {form}: {why_auto('matvec', 'cpu', FORMS[form])}{rows}"
