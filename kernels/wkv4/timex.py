"""WKV is computed as the quotient of two TimeX convolutions with the same weights, by any TimeX implementation.

In the unrolled recurrence, the weight of step t-n in step t is e^u at lag 0, and e^((n-1)w) at lag n >= 1. If W is the table of
these weights, y = TimeX(W, e^k v) / TimeX(W, e^k). A single call computes both convolutions with the inputs stacked. T is
divided into blocks of N steps, which are additional rows of that call. The exact state is carried from block to block, which
makes the work O(T N) instead of O(T^2), and limits the range of the exponents to that within a block.

The smallest normal float32 is e^-87, and gradients need a margin. If all k and the exponent p of the initial state lie within
60 of each other (for example |k| <= 30), and time_first >= -9, the result is as exact as that of a scan. Otherwise steps far
below the maximum of their block underflow. If all terms underflow, y_t is v_t, and if a state underflows, the empty state
replaces it. The result is then finite but not exact, and not causal, because the maximum may come from a later step. The scans
have no such limit.

N  steps in a block      n  blocks      m  maximum of k in a block      s  scale shared by a block and its incoming state
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.registry import Requires, UnknownKernel
from kernels.timex import TimeX
from kernels.wkv4 import EMPTY, decay_exponent

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))
BLOCK = 64
LOST = 1e-30             # denominators below this have no correct digits


def requires(timex: str, block: int = BLOCK) -> Requires:
    """Returns WKV's requirements with the TimeX `timex`.

    Raises UnknownKernel if `timex` is too inaccurate, and ValueError if block < 1.
    """
    inner = TimeX(timex).requires
    if not inner.wkv:
        raise UnknownKernel(f"{timex} is too inaccurate for WKV: its error is relative to the largest e^k of a row, and "
                            "e^k spans many orders of magnitude. Choose another kernel")
    if block < 1:
        raise ValueError(f"block must be at least 1 step; got {block}")
    return replace(inner, dtypes=tuple(dtype for dtype in inner.dtypes if dtype in REQUIRES.dtypes))   # e^k overflows float16


class Weights(NamedTuple):
    """Tables of weights over the steps of one block, (C,N) each; and w and the steps, which the gradients need."""

    w: Tensor            # (C,)
    lag: Tensor          # W, the weights by lag, lag 0 last
    decay_in: Tensor     # weight of the block's initial state in step t: e^(tw)
    decay_out: Tensor    # weight of step t in the block's final state: e^((N-1-t)w)
    steps: Tensor        # (N,) 0, 1, 2, ...


class Block(NamedTuple):
    """The inputs (B,n,C,N), each at the scale of its block, and the scales and the state before each block (B,n,C)."""

    x: Tensor            # e^(k-m)
    v: Tensor
    own: Tensor          # e^(m-s), the scale of a block's own sums
    past: Tensor         # e^(p-s), the scale of the block's initial state
    a: Tensor
    b: Tensor
    old: Tensor          # factor of the initial state in the final state
    added: Tensor        # factor of a block's own sums in the final state


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
            timex: str, block: int = BLOCK) -> tuple[Tensor, ...]:
    """Returns the operator's outputs, which __init__.py describes.

    A nonfinite k or v would also change earlier steps of the same block. So if the state after the last step is not finite, the
    outputs are computed again without the nonfinite steps, and set to NaN from the first of these steps on.
    """
    outputs = _forward(time_decay, time_first, k, v, a, b, p, timex, block)
    if outputs[1].isfinite().all():
        return outputs
    nonfinite = ~((k < math.inf) & v.isfinite())
    after = nonfinite.cumsum(1, dtype=torch.int32) > 0
    k = k.masked_fill(nonfinite, EMPTY)
    v = v.masked_fill(nonfinite, 0.0)
    y, *state = _forward(time_decay, time_first, k, v, a, b, p, timex, block)
    return y.masked_fill(after, math.nan), *(part.masked_fill(after[:, -1], math.nan) for part in state)


def _forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             timex: str, block: int) -> tuple[Tensor, ...]:
    ys = []
    for start, stop, N in _segments(k.shape[1], block):
        weights = _weights(time_decay, time_first, N)
        blocks, (a, b, p) = _blocks(weights, k[:, start:stop], v[:, start:stop], a, b, p)
        num, den = _sums(weights, blocks, timex, (blocks.x * blocks.v, blocks.a), (blocks.x, blocks.b))
        ys.append(_by_time(torch.where(den <= LOST, blocks.v, num / den)))         # den <= LOST is false for NaN, which stays
    return torch.cat(ys, dim=1), a, b, p


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor,
             timex: str, block: int = BLOCK) -> tuple[Tensor, ...]:
    segments = _segments(k.shape[1], block)
    states = [(a, b, p)]
    for start, stop, N in segments[:-1]:
        states.append(_blocks(_weights(time_decay, time_first, N), k[:, start:stop], v[:, start:stop], *states[-1])[1])
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grad_decay = torch.zeros_like(time_decay)
    grad_first = torch.zeros_like(time_first)
    for (start, stop, N), state in zip(reversed(segments), reversed(states), strict=True):
        span = slice(start, stop)
        weights = _weights(time_decay, time_first, N)
        blocks, _ = _blocks(weights, k[:, span], v[:, span], *state)
        grads = _backward_blocks(weights, blocks, _by_block(y[:, span], N), _by_block(grad_y[:, span], N),
                                 grad_a, grad_b, timex)
        grad_w, grad_u, grad_k[:, span], grad_v[:, span], grad_a, grad_b = grads
        grad_decay += grad_w * weights.w
        grad_first += grad_u
    return grad_decay, grad_first, grad_k, grad_v, grad_a, grad_b


def _segments(T: int, block: int) -> list[tuple[int, int, int]]:
    """Returns (start, stop, N) for all whole blocks together, and for a last, shorter block, if any."""
    whole = T - T % block
    return [(start, stop, N) for start, stop, N in ((0, whole, block), (whole, T, T - whole)) if start < stop]


def _weights(time_decay: Tensor, time_first: Tensor, N: int) -> Weights:
    """Returns the tables of a block of N steps, divided by e^max(u,0).

    The division does not change the quotient, and keeps e^u finite.
    """
    w = decay_exponent(time_decay)
    steps = torch.arange(N, device=w.device, dtype=w.dtype)
    powers = torch.exp(w[:, None] * steps)
    scale = torch.exp(-time_first.clamp(min=0))[:, None]
    now = torch.exp(time_first.clamp(max=0))[:, None]
    return Weights(w, torch.cat((powers[:, :-1].flip(-1) * scale, now), dim=1), powers * scale, powers.flip(-1), steps)


def _blocks(weights: Weights, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
            p: Tensor) -> tuple[Block, tuple[Tensor, Tensor, Tensor]]:
    N = weights.lag.shape[1]
    k = _by_block(k, N)
    v = _by_block(v, N)
    m = k.amax(-1).clamp(min=EMPTY)
    x = torch.exp(k - m[..., None])
    own_a = _weighted_sum(x * v, weights.decay_out)
    own_b = _weighted_sum(x, weights.decay_out)
    columns = []
    for j in range(k.shape[1]):
        s = torch.maximum(m[:, j], p)
        p_out = torch.maximum(m[:, j], p + N * weights.w)
        old = torch.exp(p + N * weights.w - p_out)
        added = torch.exp(m[:, j] - p_out)
        significant = ~(old * b + added * own_b[:, j] <= LOST)       # this is also true for NaN
        old = old * significant
        added = added * significant
        columns.append((torch.exp(m[:, j] - s), torch.exp(p - s), a, b, old, added))
        a, b, p = old * a + added * own_a[:, j], old * b + added * own_b[:, j], torch.where(significant, p_out, EMPTY)
    return Block(x, v, *(torch.stack(column, dim=1) for column in zip(*columns, strict=True))), (a, b, p)


def _sums(weights: Weights, blocks: Block, timex: str, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """Returns each block's convolution plus the decayed initial state. A term is a pair own (B,n,C,N) and past (B,n,C)."""
    convolved = TimeX(timex).forward(weights.lag, _stack(*(own for own, _ in terms)))
    sums = convolved.view(len(terms), *blocks.x.shape).mul_(blocks.own[..., None])
    for total, (_, past) in zip(sums, terms, strict=True):
        total.addcmul_((blocks.past * past)[..., None], weights.decay_in)
    return sums


def _backward_blocks(weights: Weights, blocks: Block, y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor,
                     timex: str) -> tuple[Tensor, ...]:
    x = blocks.x
    v = blocks.v
    den = _sums(weights, blocks, timex, (x, blocks.b))[0]
    lost = den <= LOST
    grad_num = torch.where(lost, 0.0, grad_y / den)
    grad_den = -grad_num * y
    own_num = grad_num * blocks.own[..., None]
    grad_lag, grad_sums = TimeX(timex).backward(
        weights.lag, _stack(x * v, x), _stack(own_num, grad_den * blocks.own[..., None]))
    grad_xv, grad_x = grad_sums.view(2, *x.shape)

    grad_in = _sum_rows(grad_num * (blocks.past * blocks.a)[..., None] + grad_den * (blocks.past * blocks.b)[..., None])
    local_a = blocks.past * _weighted_sum(grad_num, weights.decay_in)
    local_b = blocks.past * _weighted_sum(grad_den, weights.decay_in)
    grad_old, to_a, to_b, grad_a, grad_b = _backward_states(blocks, local_a, local_b, grad_a, grad_b)

    grad_xv = grad_xv + to_a[..., None] * weights.decay_out
    grad_x = grad_x + to_b[..., None] * weights.decay_out
    grad_out = _sum_rows(to_a[..., None] * x * v + to_b[..., None] * x)
    grad_k = x * (grad_xv * v + grad_x)
    grad_v = x * grad_xv + torch.where(lost, grad_y, 0.0)
    grad_w = _backward_decay(weights, grad_lag, grad_in, grad_out, grad_old)
    # grad_u is not computed from grad_lag, in which the terms of v and of y are separate sums that may nearly cancel.
    grad_u = weights.lag[:, -1] * _sum_rows(own_num * x * (v - y)).sum(-1)
    return grad_w, grad_u, _by_time(grad_k), _by_time(grad_v), grad_a, grad_b


def _backward_states(blocks: Block, local_a: Tensor, local_b: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of e^(Nw), of each block's own sums a and b, and of the initial a and b."""
    to_a = torch.empty_like(local_a)
    to_b = torch.empty_like(local_b)
    grad_old = torch.zeros_like(grad_a[0])
    for j in reversed(range(local_a.shape[1])):
        old = blocks.old[:, j]
        added = blocks.added[:, j]
        to_a[:, j] = grad_a * added
        to_b[:, j] = grad_b * added
        grad_old += (old * (grad_a * blocks.a[:, j] + grad_b * blocks.b[:, j])).sum(0)
        grad_a, grad_b = grad_a * old + local_a[:, j], grad_b * old + local_b[:, j]
    return grad_old, to_a, to_b, grad_a, grad_b


def _backward_decay(weights: Weights, grad_lag: Tensor, grad_in: Tensor, grad_out: Tensor, grad_old: Tensor) -> Tensor:
    """Returns the gradient of w.

    Each table except lag 0 is e^(steps * w), and contributes the sum of steps * table * gradient.
    """
    N = len(weights.steps)
    by_lag = (grad_lag * weights.lag).flip(-1)
    grad_w = by_lag[:, 1:] @ weights.steps[:-1] + N * grad_old
    grad_w += (grad_in * weights.decay_in + (grad_out * weights.decay_out).flip(-1)) @ weights.steps
    return grad_w


def _by_block(tensor: Tensor, N: int) -> Tensor:
    """Reshapes (B,T,C) to (B,n,C,N)."""
    B, T, C = tensor.shape
    return tensor.view(B, T // N, N, C).transpose(2, 3).contiguous()


def _by_time(tensor: Tensor) -> Tensor:
    """Reshapes (B,n,C,N) to (B,T,C)."""
    B, n, C, N = tensor.shape
    return tensor.transpose(2, 3).reshape(B, n * N, C)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors).flatten(0, 2)


def _weighted_sum(tensor: Tensor, table: Tensor) -> Tensor:
    return (tensor * table).sum(-1)


def _sum_rows(tensor: Tensor) -> Tensor:
    return tensor.sum((0, 1))
