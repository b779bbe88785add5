"""PyTorch in few passes over memory: all mixes share the change since the step before, and gradients add up in place."""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    before, change = _before_and_change(x, last_x)
    return tuple(torch.addcmul(before, change, mu, out=x.new_empty(x.shape, dtype=dtype)) for mu in mus)


def backward(x: Tensor, last_x: Tensor, mus: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, change = _before_and_change(x, last_x)
    grad_x, grad_before = grads[0] * mus[0], grads[0].to(x.dtype, copy=True)
    for grad, mu in zip(grads[1:], mus[1:], strict=True):
        grad_x.addcmul_(grad, mu)
        grad_before += grad
    grad_before -= grad_x
    grad_x[:, :-1] += grad_before[:, 1:]
    grad_mus = torch.stack([(grad * change).sum((0, 1)) for grad in grads])
    return grad_x, grad_before[:, 0], grad_mus


def _before_and_change(x: Tensor, last_x: Tensor) -> tuple[Tensor, Tensor]:
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    return before, x - before
