"""Tensor cores compute chunks of 16 steps as matrix products, and only the state is passed from chunk to chunk.

Within a chunk, W_t is w_1 ... w_t, and D is W_16. With one row per step, Qr = r W, Qa = a W_{t-1}, Kb = b / W, Kk = k / W, and

    AB, AK = tril(Qa Kb^T, -1), tril(Qa Kk^T, -1)      RB, RK = tril(Qr Kb^T), tril(Qr Kk^T)      X = (I - AB)^-1

Then a chunk's results are linear in S, the state before it, and the results of its backward pass in G = dL/dS after it:

    sa = S (X Qa)^T + X AK v             y  = S (Qr + RB X Qa)^T + (RB X AK + RK) v             S <- S D + sa^T D Kb + v^T D Kk
    gz = G (X^T D Kb)^T + (RB X)^T gy    gv = G (D Kk + (X AK)^T D Kb)^T + (RB X AK + RK)^T gy  G <- G D + gz^T Qa + gy^T Qr

    _prepare    one program per chunk computes these factors
    _scan       one program per head and 16 rows of S computes sa, y and S from chunk to chunk, or gz, gv and G backwards
    _gradients  one program per chunk and 32 columns computes the gradients of r, log_w, k, a and b from S, G, sa and gz

log_w's gradient at t is a sum over all pairs of a write before t and a read at or after t. The pairs of steps s < t <= u within
a chunk are summed in blocks of 2, 4, 8 and 16 steps, with s in the first half of a block and u in the second. For each t of the
second half, the sum is P K times Q over u >= t. For each t of the first half, the sum is P^T Q times K over s < t. All sums are
matrix products, and nothing is ever subtracted.

There are two precisions. EXACT, for float32 and float16 inputs, computes each product as three TF32 products, and tensors
between the kernels are float32. FAST, for bfloat16 inputs, computes bfloat16 products with float32 sums, and tensors between
the kernels are bfloat16, including the states that backward reads. _scan itself holds the state in float32 registers. cases.py
has tolerances for both precisions.

forward saves only the inputs. backward recomputes the states, and needs 12 + N / 8 tensors of the size of v.
Source: the WY representation of DeltaNet (arXiv 2406.06484, section 3), here with the decays of RWKV-7 (arXiv 2503.14456).
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.registry import KernelUnavailable, Requires

CHUNK = 16
N_SIZES = (16, 32, 64, 128, 256)

REQUIRES = Requires(packages=("triton",), devices=("cuda",), dtypes=(torch.float32, torch.bfloat16, torch.float16),
                    rounded=(torch.bfloat16,), T_multiple=CHUNK, N_sizes=N_SIZES)

SIZES = ("T", "H")                   # these are not specialised, so that one compilation serves all B, T and H


class Precision(NamedTuple):
    """The precision of the products, with launch parameters (tests/triton_resources.txt lists the registers).

    Attributes:
        kind: the dtype of tensors between the kernels.
        products: the argument P of _dot.
        prepare: the columns per block and the warps of _prepare.
        warps_per_64: the warps of _scan per 64 channels of a head.
        stages: the pipeline stages of the loads in _scan.
        gradients: the columns per program, the rows per block and the warps of _gradients.
    """

    kind: torch.dtype
    products: str
    prepare: tuple[int, int]
    warps_per_64: int
    stages: int
    gradients: tuple[int, int, int]


EXACT = Precision(torch.float32, "tf32x3", (32, 4), 2, 2, (32, 16, 4))
FAST = Precision(torch.bfloat16, "bf16", (64, 2), 1, 3, (32, 32, 2))
ROWS = 16                            # rows of S per program of _scan: the smallest tile of a tensor core


class Factors(NamedTuple):
    """The inputs of _scan, which are (chunks,16,N), except for decay (chunks,N).

    sa = S reads^T + offset; y = S out_reads^T + out_offset; S <- S decay + sa^T writes_sa + v^T writes_v.
    """

    reads: Tensor
    offset: Tensor
    out_reads: Tensor
    out_offset: Tensor
    writes_sa: Tensor
    writes_v: Tensor
    decay: Tensor


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    with torch.cuda.device_of(v):
        factors, _ = _factors(r, log_w, k, v, a, b)
        _run_scan(factors, v, state, after, y=y)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state)]
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, grad_before = grads
    precision = _precision(v)
    count, H, N = _count_chunks(v), *v.shape[2:]
    states, Gs = (v.new_empty(count, N, N, dtype=precision.kind) for _ in range(2))
    sa, gz = (v.new_empty(count, CHUNK, N, dtype=precision.kind) for _ in range(2))
    columns, rows, warps = precision.gradients
    with torch.cuda.device_of(v):
        factors, reverse = _factors(r, log_w, k, v, a, b, grad_y)
        _run_scan(factors, v, state, torch.empty_like(state), states, sa)
        _run_scan(reverse, grad_y, grad_state, grad_before, Gs, gz, grad_v, reverse=True)
        columns = min(columns, N)
        rows = min(rows, N) if N <= 64 else ROWS                 # larger blocks would spill registers for wide heads
        _gradients[count, N // columns](
            r, log_w, k, v, a, b, grad_y, sa, gz, states, Gs, grad_r, grad_log_w, grad_k, grad_a, grad_b,
            v.shape[1], H, N, CHUNK, columns, rows, _products(precision), num_warps=warps, enable_fp_fusion=True)
    return tuple(grads)


def _factors(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
             grad_y: Tensor | None = None) -> tuple[Factors, Factors]:
    """Returns the factors of the forward pass and of the backward pass through the chunks.

    Without grad_y, only the forward factors are valid. With grad_y, the forward factors cannot be used to compute y.
    """
    T, H, N = v.shape[1:]
    count, precision, backward = _count_chunks(v), _precision(v), grad_y is not None
    new = [v.new_empty(count, CHUNK, N, dtype=precision.kind) for _ in range(10 if backward else 6)]
    reads, offset, q, y0, writes_sa, writes_v, *more = new
    reverse_reads, reverse_offset, gv_reads, Qa = more or (reads,) * 4
    decay = v.new_empty(count, N, dtype=torch.float32)
    columns, warps = precision.prepare
    _prepare[count,](r, log_w, k, v, a, b, v if grad_y is None else grad_y, *new[:6], decay,
                     reverse_reads, reverse_offset, gv_reads, Qa, T, H, N, CHUNK, min(columns, N), backward,
                     _products(precision), num_warps=warps, enable_fp_fusion=True)
    return (Factors(reads, offset, q, y0, writes_sa, writes_v, decay),
            Factors(reverse_reads, reverse_offset, gv_reads, y0, Qa, q, decay))


def _run_scan(factors: Factors, v: Tensor, before: Tensor, after: Tensor, states: Tensor | None = None,
              sa: Tensor | None = None, y: Tensor | None = None, reverse: bool = False) -> None:
    """Stores the state after the last step in `after`, and, if passed, the states before each chunk, sa and y."""
    B, T, H, N = v.shape
    precision = _precision(v)
    _scan[B * H, N // ROWS](*factors, v, before, after, after if states is None else states, after if sa is None else sa,
                            after if y is None else y, T, H, N, CHUNK, ROWS, states is not None, y is not None, reverse,
                            _products(precision), num_warps=min(4, precision.warps_per_64 * max(1, N // 64)),
                            num_stages=precision.stages, enable_fp_fusion=True)


def _count_chunks(v: Tensor) -> int:
    B, T, H, N = v.shape
    if N not in N_SIZES:
        raise KernelUnavailable(f"triton_v1 supports heads of up to {N_SIZES[-1]} channels; got {N}: use triton_v0")
    return B * H * (T // CHUNK)


def _precision(v: Tensor) -> Precision:
    return FAST if v.dtype == torch.bfloat16 else EXACT


def _products(precision: Precision) -> str:
    """Returns the argument P of _dot. Triton's interpreter lacks bfloat16 products, so there _dot rounds float32 numbers."""
    return precision.products if precision is EXACT or isinstance(_scan, JITFunction) else "rounded"


@triton.jit
def _rounded(x):
    """Returns x rounded to bfloat16, ties to even, but in float32. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit
def _dot(x, y, P: tl.constexpr):
    if P == "bf16":
        return tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    elif P == "rounded":
        return tl.dot(_rounded(x), _rounded(y))
    else:
        return tl.dot(x, y, input_precision=P)


@triton.jit
def _store(to, x, P: tl.constexpr):
    if P == "rounded" and to.dtype.element_ty == tl.bfloat16:            # the interpreter's own conversion truncates
        x = _rounded(x)
    tl.store(to, x.to(to.dtype.element_ty))


@triton.jit
def _place(T, H, N: tl.constexpr, C: tl.constexpr):
    """Returns the index of the program's chunk, and the offset of the chunk's first step in a tensor (B,T,H,N)."""
    index = tl.program_id(0).to(tl.int64)
    chunks = T // C
    head = index // chunks
    return index, ((head // H * T + index % chunks * C) * H + head % H) * N


@triton.jit
def _finite(x):
    """Returns x with 0 in place of nonfinite values, which products would spread to earlier steps.

    NaN is added later to the results that depend on such a value.
    """
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _inverse(ab, C: tl.constexpr, P: tl.constexpr):
    """Returns (I - ab)^-1 for a strictly lower triangular ab, from the inverses of blocks of 1, 2, 4 and 8 steps."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    apart = t ^ s
    X = tl.where(apart == 0, 1.0, tl.where(apart < 2, ab, 0.0))
    for level in tl.static_range(1, 4):
        between = (apart >= 2**level) & (apart < 2 * 2**level)
        X += _dot(_dot(X, tl.where(between, ab, 0.0), P), X, P)
    return X


@triton.jit(do_not_specialize=SIZES)
def _prepare(r, log_w, k, v, a, b, grad_y, reads, offset, q, y0, writes_sa, writes_v, decay, reverse_reads, reverse_offset,
             gv_reads, qa, T, H, N: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
             P: tl.constexpr):
    """Computes a chunk's factors, COLUMNS columns at a time. BACKWARD adds the backward pass's factors, but not those of y."""
    index, at = _place(T, H, N, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    AB = tl.zeros([C, C], tl.float32)
    AK = tl.zeros([C, C], tl.float32)
    RB = tl.zeros([C, C], tl.float32)
    RK = tl.zeros([C, C], tl.float32)
    bad = tl.zeros([C, COLUMNS], tl.float32)
    bad_r = tl.zeros([C, COLUMNS], tl.float32)
    for first in range(0, N, COLUMNS):
        here = at + t * (H * N) + first + tl.arange(0, COLUMNS)[None, :]
        lw = tl.load(log_w + here)
        r_t = tl.load(r + here).to(tl.float32)
        k_t = tl.load(k + here).to(tl.float32)
        a_t = tl.load(a + here).to(tl.float32)
        b_t = tl.load(b + here).to(tl.float32)
        bad += (lw + k_t + a_t + b_t) * 0.0
        bad_r += r_t * 0.0
        lw = _finite(lw)
        total = tl.cumsum(lw, 0)
        over = tl.exp(-total)
        Qr = _finite(r_t) * tl.exp(total)
        Qa = _finite(a_t) * tl.exp(total - lw)
        Kb = tl.trans(_finite(b_t) * over)
        Kk = tl.trans(_finite(k_t) * over)
        AB += _dot(Qa, Kb, P)
        AK += _dot(Qa, Kk, P)
        RB += _dot(Qr, Kb, P)
        RK += _dot(Qr, Kk, P)
    X = _inverse(tl.where(s < t, AB, 0.0), C, P)
    AK = tl.where(s < t, AK, 0.0)
    RBX = _dot(tl.where(s <= t, RB, 0.0), X, P)
    XAK = _dot(X, AK, P)
    Y = _dot(RBX, AK, P) + tl.where(s <= t, RK, 0.0)
    nan_head = tl.sum(bad, 1)
    nan_step = tl.cumsum(nan_head, 0) + tl.sum(bad_r, 1)
    nan_state = tl.sum(nan_head, 0)
    for first in range(0, N, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        here = at + t * (H * N) + j[None, :]
        to = index * C * N + t * N + j[None, :]
        lw = _finite(tl.load(log_w + here))
        v_t = tl.load(v + here).to(tl.float32)
        total = tl.cumsum(lw, 0)
        over = tl.exp(-total)
        D = tl.exp(tl.sum(lw, 0))
        Qr = _finite(tl.load(r + here).to(tl.float32)) * tl.exp(total)
        Qa = _finite(tl.load(a + here).to(tl.float32)) * tl.exp(total - lw)
        DKb = _finite(tl.load(b + here).to(tl.float32)) * over * D[None, :]
        DKk = _finite(tl.load(k + here).to(tl.float32)) * over * D[None, :]
        _store(reads + to, _dot(X, Qa, P), P)
        _store(offset + to, _dot(XAK, _finite(v_t), P), P)
        _store(writes_sa + to, DKb, P)
        _store(writes_v + to, DKk, P)
        _store(decay + index * N + j, D + nan_state, P)
        if BACKWARD:
            gy = _finite(tl.load(grad_y + here).to(tl.float32))
            _store(reverse_reads + to, _dot(tl.trans(X), DKb, P), P)
            _store(reverse_offset + to, _dot(tl.trans(RBX), gy, P), P)
            _store(gv_reads + to, DKk + _dot(tl.trans(XAK), DKb, P), P)
            _store(y0 + to, _dot(tl.trans(Y), gy, P), P)
            _store(qa + to, Qa, P)
            _store(q + to, Qr, P)
        else:
            poison = tl.cumsum(v_t * 0.0, 0) + nan_step[:, None]
            _store(q + to, Qr + _dot(RBX, Qa, P), P)
            _store(y0 + to, _dot(Y, _finite(v_t), P) + poison, P)


@triton.jit(do_not_specialize=SIZES)
def _scan(reads, offset, out_reads, out_offset, writes_sa, writes_v, decay, v, before, after, states, sas, y, T, H,
          N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr, OUTPUT: tl.constexpr, REVERSE: tl.constexpr,
          P: tl.constexpr):
    """Computes ROWS rows of a head's state through all chunks. KEEP stores sa, and S before each chunk. OUTPUT stores y."""
    head = tl.program_id(0).to(tl.int64)
    chunks = T // C
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, N)
    t = tl.arange(0, C)
    whole = t[:, None] * N + j[None, :]
    part = t[None, :] * N + i
    S = tl.load(before + head * N * N + i * N + j[None, :])
    for n in range(chunks):
        chunk = chunks - 1 - n if REVERSE else n
        index = head * chunks + chunk
        at = index * C * N
        rows = ((head // H * T + chunk * C) * H + head % H) * N + t[None, :] * (H * N) + i
        if KEEP:
            _store(states + index * N * N + i * N + j[None, :], S, P)
        v_t = tl.load(v + rows).to(tl.float32)                   # a NaN is kept, and makes its row of S NaN
        sa = _dot(S, tl.trans(tl.load(reads + at + whole).to(tl.float32)), P) + tl.load(offset + at + part).to(tl.float32)
        if KEEP:
            _store(sas + at + part, sa, P)
        if OUTPUT:
            y_state = _dot(S, tl.trans(tl.load(out_reads + at + whole).to(tl.float32)), P)
            _store(y + rows, y_state + tl.load(out_offset + at + part).to(tl.float32), P)
        by_sa = tl.load(writes_sa + at + whole).to(tl.float32)
        by_v = tl.load(writes_v + at + whole).to(tl.float32)
        # the sum is computed outside of the tensor cores, which truncate
        S = S * tl.load(decay + index * N + j)[None, :] + (_dot(sa, by_sa, P) + _dot(v_t, by_v, P))
    tl.store(after + head * N * N + i * N + j[None, :], S)


@triton.jit(do_not_specialize=SIZES)
def _gradients(r, log_w, k, v, a, b, grad_y, sas, gzs, states, Gs, grad_r, grad_log_w, grad_k, grad_a, grad_b, T, H,
               N: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr):
    """Computes the gradients of r, log_w, k, a and b in COLUMNS columns j of a chunk, as [j, t].

    a reads the state before a step, and r reads the state after the step. So a and gz are shifted to the previous step, and
    then combine with writes as r and gy do. The first step of a and gz, which reads only the state before the chunk, is moved
    to the end.
    """
    index, at = _place(T, H, N, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    za = tl.zeros([C, C], tl.float32)                            # P: gz sa^T, gz v^T, gy sa^T, gy v^T, with one row for each u
    zv = tl.zeros([C, C], tl.float32)
    ya = tl.zeros([C, C], tl.float32)
    yv = tl.zeros([C, C], tl.float32)
    by_a = tl.zeros([COLUMNS, C], tl.float32)                    # contributions of S and G to the gradients of Qa, Qr, Kb, Kk
    by_r = tl.zeros([COLUMNS, C], tl.float32)
    by_b = tl.zeros([COLUMNS, C], tl.float32)
    by_k = tl.zeros([COLUMNS, C], tl.float32)
    ends = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, N, ROWS):
        i = first + tl.arange(0, ROWS)[None, :]
        gz = tl.load(gzs + index * C * N + (t + 1) % C * N + i).to(tl.float32)
        gy = tl.load(grad_y + at + t * (H * N) + i).to(tl.float32)
        sa = tl.load(sas + index * C * N + t * N + i).to(tl.float32)
        v_t = tl.load(v + at + t * (H * N) + i).to(tl.float32)
        S = tl.load(states + index * N * N + i * N + j).to(tl.float32)
        G = tl.load(Gs + index * N * N + i * N + j).to(tl.float32)
        za += _dot(gz, tl.trans(sa), P)
        zv += _dot(gz, tl.trans(v_t), P)
        ya += _dot(gy, tl.trans(sa), P)
        yv += _dot(gy, tl.trans(v_t), P)
        by_a += _dot(S, tl.trans(gz), P)
        by_r += _dot(S, tl.trans(gy), P)
        by_b += _dot(G, tl.trans(sa), P)
        by_k += _dot(G, tl.trans(v_t), P)
        ends += S * G
    last = s == C - 1
    here = at + s * (H * N) + j
    earlier = at + (s + 1) % C * (H * N) + j
    lw = tl.load(log_w + here)
    total = tl.cumsum(lw, 1)
    D = tl.exp(tl.sum(lw, 1))[:, None]
    W = tl.exp(total)
    over = tl.exp(-total)
    W_a = tl.where(last, 1.0, W)
    Qr = tl.load(r + here).to(tl.float32) * W
    Qa = tl.load(a + earlier).to(tl.float32) * W_a
    Kb = tl.load(b + here).to(tl.float32) * over
    Kk = tl.load(k + here).to(tl.float32) * over
    by_b *= D
    by_k *= D
    za = tl.where((s <= t) & (t < C - 1), za, 0.0)
    zv = tl.where((s <= t) & (t < C - 1), zv, 0.0)
    ya = tl.where(s <= t, ya, 0.0)
    yv = tl.where(s <= t, yv, 0.0)
    _store(grad_r + here, (by_r + _dot(Kb, tl.trans(ya), P) + _dot(Kk, tl.trans(yv), P)) * W, P)
    _store(grad_a + earlier, (by_a + _dot(Kb, tl.trans(za), P) + _dot(Kk, tl.trans(zv), P)) * W_a, P)
    _store(grad_b + here, (by_b + _dot(Qa, za, P) + _dot(Qr, ya, P)) * over, P)
    _store(grad_k + here, (by_k + _dot(Qa, zv, P) + _dot(Qr, yv, P)) * over, P)
    # log_w's gradient sums S before the chunk with G after it, writes before t with G, S with reads from t on, and the pairs
    before = tl.where(t < s, 1.0, 0.0)
    from_on = tl.where(t >= s, 1.0, 0.0)
    glw = tl.sum(ends, 1)[:, None] * D + _dot(Kb * by_b + Kk * by_k, before, P)
    glw += _dot(Qr * by_r + tl.where(last, 0.0, Qa * by_a), from_on, P)
    for level in range(4):
        half = 1 << level
        across = (s < t) & ((t ^ s) >= half) & ((t ^ s) < 2 * half)
        za_half = tl.where(across, za, 0.0)
        zv_half = tl.where(across, zv, 0.0)
        ya_half = tl.where(across, ya, 0.0)
        yv_half = tl.where(across, yv, 0.0)
        sum_a = _dot(Kb, tl.trans(za_half), P) + _dot(Kk, tl.trans(zv_half), P)
        sum_r = _dot(Kb, tl.trans(ya_half), P) + _dot(Kk, tl.trans(yv_half), P)
        sum_b = _dot(Qa, za_half, P) + _dot(Qr, ya_half, P)
        sum_k = _dot(Qa, zv_half, P) + _dot(Qr, yv_half, P)
        in_half = (t ^ s) < half
        second = (s & half) != 0
        glw += _dot(Qa * sum_a + Qr * sum_r, tl.where(in_half & second, from_on, 0.0), P)
        glw += _dot(Kb * sum_b + Kk * sum_k, tl.where(in_half & ~second, before, 0.0), P)
    _store(grad_log_w + here, glw, P)
