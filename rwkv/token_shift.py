"""The token shift, by its formula; rwkv/fused.py computes the same with what follows it."""

import torch
from torch import Tensor


def token_shift(x: Tensor, last_x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
    """mu x_t + (1 - mu) x_{t-1} for each mu (1,1,C): (B,T,C) each, of x (B,T,C) and last_x (B,C) before its first step.

    In the dtype of the products that read them.
    """
    dtype = multiplied(x)
    x = x.to(dtype)
    before = torch.cat((last_x.unsqueeze(1).to(dtype), x[:, :-1]), dim=1)
    return tuple(torch.lerp(before, x, mu.to(dtype)) for mu in mus)


def multiplied(x: Tensor) -> torch.dtype:
    """The dtype of x in a matrix product: autocast leaves float64 as it is."""
    lower = x.device.type != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if lower else x.dtype


def last(x: Tensor) -> Tensor:
    """The last step of x (B,T,C), for the next state: (B,C), not a view, which would keep all of x in memory."""
    return x[:, -1].clone()
