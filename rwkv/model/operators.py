"""The operator that the name of a kernel means for a model. Programs and from_pretrained choose it here, and pass it on."""

from functools import cache
from typing import Any

import torch

from kernels.draw import Draw
from kernels.matvec import MatVec
from kernels.registry import UnknownKernel, all_names, load, name_now, why_not
from kernels.select import AUTO, resolve, runnable_on, select
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.distributed import log
from rwkv.model.base import generation


def operator_for(config: ModelConfig, kernel: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The operator of a model of `config` under the kernel of that name, for inputs of `dtype`.

    An earlier name of a kernel is accepted, with a line that says the present one. Raises UnknownKernel for a kernel that
    computes only another generation's operator, and the errors of kernels.select.select.
    """
    model = generation(config)
    before, kernel = kernel, name_now(model.OPERATOR, kernel)
    if kernel != before:
        log(f"the kernel {before} is called {kernel} now")
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
    matvec: MatVec = select("matvec", AUTO, "cpu", form)
    return matvec


def why_no_int8() -> str | None:
    """None where torch or the C library multiplies integers on this CPU, otherwise the reasons."""
    reasons = [why_not("matvec", name) for name in ("fbgemm", "c_v0")]
    return None if None in reasons else "; ".join(filter(None, reasons))


@cache
def drawing() -> Draw | None:
    """The function of kernels/draw for this CPU; None where no implementation can run: PyTorch draws tokens then."""
    name = resolve("draw", AUTO)
    function: Draw | None = None if why_not("draw", name) else load("draw", name).draw
    return function
