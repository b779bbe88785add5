"""Makes the case that kernel_check compares with the reference before a run."""

import torch
from torch import Tensor

from kernels.compare import loss

CHECKED = (2, 33, 5)                     # (B, T, C)


def inputs(B: int, T: int, C: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((C,), (B, T, C), (B, C))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)


def double(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in inputs)


def results(wkv, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y, state = wkv(*leaves)
    grads = torch.autograd.grad(loss(y) + loss(state), leaves)
    named = {f"grad {name}": grad for name, grad in zip(wkv.gradients, grads, strict=True)}
    return {"y": y.detach(), "state": state.detach(), **named}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict.fromkeys(("y", "state", "grad decay", "grad k", "grad state"), 1e-5)
