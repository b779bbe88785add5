"""The reference computes the recurrence step by step, in float32 or float64.

Tests compare every implementation with this file. The loop is slow. The backward recomputes and stores all states, T N^2
numbers per head, and goes from the last step to the first, with G = dL/dS:

    gr_j = sum_i S_ij gy_i  (S after)     G += gy r^T     gv = G k     gk = G^T v     gb = G^T sa     gw_j = sum_i G_ij S'_ij
    gsa = G b     ga = S'^T gsa     G <- G diag(w) + gsa a^T          (S' the state before; log_w's gradient is gw w)
"""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(v)
    for t in range(v.shape[1]):
        state = _advance(log_w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        y[:, t] = _times(state, r[:, t])
    return y, state


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    T = v.shape[1]
    states = [state]
    for t in range(T):
        states.append(_advance(log_w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], states[-1]))
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b = (torch.empty_like(v) for _ in range(6))
    G = grad_state
    for t in reversed(range(T)):
        before = states[t]
        after = states[t + 1]
        w = log_w[:, t].exp()
        grad_r[:, t] = _times(after.mT, grad_y[:, t])
        G = G + _outer(grad_y[:, t], r[:, t])
        grad_v[:, t] = _times(G, k[:, t])
        grad_k[:, t] = _times(G.mT, v[:, t])
        grad_b[:, t] = _times(G.mT, _times(before, a[:, t]))
        grad_log_w[:, t] = (G * before).sum(-2) * w
        grad_sa = _times(G, b[:, t])
        grad_a[:, t] = _times(before.mT, grad_sa)
        G = G * w.unsqueeze(-2) + _outer(grad_sa, a[:, t])
    return grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, G


def _advance(log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    return state * log_w.exp().unsqueeze(-2) + _outer(_times(state, a), b) + _outer(v, k)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.unsqueeze(-1) * columns.unsqueeze(-2)
