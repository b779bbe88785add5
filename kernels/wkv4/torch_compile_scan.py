"""torch.compile compiles the recurrence to one loop over batch and channels for every STEPS steps, in float64.

The first call compiles the plain formula, unrolled over STEPS steps, for any batch size and number of channels, which takes
seconds. The last steps run uncompiled if there are fewer than STEPS. In float32 an exponent near 230 would have a rounding
error of 1.5e-5 at every step. In float64 the plain formula is as exact as the scans with integer exponents.

The backward recomputes the state before each group of STEPS steps, and from that state the state before each step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.backends.compiled import any_size, compiled
from kernels.registry import Requires
from kernels.wkv4 import decay_exponent

REQUIRES = Requires(compiled=True)

STEPS = 8
LOG2_E = 1 / math.log(2)


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    weights = _weights(time_decay, time_first)
    state = [a.double(), b.double(), p.double() * LOG2_E]
    y = torch.empty_like(v)
    for span in _spans(k):
        y[:, span], *state = _run(_forward, weights, state, k[:, span], v[:, span])
    a, b, p = (part.to(k.dtype) for part in (*state[:2], state[2] / LOG2_E))
    return y, a, b, p


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    weights = _weights(time_decay, time_first)
    spans = _spans(k)
    states = [[a.double(), b.double(), p.double() * LOG2_E]]
    for span in spans[:-1]:
        states.append(_run(_forward, weights, states[-1], k[:, span], v[:, span])[1:])
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grads = [grad_a.double(), grad_b.double(), torch.zeros_like(states[0][0]), torch.zeros_like(states[0][0])]
    for span, state in zip(reversed(spans), reversed(states), strict=True):
        rows = (tensor[:, span] for tensor in (k, v, y, grad_y))
        grad_k[:, span], grad_v[:, span], *grads = _run(_backward, weights, [*state, *grads], *rows)
    grad_a, grad_b, grad_w, grad_u = grads
    gradients = grad_w.sum(0) * decay_exponent(time_decay), grad_u.sum(0), grad_k, grad_v, grad_a, grad_b
    return tuple(grad.to(k.dtype) for grad in gradients)


def _weights(time_decay: Tensor, time_first: Tensor) -> list[Tensor]:
    """Returns w and u (C,) as exponents of 2, because exp, unlike exp2, would make the compiler start a second loop."""
    return [decay_exponent(time_decay.double()) * LOG2_E, time_first.double() * LOG2_E]


def _spans(k: Tensor) -> list[slice]:
    return [slice(start, start + STEPS) for start in range(0, k.shape[1], STEPS)]


def _run(function: Callable[..., Any], weights: list[Tensor], state: list[Tensor], *rows: Tensor) -> Any:
    """Returns function(*weights, *state, *rows), which is compiled if the rows (B,steps,C) have STEPS steps."""
    if rows[0].shape[1] < STEPS:
        return function(*weights, *state, *rows)
    return compiled(function)(*map(any_size, (*weights, *state)), *(any_size(row, 1) for row in rows))


def _forward(w: Tensor, u: Tensor, a: Tensor, b: Tensor, p: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    ys = []
    for k_t, v_t in zip(_steps(k.double() * LOG2_E), _steps(v), strict=True):
        past, now, _ = _factors(p, u + k_t)
        ys.append(((past * a + now * v_t) / (past * b + now)).to(k.dtype))
        a, b, p = _advance(w, k_t, v_t, a, b, p)
    return torch.stack(ys, 1), a, b, p


def _backward(w: Tensor, u: Tensor, a: Tensor, b: Tensor, p: Tensor, grad_a: Tensor, grad_b: Tensor, grad_w: Tensor,
              grad_u: Tensor, k: Tensor, v: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Returns grad_k, grad_v, the gradients of a and b before these steps, and grad_w and grad_u (B,C).

    grad_w and grad_u are the arguments plus the contribution of these steps.
    """
    rows = [*zip(*map(_steps, (k.double() * LOG2_E, v, y, grad_y)), strict=True)]
    states = [(a, b, p)]
    for k_t, v_t, _, _ in rows[:-1]:
        states.append(_advance(w, k_t, v_t, *states[-1]))
    grads = []
    for (k_t, v_t, y_t, grad_t), (a, b, p) in zip(reversed(rows), reversed(states), strict=True):
        past, now, _ = _factors(p, u + k_t)
        old, new, _ = _factors(p + w, k_t)
        grad_num = grad_t / (past * b + now)
        grad_here = now * grad_num * (v_t - y_t)
        grads.append((grad_here + new * (grad_a * v_t + grad_b), grad_num * now + grad_a * new))
        grad_u = grad_u + grad_here
        grad_w = grad_w + old * (grad_a * a + grad_b * b)
        grad_a, grad_b = old * grad_a + past * grad_num, old * grad_b - past * grad_num * y_t
    grad_k, grad_v = (torch.stack([row.to(k.dtype) for row in reversed(part)], 1) for part in zip(*grads, strict=True))
    return grad_k, grad_v, grad_a, grad_b, grad_w, grad_u


def _steps(rows: Tensor) -> list[Tensor]:
    return [row.double() for row in rows.unbind(1)]


def _advance(w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old, new, p = _factors(p + w, k)
    return old * a + new * v, old * b + new, p


def _factors(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 2^p and 2^q, each divided by the larger of the two, and the larger exponent."""
    top = torch.maximum(p, q)
    return torch.exp2(p - top), torch.exp2(q - top), top
