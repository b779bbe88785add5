"""TorchScript runs the operations of the formula's loop over the lag without Python."""

import torch
from torch import Tensor

from kernels.backends.compiled import scripted
from kernels.registry import Requires, load

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), scripted=True)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return scripted(load("timex", "formula").forward)(w, k, eps)


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return scripted(load("timex", "formula").backward)(w, k, grad_out)
