"""Shapes, inputs and tolerances of the token shift, shared by the tests and the benchmark."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.shift import TokenShift

# (B, T, C): one step; channels of a part of a vector, of whole ones; steps of a part of a task, of one, of several
SHAPES = ((1, 1, 1), (3, 1, 16), (2, 5, 3), (2, 64, 48), (3, 65, 32), (1, 130, 17))
EMPTY_SHAPES = ((0, 3, 4), (2, 0, 4), (2, 3, 0))
GRADIENTS = ("grad_x", "grad_last_x", "grad_mus")
MIXES = 3                            # what the benchmark measures: RWKV-4's time mixing
# (B, T, C), as models of 4, 6 and 12 layers have them, and on a GPU a larger one
BENCH_SHAPES = {"cpu": ((4, 512, 384), (12, 64, 128), (8, 1024, 768)), "cuda": ((8, 1024, 768), (32, 1024, 2048))}
SWEEP = {"cpu": (), "cuda": ()}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}   # on err_ratio


def inputs(B: int, T: int, C: int, n: int = MIXES, dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (B,T,C), last_x (B,C), normally distributed, and mus (n,C), uniform on [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x, last_x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((B, T, C), (B, C)))
    mus = torch.rand(n, C, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), last_x.to(device, dtype), mus.to(device, dtype)


def upstream(B: int, T: int, C: int, n: int = MIXES, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Gradients of the n results, normally distributed: the operator is linear in x, so they need not depend on it."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, T, C, generator=generator).to(device, dtype) for _ in range(n)]


def results(shift: TokenShift, x: Tensor, last_x: Tensor, mus: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mixes, stacked (n,B,T,C), in the dtype of `grads`, and the gradients that these send back."""
    x, last_x, mus = leaves = tuple(tensor.detach().requires_grad_() for tensor in (x, last_x, mus))
    mixes = shift(x, last_x, mus, grads[0].dtype)
    found = torch.autograd.grad(mixes, leaves, grads)
    return {"mixes": torch.stack(mixes).detach(), **dict(zip(GRADIENTS, found, strict=True))}


def reference(x: Tensor, last_x: Tensor, mus: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same by the formula, in float64."""
    return results(TokenShift("formula"), x.double(), last_x.double(), mus.double(), [grad.double() for grad in grads])


def tolerance(dtype: torch.dtype, of_inputs: torch.dtype = torch.float32) -> dict[str, float]:
    """For results in `dtype`, and gradients in that of the inputs: nothing else is rounded to half precision."""
    return {"mixes": TOLERANCE[dtype], **dict.fromkeys(GRADIENTS, TOLERANCE[of_inputs])}
