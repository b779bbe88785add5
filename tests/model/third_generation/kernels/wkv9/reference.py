"""Computes the formula step by step."""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(decay: Tensor, k: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    factor, steps = torch.exp(-torch.exp(decay)), []
    for step in k.unbind(1):
        state = factor * state + step
        steps.append(state)
    return torch.stack(steps, 1), state


def backward(decay: Tensor, k: Tensor, state: Tensor, y: Tensor, grad_y: Tensor,
             grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factor, grad, grad_factor = torch.exp(-torch.exp(decay)), grad_state, torch.zeros_like(decay)
    grad_k = torch.empty_like(k)
    for t in reversed(range(k.shape[1])):
        grad = grad + grad_y[:, t]
        grad_k[:, t] = grad
        grad_factor = grad_factor + (grad * (y[:, t - 1] if t else state)).sum(0)
        grad = grad * factor
    return -grad_factor * factor * torch.exp(decay), grad_k, grad
