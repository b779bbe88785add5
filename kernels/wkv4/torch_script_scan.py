"""TorchScript runs the operations of the reference's loop over the steps without Python, in float64.

In float32 an exponent near 230 would have a rounding error of 1.5e-5 at every step. In float64 the plain formula is as exact as
the scans with integer exponents.
"""

import torch
from torch import Tensor

from kernels.backends.compiled import scripted
from kernels.registry import Requires, load

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), scripted=True)


def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
    return _in_float64("forward", inputs)


def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
    return _in_float64("backward", inputs)


def _in_float64(function: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = scripted(getattr(load("wkv4", "reference"), function))(*(tensor.double() for tensor in inputs))
    return tuple(output.to(inputs[0].dtype) for output in outputs)
