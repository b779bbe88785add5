"""The reference computes the formula in plain PyTorch, as a loop over the lag.

Tests compare every implementation with this file in float64. The loop is slow.
"""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    T = k.shape[-1]
    out = torch.full_like(k, eps)
    for n in range(T):                                   # out[t] += w[lag n] * k[t - n]
        out[:, :, n:] += w[:, T - 1 - n, None] * k[:, :, :T - n]
    return out


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    T = k.shape[-1]
    grad_w = torch.zeros_like(w)
    grad_k = torch.zeros_like(k)
    for n in range(T):
        grad_k[:, :, :T - n] += w[:, T - 1 - n, None] * grad_out[:, :, n:]
        grad_w[:, T - 1 - n] = (grad_out[:, :, n:] * k[:, :, :T - n]).sum(dim=(0, 2))
    return grad_w, grad_k
