"""The scan advances all chunks by a step in the same PyTorch operation, and rescales by powers of 2.

There are two passes over the chunks of S steps. The first pass sums each chunk's contribution to the state. A loop over the
chunks turns the sums into the state before each chunk. From these states the second pass computes y. Each operation is
elementwise over all batches, channels and chunks of a segment, which takes some 30 S operations, plus 19 per chunk. S is about
the square root of T, at most 32. A segment is the whole sequence, or on a CPU as many chunks as stay in the cache.

As in taichi_scan, e^k = m * 2^n with an integer n, and the state (a, b) is scaled by 2^-P, where P follows the larger exponent,
so no spread of k loses precision. |k|, |p| and |time_first| are clamped to 1.1e7, and e^(u+k) relative to the state to 2^64.

The backward stores m and n, two tensors of the size of k, and recomputes eight tensors of the size of a segment for the reverse
recurrence, which is linear and takes the same two passes.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.registry import Requires
from kernels.wkv4 import decay_exponent

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))

LONGEST = 32                 # largest S: the mantissa of e^w, within [0.7, 1.4], has a power of at most 2^16 over a chunk
IN_CACHE = 2**17           # largest number of elements of one operation on a CPU
LIMIT = 1.1e7                # above LIMIT, float32 has no fraction
LN_2, LN_2_HIGH, LN_2_LOW = math.log(2), 0.693359375, -2.1219444005469058e-4


class Weights(NamedTuple):
    """Mantissas and exponents (C,) of e^w, e^(S w), e^(lag w) for each step's lag to the end of the chunk, and e^u."""

    decay: tuple[Tensor, Tensor]
    over_chunk: tuple[Tensor, Tensor]
    lags: list[tuple[Tensor, Tensor]]
    first: tuple[Tensor, Tensor]


class State(NamedTuple):
    """The state a 2^P and b 2^P before each of n chunks (B,n,C), or a single state (B,C)."""

    a: Tensor
    b: Tensor
    P: Tensor


class Chunks(NamedTuple):
    """The steps of the chunks. Each of S steps has m and n of e^k = m 2^n, and v, (B,n,C) each."""

    m: tuple[Tensor, ...]
    n: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


class Step(NamedTuple):
    """The values of a step that the reverse recurrence reads, (B,n,C) each."""

    a: Tensor            # the state before the step
    b: Tensor
    v: Tensor
    old: Tensor          # factors of the previous state and of v in the new state
    new: Tensor
    grad_num: Tensor     # gradient of y's numerator, and the negative gradient of its denominator
    grad_den: Tensor
    grad_now: Tensor     # gradient of v through y; times gain (v - y): of k through y
    gain: Tensor


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    state = _enter(a, b, p)[0]
    y = torch.empty_like(v)
    for span, S in _segments(k):
        weights = _weights(time_decay, time_first, S)
        chunks = _chunks(k[:, span], v[:, span], S)
        before, state = _states(weights, chunks, state)
        _average(weights, chunks, before, _steps(y[:, span], S))
    scale, p = _leave(state.P)
    return y, scale * state.a, scale * state.b, p


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    state, entered = _enter(a, b, p)
    segments = _segments(k)
    parts = []
    for span, S in segments:
        weights = _weights(time_decay, time_first, S)
        chunks = _chunks(k[:, span], v[:, span], S)
        before, state = _states(weights, chunks, state)
        parts.append((weights, chunks, before, state))
    scale, _ = _leave(state.P)
    grad_a = scale * grad_a
    grad_b = scale * grad_b
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grad_w = torch.zeros_like(time_decay)
    grad_u = torch.zeros_like(time_first)
    for (span, S), part in zip(reversed(segments), reversed(parts), strict=True):
        rows = [_steps(tensor[:, span], S) for tensor in (y, grad_y, grad_k, grad_v)]
        by_w, by_u, grad_a, grad_b = _backward_chunks(*part, rows, grad_a, grad_b)
        grad_w += by_w
        grad_u += by_u
    return grad_w * decay_exponent(time_decay), grad_u, grad_k, grad_v, entered * grad_a, entered * grad_b


def _segments(k: Tensor) -> list[tuple[slice, int]]:
    """Returns segments of whole chunks of S steps, on a CPU as many as fit into the cache, then one for the rest."""
    B, T, C = k.shape
    S = min(LONGEST, math.isqrt(T))
    whole = T - T % S
    length = S * max(1, IN_CACHE // (B * C)) if k.device.type == "cpu" else whole
    spans = [(slice(start, min(start + length, whole)), S) for start in range(0, whole, length)]
    return spans + ([(slice(whole, T), T - whole)] if whole < T else [])


def _steps(tensor: Tensor, S: int) -> tuple[Tensor, ...]:
    """Splits (B,nS,C) into S views (B,n,C), one for each step of a chunk."""
    return tensor.unflatten(1, (-1, S)).unbind(2)


def _chunks(k: Tensor, v: Tensor, S: int) -> Chunks:
    m, n = _exp(k)
    return Chunks(_steps(m, S), _steps(n, S), _steps(v, S))


def _weights(time_decay: Tensor, time_first: Tensor, S: int) -> Weights:
    w = decay_exponent(time_decay.double())
    dtype = time_decay.dtype
    m, n = _exp_of(torch.arange(S + 1, device=w.device)[:, None] * w, dtype)
    lags = [*zip(m, n, strict=True)]
    return Weights(lags[1], lags[S], lags[S - 1::-1], _exp_of(time_first.double(), dtype))


def _exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns m within [1, 2) and n with e^x = m * 2^n. x - n log 2 is exact, because the high part of log 2 is short."""
    x = x.clamp(-LIMIT, LIMIT).masked_fill_(x == math.inf, math.nan)
    n = torch.floor(x * (1 / LN_2))
    return torch.sub(x, n, alpha=LN_2_HIGH).sub_(n, alpha=LN_2_LOW).exp_(), n


def _exp_of(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns m within [0.7, 1.4] and n of e^weight for a float64.

    The weight is clamped at -3 LIMIT, where the decay erases the state for any k.
    """
    weight = weight.clamp(-3 * LIMIT, LIMIT)
    n = torch.round(weight / LN_2)
    return torch.exp(weight - n * LN_2).to(dtype), n.to(dtype)


def _enter(a: Tensor, b: Tensor, p: Tensor) -> tuple[State, Tensor]:
    """Returns the initial state, rescaled, and the factor by which a and b were multiplied."""
    m, P = _exp(p)
    n = torch.frexp(b).exponent
    scale = m * torch.exp2(-n.to(m.dtype))
    return State(scale * a, scale * b, P + n), scale


def _leave(P: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factor 2^P / e^p, which rescales a and b to e^p and corrects the rounding of p, and p itself."""
    p = P * LN_2
    m, n = _exp(p)
    return torch.exp2(P - n) / m, p


def _states(weights: Weights, chunks: Chunks, state: State) -> tuple[State, State]:
    """Returns the states before each chunk, and the state after the last chunk."""
    before = []
    for a, b, P in zip(*(part.unbind(1) for part in _chunk_sums(weights, chunks)), strict=True):
        before.append(state)
        old, new, P = _factors(weights.over_chunk, state.P, 1.0, P)
        state = _normal(State(old * state.a + new * a, old * state.b + new * b, P))
    return State(*(torch.stack(part, dim=1) for part in zip(*before, strict=True))), state


def _chunk_sums(weights: Weights, chunks: Chunks) -> State:
    """Returns each chunk's contribution to the state after the chunk.

    The decays are known, so the largest exponent is computed first.
    """
    P = chunks.n[0] + weights.lags[0][1]
    for n, (_, shift) in zip(chunks.n[1:], weights.lags[1:], strict=True):
        P = torch.maximum(P, n + shift, out=P)
    a = torch.zeros_like(P)
    b = torch.zeros_like(P)
    for m, n, v, (decay, shift) in zip(*chunks, weights.lags, strict=True):
        factor = (n - P).add_(shift).exp2_().mul_(m).mul_(decay)
        a.addcmul_(factor, v)
        b.add_(factor)
    return State(a, b, P)


def _normal(state: State) -> State:
    """Returns the state, rescaled so that b is within [0.5, 1)."""
    b, n = torch.frexp(state.b)
    return State(state.a * torch.exp2(-n.to(b.dtype)), b, state.P + n)


def _factors(decay: tuple[Tensor, Tensor], P: Tensor, m: Tensor | float, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the factors of the previous state (the decay) and of v_t (e^k) in the new state, and the new P."""
    decayed = P + decay[1]
    top = torch.maximum(decayed, n)
    return decayed.sub_(top).exp2_().mul_(decay[0]), (n - top).exp2_().mul_(m), top


def _advance(factors: tuple[Tensor, Tensor, Tensor], state: State, v: Tensor) -> State:
    old, new, P = factors
    return State((old * state.a).addcmul_(new, v), (old * state.b).add_(new), P)


def _factor_now(first: tuple[Tensor, Tensor], P: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (n - P).add_(first[1]).clamp_(-64, 64).exp2_().mul_(m).mul_(first[0])


def _average(weights: Weights, chunks: Chunks, state: State, ys: tuple[Tensor, ...]) -> None:
    for m, n, v, y in zip(*chunks, ys, strict=True):
        now = _factor_now(weights.first, state.P, m, n)
        torch.div(torch.addcmul(state.a, now, v), state.b + now, out=y)
        state = _advance(_factors(weights.decay, state.P, m, n), state, v)


def _backward_chunks(weights: Weights, chunks: Chunks, before: State, after: State, rows: list[tuple[Tensor, ...]],
                     grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    ys, grad_ys, grad_ks, grad_vs = rows
    state = before
    steps = []
    for m, n, v, y, grad_y in zip(*chunks, ys, grad_ys, strict=True):
        now = _factor_now(weights.first, state.P, m, n)
        factors = _factors(weights.decay, state.P, m, n)
        over = 1 / (state.b + now)
        grad_num = grad_y * over
        gain = torch.addcmul(-state.a, v, state.b).mul_(over)      # this is v - y, and exact where the step dominates y
        steps.append(Step(state.a, state.b, v, *factors[:2], grad_num, grad_num * y, grad_num * now, gain))
        state = _advance(factors, state, v)
    rescaled = torch.exp2(state.P - torch.cat((before.P[:, 1:], after.P[:, None]), dim=1))
    grad_after, grad_a, grad_b = _gradients_of_states(steps, rescaled, grad_a, grad_b)
    return *_gradients_of_steps(steps, grad_ks, grad_vs, *grad_after), grad_a, grad_b


def _gradients_of_states(steps: list[Step], rescaled: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Any, ...]:
    """Returns the gradients of the states after each chunk, and of a and b before the first chunk."""
    own_a = torch.zeros_like(rescaled)
    own_b = torch.zeros_like(rescaled)
    old = torch.ones_like(rescaled)
    for step in reversed(steps):
        own_a, own_b = torch.addcmul(step.grad_num, own_a, step.old), torch.addcmul(-step.grad_den, own_b, step.old)
        old = old * step.old
    after = []
    for a, b, k, scale in reversed([*zip(*(part.unbind(1) for part in (own_a, own_b, old, rescaled)), strict=True)]):
        after.append((grad_a * scale, grad_b * scale))
        grad_a = a + k * after[-1][0]
        grad_b = b + k * after[-1][1]
    return tuple(torch.stack(part, dim=1) for part in zip(*reversed(after), strict=True)), grad_a, grad_b


def _gradients_of_steps(steps: list[Step], grad_ks: tuple[Tensor, ...], grad_vs: tuple[Tensor, ...],
                        grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
    grad_w = torch.zeros_like(grad_a)
    grad_u = torch.zeros_like(grad_a)
    for step, grad_k, grad_v in reversed([*zip(steps, grad_ks, grad_vs, strict=True)]):
        grad_here = step.grad_now * step.gain
        torch.addcmul(grad_here, step.new, torch.addcmul(grad_b, grad_a, step.v), out=grad_k)
        torch.addcmul(step.grad_now, step.new, grad_a, out=grad_v)
        grad_u += grad_here
        grad_w += torch.addcmul(grad_a * step.a, grad_b, step.b).mul_(step.old)
        grad_a, grad_b = torch.addcmul(step.grad_num, grad_a, step.old), torch.addcmul(-step.grad_den, grad_b, step.old)
    return grad_w.sum((0, 1)), grad_u.sum((0, 1))
