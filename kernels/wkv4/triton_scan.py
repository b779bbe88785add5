"""The scan advances all chunks of a tile together, in registers, with two passes over the chunks and a scan in between.

A program computes CHANNELS channels of one batch, in tiles of CHUNKS chunks of S steps. The program loads a tile once, and sums
each chunk's contribution to the state. A scan over these sums, at the scale of the tile's end, gives the state before each
chunk. From these states, a second pass through the chunks computes y. All loads of a tile are in flight at the same time, and
each channel has CHUNKS threads.

As in taichi_scan, e^k = m * 2^n with an integer n, and the state (a, b) is scaled by 2^-P, where P follows the larger exponent,
so no spread of k loses precision. P is computed by integer sums and maxima only, so the backward computes the same P. |k|, |p|
and |time_first| are clamped to 2.9e6, e^(u+k) relative to the state to 2^64, and time_decay to 15.5.

The backward first runs forward through all tiles, and stores the state before each tile. Then the tiles are processed from last
to first: the states inside a tile are recomputed, and the reverse recurrence, which is linear, takes the same two passes. The
extra memory is 3/32 of k.

Steps after T have weight 0 but decay the state. _leave undoes that decay. k, v, y and their gradients are read and written in
their own dtype, and all arithmetic is in float32.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",), dtypes=(torch.float32, torch.bfloat16, torch.float16))

CHANNELS, CHUNKS = 32, 4                         # one warp per chunk, one thread per channel
STEPS = 8                                        # S, steps per chunk: as many as fit into registers
OPTIONS = {"num_warps": CHUNKS, "enable_fp_fusion": True}

LIMIT = tl.constexpr(2.9e6)                      # 2^22 log 2: the sums of exponents below stay within 32 bits
LOST = tl.constexpr(15.5)                        # largest time_decay: after a decay by e^-e^15.5 the state is 0 for any k
NO_FRACTION, NO_FRACTION_BITS = tl.constexpr(1.5 * 2**23), tl.constexpr(0x4B400000)
VOID, NEVER = tl.constexpr(-2**29), tl.constexpr(-2**31 + 2**24)       # the exponents of a step and of a chunk beyond T
LOG2_E, LOG2_E_LOW = tl.constexpr(1.4426950216293335), tl.constexpr(1.925963033500913e-08)
LN_2 = tl.constexpr(0.6931471805599453)


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    B, T, C = k.shape
    y = torch.empty_like(v)
    state = [torch.empty_like(a) for _ in range(3)]
    with torch.cuda.device_of(k):
        _forward[(B * triton.cdiv(C, CHANNELS),)](time_decay, time_first, k, v, a, b, p, y, *state, T, C,
                                                  _width(C), STEPS, CHUNKS, CHANNELS, **OPTIONS)
    return y, *state


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    B, T, C = k.shape
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    states = a.new_empty(B, triton.cdiv(T, STEPS * CHUNKS), 3, C)
    grads = [torch.empty_like(a) for _ in range(4)]
    with torch.cuda.device_of(k):
        _backward[(B * triton.cdiv(C, CHANNELS),)](time_decay, time_first, k, v, a, b, p, grad_y, grad_a, grad_b, states,
                                                   grad_k, grad_v, *grads, T, C, _width(C), STEPS, CHUNKS, CHANNELS,
                                                   **OPTIONS)
    by_decay, by_first, grad_a, grad_b = grads
    return by_decay.sum(0), by_first.sum(0), grad_k, grad_v, grad_a, grad_b


def _width(C: int) -> int:
    """Returns C if the kernel is compiled for this C, which saves a sixth of the work (computing addresses), otherwise 0."""
    return C if C % CHANNELS == 0 else 0


@triton.jit
def _forward(time_decay, time_first, k, v, a, b, p, y, a_out, b_out, p_out, T, C, WIDTH: tl.constexpr,
             S: tl.constexpr, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr):
    C = WIDTH if WIDTH else C
    batch, c, here = _place(C, CHANNELS)
    w, bonus, spans = _weights(time_decay + c, time_first + c, c < C, S, CHUNKS)
    a, b, P, _entered = _enter(a + here, b + here, p + here, c < C)
    for j in range(tl.cdiv(T, CHUNKS * S)):
        start, at, step = _tile(j, batch, c, T, C, S, CHUNKS)
        ks = _load(k, start, at, step, c, T, C, S)
        vs = _load(v, start, at, step, c, T, C, S)
        ms, ns = _exps(ks, step, T, S)
        a_s, b_s, P_s, _after, a, b, P = _states(ms, ns, vs, a, b, P, w, spans, j, step < T, S, CHUNKS)
        for s in tl.static_range(S):
            now, old, new, P_s = _factors(ms[s], ns[s], P_s, w, bonus)
            _store(y, start + s * C, at, (a_s + now * vs[s]) / (b_s + now), (step + s < T) & (c < C))
            a_s, b_s = old * a_s + new * vs[s], old * b_s + new
    scale, p = _leave(P, w, T, S * CHUNKS)
    tl.store(a_out + here, scale * a, mask=c < C)
    tl.store(b_out + here, scale * b, mask=c < C)
    tl.store(p_out + here, p, mask=c < C)


@triton.jit
def _backward(time_decay, time_first, k, v, a, b, p, grad_y, grad_a, grad_b, states, grad_k, grad_v,
              to_decay, to_first, to_a, to_b, T, C, WIDTH: tl.constexpr,
              S: tl.constexpr, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr):
    C = WIDTH if WIDTH else C
    batch, c, here = _place(C, CHANNELS)
    w, bonus, spans = _weights(time_decay + c, time_first + c, c < C, S, CHUNKS)
    a, b, P, entered = _enter(a + here, b + here, p + here, c < C)
    tiles = tl.cdiv(T, S * CHUNKS)
    states += batch * tiles * 3 * C + c
    for j in range(tiles):
        tl.store(states + 3 * j * C, a, mask=c < C)
        tl.store(states + 3 * j * C + C, b, mask=c < C)
        tl.store(states + 3 * j * C + 2 * C, P.to(tl.float32, bitcast=True), mask=c < C)
        start, at, step = _tile(j, batch, c, T, C, S, CHUNKS)
        ks = _load(k, start, at, step, c, T, C, S)
        vs = _load(v, start, at, step, c, T, C, S)
        ms, ns = _exps(ks, step, T, S)
        _a, _b, _P, _after, a, b, P = _states(ms, ns, vs, a, b, P, w, spans, j, step < T, S, CHUNKS)
    scale, _p = _leave(P, w, T, S * CHUNKS)
    grad_a = scale * tl.load(grad_a + here, mask=c < C, other=0.0)
    grad_b = scale * tl.load(grad_b + here, mask=c < C, other=0.0)
    grad_w = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    grad_u = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    tl.debug_barrier()                                           # the stored states must be visible before they are loaded
    for back in range(tiles):
        j = tiles - 1 - back
        a = tl.load(states + 3 * j * C, mask=c < C, other=0.0)
        b = tl.load(states + 3 * j * C + C, mask=c < C, other=0.0)
        P = tl.load(states + 3 * j * C + 2 * C, mask=c < C, other=0.0).to(tl.int32, bitcast=True)
        start, at, step = _tile(j, batch, c, T, C, S, CHUNKS)
        ks = _load(k, start, at, step, c, T, C, S)
        vs = _load(v, start, at, step, c, T, C, S)
        gs = _load(grad_y, start, at, step, c, T, C, S)
        ms, ns = _exps(ks, step, T, S)
        a_s, b_s, P_s, P_after, _a, _b, _P = _states(ms, ns, vs, a, b, P, w, spans, j, step < T, S, CHUNKS)
        m_chunk, n_chunk, _drift = _span(w, S)
        over_chunk = m_chunk * _pow2(_clip(P_s + n_chunk - P_after, -127, 126))
        settled = _pow2(_clip(P - P_s, -126, 126))            # row 0 converts the scale before the tile to that of the tile
        steps = ()
        for s in tl.static_range(S):
            now, old, new, P_s = _factors(ms[s], ns[s], P_s, w, bonus)
            over = 1.0 / (b_s + now)
            num = over * gs[s]                                   # the gradients of y's numerator and denominator
            den = -num * (over * (a_s + now * vs[s]))
            gain = over * (vs[s] * b_s - a_s)                    # this is v - y, and exact where the step dominates y
            steps += ((a_s, b_s, old, new, num, den, num * now, num * now * gain),)
            a_s, b_s = old * a_s + new * vs[s], old * b_s + new
        rescaled = _pow2(_clip(P_s - P_after, -126, 126))
        ga, gb, grad_a, grad_b = _gradients_of_states(steps, rescaled, over_chunk, settled, grad_a, grad_b, S, CHUNKS)
        for s in tl.static_range(S - 1, -1, -1):
            a_s, b_s, old, new, num, den, by_now, by_here = steps[s]
            _store(grad_k, start + s * C, at, by_here + new * (ga * vs[s] + gb), (step + s < T) & (c < C))
            _store(grad_v, start + s * C, at, by_now + new * ga, (step + s < T) & (c < C))
            grad_u += by_here
            grad_w += tl.where(step + s < T, old * (ga * a_s + gb * b_s), 0.0)
            ga, gb = num + old * ga, den + old * gb
    tl.store(to_a + here, entered * grad_a, mask=c < C)
    tl.store(to_b + here, entered * grad_b, mask=c < C)
    tl.store(to_decay + here, w[0] * tl.sum(grad_w, 0, keep_dims=True), mask=c < C)
    tl.store(to_first + here, tl.sum(grad_u, 0, keep_dims=True), mask=c < C)


@triton.jit
def _place(C, CHANNELS: tl.constexpr):
    """Returns the program's batch, channels [1, CHANNELS], and the channels' offsets in a (B,C) tensor."""
    blocks = tl.cdiv(C, CHANNELS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return batch, c, batch * C + c


@triton.jit
def _row(CHUNKS: tl.constexpr):
    return tl.arange(0, CHUNKS)[:, None]


@triton.jit
def _tile(j, batch, c, T, C, S: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the offset of tile j in a (B,T,C) tensor, the relative offset of each chunk's first step, and its index."""
    first = j * (S * CHUNKS)
    return (batch * T + first) * C, _row(CHUNKS) * (S * C) + c, first + _row(CHUNKS) * S


@triton.jit
def _load(x, start, at, step, c, T, C, S: tl.constexpr):
    rows = ()
    for s in tl.static_range(S):
        rows += (tl.load(x + (start + s * C) + at, mask=(step + s < T) & (c < C), other=0.0).to(tl.float32),)
    return rows


@triton.jit
def _store(x, first, at, values, mask):
    tl.store(x + first + at, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _exps(ks, step, T, S: tl.constexpr):
    """Returns m and n of e^k = m 2^n for each step, with m = 0 beyond T."""
    ms = ()
    ns = ()
    for s in tl.static_range(S):
        m, n = _exp(ks[s])
        ms += (tl.where(step + s < T, m, 0.0),)
        ns += (tl.where(step + s < T, n, VOID),)
    return ms, ns


@triton.jit
def _weights(time_decay, time_first, live, S: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns (w, m, n, log2 m) with e^w = m 2^n and m within [0.7, 1.4], the factor e^u, and three decays.

    The decays are over a tile, from each chunk's start to the tile's end, and from each chunk's end to the tile's end.
    """
    m, n = _exp(tl.minimum(tl.load(time_decay, mask=live, other=0.0), LOST, propagate_nan=tl.PropagateNan.ALL))
    w = -m * _pow2(tl.maximum(n, -127))
    power = tl.floor(tl.fma(w, LOG2_E, 0.5))
    drift = tl.fma(w, LOG2_E_LOW, tl.fma(w, LOG2_E, -power))
    w = (w, tl.exp2(drift), power.to(tl.int32), drift)
    left = S * (CHUNKS - _row(CHUNKS))
    return w, _exp(tl.load(time_first, mask=live, other=0.0)), (_span(w, S * CHUNKS), _span(w, left), _span(w, left - S))


@triton.jit
def _span(w, lag):
    """Returns m within [1, 2), n and log2 m of e^(w lag) = m 2^n. A sum inside floor could become an fma and change n."""
    drift = w[3] * lag
    power = tl.floor(drift)
    return tl.exp2(drift - power), lag * w[2] + power.to(tl.int32), drift - power


@triton.jit
def _enter(a, b, p, live):
    """Returns the initial state with b within [1, 2), with P, and the factor by which a and b were multiplied."""
    a = tl.load(a, mask=live, other=0.0)
    b = tl.load(b, mask=live, other=0.0)
    m, P = _exp(tl.load(p, mask=live, other=0.0))
    n = _clip((b.to(tl.int32, bitcast=True) >> 23) - 127, -126, 126)
    scale = m * _pow2(-n)
    return scale * a, scale * b, P + n, scale


@triton.jit
def _leave(P, w, T, TILE: tl.constexpr):
    """Returns the factor that converts the last tile's final state to the state after step T, scaled by e^p, and p."""
    late, n, _drift = _span(w, T - tl.cdiv(T, TILE) * TILE)
    p = LN_2 * (P + n).to(tl.float32)
    m, power = _exp(p)
    return late * _pow2(_clip(P + n - power, -127, 127)) / m, p


@triton.jit
def _states(ms, ns, vs, a, b, P, w, spans, j, seen, S: tl.constexpr, CHUNKS: tl.constexpr):
    """Computes from the state before a tile the states before each chunk, P after each chunk, and the state after the tile."""
    a_own, b_own, P_own = _chunk_sums(ms, ns, vs, w, S)
    m_tile, n_tile, drift = spans[0]
    m_before, n_before, _drift = spans[1]
    m_after, n_after, _drift = spans[2]
    settled = (tl.floor((j + 1) * drift) - tl.floor(j * drift)).to(tl.int32)    # the power of a tile's mantissa
    decay = m_tile * _pow2(-settled)
    P = P + n_tile + settled
    a_own = m_after * a_own                                      # the sums are now those at the tile's end
    b_own = m_after * b_own
    P_own = tl.where(seen, P_own + n_after, NEVER)
    nothing = tl.zeros_like(a_own)
    never = tl.zeros_like(P_own) + NEVER
    a_own, b_own, P_own, a_0, b_0, P_0 = tl.associative_scan((a_own, b_own, P_own, nothing, nothing, never), 0, _accumulate)
    a_own, b_own, P_own = _join(a_own, b_own, P_own, decay * a, decay * b, P)
    a_0, b_0, P_0 = _join(a_0, b_0, P_0, decay * a, decay * b, P)
    over = 1 / m_before
    end = _row(CHUNKS) == CHUNKS - 1
    a = tl.sum(tl.where(end, a_own, 0.0), 0, keep_dims=True)
    b = tl.sum(tl.where(end, b_own, 0.0), 0, keep_dims=True)
    P = tl.max(tl.where(end, P_own, NEVER), 0, keep_dims=True)
    return over * a_0, over * b_0, P_0 - n_before, P_own - n_after, a, b, P


@triton.jit
def _accumulate(a_0, b_0, P_0, a_0x, b_0x, P_0x, a_1, b_1, P_1, a_1x, b_1x, P_1x):
    """Combines the sums of two adjacent runs of chunks, for a scan. Names with _x are sums without the last chunk."""
    a, b, P = _join(a_0, b_0, P_0, a_1, b_1, P_1)
    a_x, b_x, P_x = _join(a_0, b_0, P_0, a_1x, b_1x, P_1x)
    return a, b, P, a_x, b_x, P_x


@triton.jit
def _chunk_sums(ms, ns, vs, w, S: tl.constexpr):
    """Returns each chunk's contribution to the state after the chunk.

    The decays are known, so the largest exponent is computed first.
    """
    P = ns[0] + (S - 1) * w[2]
    for s in tl.static_range(1, S):
        P = tl.maximum(P, ns[s] + (S - 1 - s) * w[2])
    a = tl.zeros_like(vs[0])
    b = tl.zeros_like(vs[0])
    for s in tl.static_range(S):
        factor = ms[s] * _pow2(tl.maximum(ns[s] + (S - 1 - s) * w[2] - P, -127))
        a, b = w[1] * a + factor * vs[s], w[1] * b + factor
    return a, b, P


@triton.jit
def _join(a_0, b_0, P_0, a_1, b_1, P_1):
    """Returns the sum of two states."""
    P = tl.maximum(P_0, P_1)
    scale_0 = _pow2(tl.maximum(P_0 - P, -127))
    scale_1 = _pow2(tl.maximum(P_1 - P, -127))
    return scale_0 * a_0 + scale_1 * a_1, scale_0 * b_0 + scale_1 * b_1, P


@triton.jit
def _factors(m, n, P, w, bonus):
    """Returns e^(u+k) at the previous state's scale, the factors of that state and of v_t in the new state, and the new P."""
    now = bonus[0] * m * _pow2(_clip(bonus[1] + n - P, -64, 64))
    lead = n - (P + w[2])
    up = tl.maximum(lead, 0)
    return now, w[1] * _pow2(-tl.minimum(up, 127)), m * _pow2(tl.maximum(lead - up, -127)), P + w[2] + up


@triton.jit
def _gradients_of_states(steps, rescaled, old, settled, grad_a, grad_b, S: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the gradients of the states after each chunk and before the tile, from the gradient after the tile."""
    a = tl.zeros_like(rescaled)
    b = tl.zeros_like(rescaled)
    for s in tl.static_range(S - 1, -1, -1):
        a, b = steps[s][4] + steps[s][2] * a, steps[s][5] + steps[s][2] * b
    nothing = tl.zeros_like(a)
    a, b, old, a_1, b_1, old_1 = tl.associative_scan((a, b, old, nothing, nothing, nothing + 1), 0, _reach, reverse=True)
    a_1 = a_1 + old_1 * grad_a
    b_1 = b_1 + old_1 * grad_b
    start = _row(CHUNKS) == 0
    grad_a = tl.sum(tl.where(start, settled * (a + old * grad_a), 0.0), 0, keep_dims=True)
    grad_b = tl.sum(tl.where(start, settled * (b + old * grad_b), 0.0), 0, keep_dims=True)
    return rescaled * a_1, rescaled * b_1, grad_a, grad_b


@triton.jit
def _reach(a_1, b_1, old_1, a_1x, b_1x, old_1x, a_0, b_0, old_0, a_0x, b_0x, old_0x):
    """Combines the gradients of two adjacent runs of chunks, the later first. Names with _x leave out the first chunk."""
    a = a_0 + old_0 * a_1
    b = b_0 + old_0 * b_1
    old = old_0 * old_1
    return a, b, old, a_0x + old_0x * a_1, b_0x + old_0x * b_1, old_0x * old_1


@triton.jit
def _exp(x):
    """Returns m within [0.7, 1.4] and n with e^x = m 2^n. Adding NO_FRACTION rounds x log2 e to an integer."""
    x = tl.where(x == float("inf"), float("nan"), x)
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    rounded = tl.fma(x, LOG2_E, NO_FRACTION)
    rest = tl.fma(x, LOG2_E_LOW, tl.fma(x, LOG2_E, -(rounded - NO_FRACTION)))    # Triton 3.7 cannot interpret constant - tensor
    return tl.exp2(rest), rounded.to(tl.int32, bitcast=True) - NO_FRACTION_BITS


@triton.jit
def _pow2(n):
    """Returns 2^n for n within [-126, 127], and 0 for n = -127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _clip(n, low, high):
    return tl.minimum(tl.maximum(n, low), high)                  # before Triton 3.9 tl.clamp does not support integers
