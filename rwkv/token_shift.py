"""The token shift, by its formula; rwkv/fused.py computes the same with what follows it."""

import torch
from torch import Tensor


def token_shift(x: Tensor, last_x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
    """mu x_t + (1 - mu) x_{t-1} for each mu (1,1,C): (B,T,C) each, of x (B,T,C) and last_x (B,C) before its first step."""
    before = torch.cat((last_x.unsqueeze(1).to(x.dtype), x[:, :-1]), dim=1)
    return tuple(torch.lerp(before, x, mu) for mu in mus)


def last(x: Tensor) -> Tensor:
    """The last step of x (B,T,C), for the next state: (B,C), not a view, which would keep all of x in memory."""
    return x[:, -1].clone()
