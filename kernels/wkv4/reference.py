"""The reference computes the recurrence step by step, with the state scaled by the running maximum exponent.

Tests compare every implementation with this file in float64. The loop is slow, and correct for any finite k.
"""

import torch
from torch import Tensor

from kernels.registry import Requires
from kernels.wkv4 import decay_exponent

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w = decay_exponent(time_decay)
    y = torch.empty_like(v)
    for t in range(k.shape[1]):
        past, now, _ = _factors(p, time_first + k[:, t])
        y[:, t] = (past * a + now * v[:, t]) / (past * b + now)
        a, b, p = _advance(w, k[:, t], v[:, t], a, b, p)
    return y, a, b, p


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor,
             grad_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    w = decay_exponent(time_decay)
    states = [(a, b, p)]
    for t in range(k.shape[1] - 1):
        a, b, p = _advance(w, k[:, t], v[:, t], a, b, p)
        states.append((a, b, p))
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grad_w = torch.zeros_like(a)
    grad_u = torch.zeros_like(a)
    for t in range(k.shape[1] - 1, -1, -1):              # grad_a, grad_b are those of the state after step t, at its scale
        a, b, p = states[t]
        past, now, _ = _factors(p, time_first + k[:, t])
        grad_num = grad_y[:, t] / (past * b + now)
        grad_here = now * grad_num * (v[:, t] - y[:, t])
        old, new, _ = _factors(p + w, k[:, t])
        grad_v[:, t] = grad_num * now + grad_a * new
        grad_k[:, t] = grad_here + new * (grad_a * v[:, t] + grad_b)
        grad_u += grad_here
        grad_w += old * (grad_a * a + grad_b * b)
        grad_a = old * grad_a + past * grad_num
        grad_b = old * grad_b - past * grad_num * y[:, t]
    return grad_w.sum(0) * w, grad_u.sum(0), grad_k, grad_v, grad_a, grad_b


def _advance(w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old, new, p = _factors(p + w, k)
    return old * a + new * v, old * b + new, p


def _factors(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns e^p and e^q, each divided by the larger of the two, and the larger exponent."""
    top = torch.maximum(p, q)
    return torch.exp(p - top), torch.exp(q - top), top
