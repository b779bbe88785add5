"""Contains the shapes, inputs and tolerances of TimeX for the tests and the benchmark."""

import torch
from torch import Tensor

from kernels.compare import ROUNDING, loss
from kernels.timex import TimeX

SHAPES = ((1, 1, 1), (3, 5, 11), (2, 4, 63), (5, 3, 129), (8, 16, 256))              # (B, C, T)
EMPTY_SHAPES = ((0, 3, 4), (2, 0, 4), (2, 3, 0))
PUBLISHED = (32, 768, 768)           # as in RWKV-CUDA's table and in the Taichi documentation's comparison
BENCH_SHAPES = {"cpu": ((8, 768, 1024), (256, 768, 64), PUBLISHED), "cuda": (PUBLISHED, (8, 768, 1024), (8, 768, 4096))}
SWEEP = {"cpu": (128, 512, 2048), "cuda": (128, 256, 512, 2048, 8192)}       # T, at the B and C of a shape above
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, **ROUNDING}      # largest err_ratio


def inputs(B: int, C: int, T: int, dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random w (C,T) and k (B,C,T). w is neither positive nor decaying, because TimeX accepts any w."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(C, T, generator=generator, dtype=torch.float64)
    k = torch.randn(B, C, T, generator=generator, dtype=torch.float64)
    return w.to(device, dtype), k.to(device, dtype)


def flop(B: int, C: int, T: int) -> int:
    """Returns the number of floating-point operations of the forward pass, which is also that of each gradient."""
    return B * C * T * (T + 1)


def results(timex: TimeX, w: Tensor, k: Tensor, eps: float = 0.0) -> dict[str, Tensor]:
    """Returns out (B,C,T), and the gradients grad_w (C,T) and grad_k (B,C,T) of loss(out), by name."""
    w = w.detach().requires_grad_()
    k = k.detach().requires_grad_()
    out = timex(w, k, eps)
    grad_w, grad_k = torch.autograd.grad(loss(out), (w, k))
    return {"out": out.detach(), "grad_w": grad_w, "grad_k": grad_k}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Returns the tolerances for inputs of `dtype`, by name.

    In half precision a gradient has three rounding errors, because out, grad_out and the gradient are each rounded.
    """
    allowed = TOLERANCE[dtype]
    gradient = 3 * allowed if dtype.itemsize == 2 else allowed
    return {"out": allowed, "grad_w": gradient, "grad_k": gradient}
