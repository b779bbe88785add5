"""The formula and its derivatives, term by term, each an operation over all of memory.

The reference that every implementation is held to, in float64.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    before = _before(x, last_x)
    return tuple((mu * x + (1 - mu) * before).to(dtype) for mu in mus)


def backward(x: Tensor, last_x: Tensor, mus: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.stack(grads).to(x.dtype)                                # (n,B,T,C)
    mu = mus[:, None, None]
    grad_now, grad_before = (mu * grad).sum(0), ((1 - mu) * grad).sum(0)
    grad_x = grad_now + pad(grad_before[:, 1:], (0, 0, 0, 1))
    grad_mus = (grad * (x - _before(x, last_x))).sum((1, 2))
    return grad_x, grad_before[:, 0], grad_mus


def _before(x: Tensor, last_x: Tensor) -> Tensor:
    return torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
