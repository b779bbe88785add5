"""The operations between the matrix products in Triton, for GPUs: the functions of fused_c.py, with the same arguments.

A program computes some rows, of BLOCK channels (mixes) or of one head (gates, output). A row is a step of a sequence, (B,T).
All arithmetic is in float32, and results are rounded once. The gradient of a vector is summed over a program's rows, and then
over the programs in a fixed order: no atomics, so the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, no-any-return"
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_MIXES = 6                           # arguments of _mix and _mix_backward
ROWS = 32                                # of a program ...
ROWS_BACK = 16                           # ... and of one of the mixes' backward pass, which holds twice as much
BLOCK = 128                              # channels of a program of the mixes
HEAD = 64                                # channels of a head up to which a program has ROWS rows; fewer rows for wider heads
ELEMENTS = 1024                          # of a program of the squared ReLU
FASTEST_LOG_W, LEAST_NORM, EPS = tl.constexpr(-0.6065306597126334), tl.constexpr(1e-12), tl.constexpr(64e-5)    # as rwkv7_fused

SIZES = ("M", "T")                       # not specialised: rows and steps of any number share one compilation
ROWS_ALONE = ("M",)

Tensors = tuple[Tensor, ...]


def takes(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool:
    """Whether the kernels take these tensors, of one dtype and with heads of N channels. dtype: that of the results."""
    first = tensors[0]
    return (first.dtype in DTYPES and (dtype or first.dtype) in DTYPES and N & (N - 1) == 0
            and all(tensor.dtype == first.dtype for tensor in tensors))


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, shares: Tensors,
        of_before: bool) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """As fused.mix."""
    x = x.contiguous()
    shares = _contiguous(*shares)
    last_x = None if last_x is None else last_x.contiguous()
    _, T, C = x.shape
    rows = x.numel() // C
    mixes = x.new_empty(len(shares), *x.shape, dtype=dtype)
    launch(_mix, (triton.cdiv(rows, ROWS), triton.cdiv(C, BLOCK)), x, _or(last_x, x), *_padded(shares, MOST_MIXES), mixes,
            rows, T, C, len(shares), last_x is not None, of_before, ROWS, BLOCK, num_warps=4)
    return (x, last_x, *shares), mixes.unbind()


def mix_backward(kept: Sequence[Any], grads: Tensors, of_before: bool) -> tuple[Tensor | None, ...]:
    """As fused.mix_backward; the gradient of last_x is None if there was no last_x."""
    x, last_x, *shares = kept
    _, T, C = x.shape
    rows = x.numel() // C
    programs = triton.cdiv(rows, ROWS_BACK)
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    sums = x.new_empty(programs, len(shares), C, dtype=torch.float32)
    launch(_mix_backward, (programs, triton.cdiv(C, BLOCK)), x, _or(last_x, x), *_padded(tuple(shares), MOST_MIXES),
            *_padded(_contiguous(*grads), MOST_MIXES), grad_x, _or(grad_last_x, x), sums,
            rows, T, C, len(shares), last_x is not None, of_before, ROWS_BACK, BLOCK, num_warps=8)
    return grad_x, grad_last_x, *sums.sum(0).view(len(shares), 1, 1, C).unbind()


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """max(x, 0)^2. If grad is given, the gradient of that square: the gradient of x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(_squared_relu, (triton.cdiv(x.numel(), ELEMENTS),), x, x if grad is None else grad.contiguous(), out, x.numel(),
            grad is not None, ELEMENTS, num_warps=4)
    return out


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """(log_w, k, v, a, b, 1 / |k k_k|) of rwkv7_fused.gates, from z = (zw, za[, zv]) and vectors k_k, k_a, w0, a0[, v0]."""
    k, v, *z = _contiguous(k, v, *z)     # type: ignore[assignment]
    C = k.shape[-1]
    rows, H = k.numel() // C, C // N
    inverse = k.new_empty(*k.shape[:-1], H, dtype=torch.float32)
    log_w = torch.empty_like(k, dtype=torch.float32)
    new_k, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    new_v = v if v_first is None else torch.empty_like(v)
    R = _rows(N)
    launch(_gates, (triton.cdiv(rows, R), H), k, v, v if v_first is None else v_first.contiguous(), *_padded(z, 3),
            *_padded(_contiguous(*vectors), 5), inverse, log_w, new_k, new_v, a, b, rows, H, N, v_first is not None, R,
            num_warps=4)
    return log_w, new_k, new_v, a, b, inverse


def gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                   grads: Tensors, more: tuple[Tensor | None, Tensor | None],
                   ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """As rwkv7_fused._gates_backward."""
    k, v, inverse, *z = _contiguous(k, v, inverse, *z)   # type: ignore[assignment]
    C = k.shape[-1]
    rows, H, R = k.numel() // C, C // N, _rows(N)
    programs = triton.cdiv(rows, R)
    grad_k, grad_v, grad_z = torch.empty_like(k), torch.empty_like(v), tuple(torch.empty_like(part) for part in z)
    grad_first = None if v_first is None else torch.empty_like(v)
    sums = k.new_empty(programs, len(vectors), C, dtype=torch.float32)
    grads = _contiguous(*grads)
    more_k, more_v = (None if grad is None else grad.contiguous() for grad in more)
    launch(_gates_backward, (programs, H), k, v, v if v_first is None else v_first.contiguous(), *_padded(z, 3),
            *_padded(_contiguous(*vectors), 5), inverse, *grads, _or(more_k, k), _or(more_v, v), grad_k, grad_v,
            _or(grad_first, v), *_padded(grad_z, 3), sums, rows, H, N, len(vectors), v_first is not None, more_k is not None,
            more_v is not None, R, num_warps=4)
    return (grad_k, grad_v, grad_first), grad_z, sums.sum(0).unbind()


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor:
    """As rwkv7_fused._gated."""
    y, r, k, v, g, *vectors = _contiguous(y, r, k, v, g, *vectors)       # type: ignore[assignment]
    C = r.shape[-1]
    rows, H, R = r.numel() // C, C // N, _rows(N)
    out = torch.empty_like(r)
    launch(_gated, (triton.cdiv(rows, R), H), y, r, k, v, g, *vectors, out, rows, H, N, R, num_warps=4)
    return out


def gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                   grad: Tensor) -> tuple[Tensors, Tensors]:
    """As rwkv7_fused._gated_backward."""
    y, r, k, v, g, grad, *vectors = _contiguous(y, r, k, v, g, grad, *vectors)   # type: ignore[assignment]
    C = r.shape[-1]
    rows, H, R = r.numel() // C, C // N, _rows(N)
    programs = triton.cdiv(rows, R)
    grads = tuple(torch.empty_like(tensor) for tensor in (y, r, k, v, g))
    sums = r.new_empty(programs, 3, C, dtype=torch.float32)
    launch(_gated_backward, (programs, H), y, r, k, v, g, *vectors, grad, *grads, sums, rows, H, N, R, num_warps=4)
    return grads, sums.sum(0).unbind()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *others: Any, num_warps: int) -> None:
    """Runs on the device of x: Triton would take the current one. Without rows or channels there is nothing to run."""
    if x.numel():
        with torch.cuda.device_of(x):
            kernel[grid](x, *others, num_warps=num_warps, enable_fp_fusion=True)


def _contiguous(*tensors: Tensor) -> Tensors:
    return tuple(tensor.contiguous() for tensor in tensors)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`other` for an argument that the kernel does not read."""
    return other if tensor is None else tensor


def _padded(tensors: Sequence[Tensor], n: int) -> Tensors:
    """n tensors; those after the given ones are not read."""
    return *tensors, *[tensors[0]] * (n - len(tensors))


def _rows(N: int) -> int:
    """The rows of a program for heads of N channels."""
    return max(1, ROWS * HEAD // max(N, HEAD))


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, at, value, mask):
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


# Token shift: before + (x - before) share, or with BEFORE x + (before - x) share


@triton.jit
def _now_and_before(x, last_x, row, c, inside, T, C, LAST: tl.constexpr):
    """x of these rows, and of the step before each."""
    now = _load(x, row * C + c, inside)
    first = row % T == 0
    before = _load(x, (row - 1) * C + c, inside & (first == 0))
    if LAST:
        before += _load(last_x, row // T * C + c, inside & first)
    return now, before


@triton.jit
def _one_mix(s, out, at, now, before, c, C, inside, BEFORE: tl.constexpr):
    share = _load(s, c, c < C)
    _store(out, at, before + (now - before) * (1 - share) if BEFORE else before + (now - before) * share, inside)


@triton.jit(do_not_specialize=SIZES)
def _mix(x, last_x, s0, s1, s2, s3, s4, s5, out, M, T, C, n: tl.constexpr, LAST: tl.constexpr, BEFORE: tl.constexpr,
         ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (c < C)
    now, before = _now_and_before(x, last_x, row, c, inside, T, C, LAST)
    at = row * C + c
    size = M.to(tl.int64) * C
    _one_mix(s0, out, at, now, before, c, C, inside, BEFORE)
    if n > 1:
        _one_mix(s1, out + size, at, now, before, c, C, inside, BEFORE)
    if n > 2:
        _one_mix(s2, out + 2 * size, at, now, before, c, C, inside, BEFORE)
    if n > 3:
        _one_mix(s3, out + 3 * size, at, now, before, c, C, inside, BEFORE)
    if n > 4:
        _one_mix(s4, out + 4 * size, at, now, before, c, C, inside, BEFORE)
    if n > 5:
        _one_mix(s5, out + 5 * size, at, now, before, c, C, inside, BEFORE)


@triton.jit
def _add_gradients(s, g, sums, number: tl.constexpr, n: tl.constexpr, row, c, inside, change, T, C, now, before, last,
                   BEFORE: tl.constexpr):
    """Adds one mix's part to the gradients of x_t as the present and the past step, and of last_x; stores that of its share."""
    share = _load(s, c, c < C)
    past = share if BEFORE else 1 - share
    grad = _load(g, row * C + c, inside)
    later = _load(g, (row + 1) * C + c, inside & ((row + 1) % T != 0))
    total = tl.sum(grad * change, 0, keep_dims=True)
    place = (tl.program_id(0).to(tl.int64) * n + number) * C + c
    tl.store(sums + place, total if BEFORE else -total, mask=c < C)
    return now + grad * (1 - past), before + later * past, last + grad * past


@triton.jit(do_not_specialize=SIZES)
def _mix_backward(x, last_x, s0, s1, s2, s3, s4, s5, g0, g1, g2, g3, g4, g5, grad_x, grad_last, sums, M, T, C, n: tl.constexpr,
                  LAST: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (c < C)
    x_now, x_before = _now_and_before(x, last_x, row, c, inside, T, C, LAST)
    change = x_before - x_now
    now = tl.zeros([ROWS, BLOCK], tl.float32)
    before = now
    last = now
    now, before, last = _add_gradients(s0, g0, sums, 0, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    if n > 1:
        now, before, last = _add_gradients(s1, g1, sums, 1, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    if n > 2:
        now, before, last = _add_gradients(s2, g2, sums, 2, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    if n > 3:
        now, before, last = _add_gradients(s3, g3, sums, 3, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    if n > 4:
        now, before, last = _add_gradients(s4, g4, sums, 4, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    if n > 5:
        now, before, last = _add_gradients(s5, g5, sums, 5, n, row, c, inside, change, T, C, now, before, last, BEFORE)
    _store(grad_x, row * C + c, now + before, inside)
    if LAST:
        _store(grad_last, row // T * C + c, last, inside & (row % T == 0))


@triton.jit
def _squared_relu(x, grad, out, n, BACKWARD: tl.constexpr, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    relu = tl.maximum(_load(x, at, at < n), 0.0, propagate_nan=tl.PropagateNan.ALL)
    if BACKWARD:
        _store(out, at, 2 * relu * _load(grad, at, at < n), at < n)
    else:
        _store(out, at, relu * relu, at < n)


# RWKV-7's gates, and the input of its output projection; the formulas are in rwkv7_fused.py


@triton.jit
def _head(M, H, N: tl.constexpr, ROWS: tl.constexpr):
    """Rows (ROWS,1), the head's channels (1,N), places (ROWS,N), and which rows exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    return row, c, row * (H * N) + c, row < M


@triton.jit
def _vector(x, c):
    return tl.load(x + c).to(tl.float32)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, log_w, new_k, new_v, a, b, M, H, N: tl.constexpr,
           FIRST: tl.constexpr, ROWS: tl.constexpr):
    row, c, at, inside = _head(M, H, N, ROWS)
    k_t = _load(k, at, inside)
    keys = k_t * _vector(k_k, c)
    over = 1 / tl.maximum(tl.sqrt(tl.sum(keys * keys, 1, keep_dims=True)), LEAST_NORM)
    kk = keys * over
    rate = tl.sigmoid(_load(za, at, inside) + _vector(a0, c))
    _store(log_w, at, tl.sigmoid(_load(zw, at, inside) + _vector(w0, c)) * FASTEST_LOG_W, inside)
    _store(new_k, at, k_t * (1 + (rate - 1) * _vector(k_a, c)), inside)
    _store(a, at, -kk, inside)
    _store(b, at, kk * rate, inside)
    tl.store(inverse + row * H + tl.program_id(1), over, mask=inside)
    if FIRST:
        v_t = _load(v, at, inside)
        gate = tl.sigmoid(_load(zv, at, inside) + _vector(v0, c))
        _store(new_v, at, v_t + (_load(v_first, at, inside) - v_t) * gate, inside)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates_backward(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, g_log_w, g_k, g_v, g_a, g_b, more_k, more_v,
                    grad_k, grad_v, grad_first, grad_zw, grad_za, grad_zv, sums, M, H, N: tl.constexpr, n: tl.constexpr,
                    FIRST: tl.constexpr, MORE_K: tl.constexpr, MORE_V: tl.constexpr, ROWS: tl.constexpr):
    row, c, at, inside = _head(M, H, N, ROWS)
    k_t = _load(k, at, inside)
    scale_kk = _vector(k_k, c)
    scale_ka = _vector(k_a, c)
    over = tl.load(inverse + row * H + tl.program_id(1), mask=inside, other=0.0)
    kk = k_t * scale_kk * over
    rate = tl.sigmoid(_load(za, at, inside) + _vector(a0, c))
    decay = tl.sigmoid(_load(zw, at, inside) + _vector(w0, c))
    gk = _load(g_k, at, inside)
    gv = _load(g_v, at, inside)
    if MORE_K:
        gk += _load(more_k, at, inside)
    if MORE_V:
        gv += _load(more_v, at, inside)
    gb = _load(g_b, at, inside)
    g_zw = _load(g_log_w, at, inside) * FASTEST_LOG_W * decay * (1 - decay)
    g_kk = gb * rate - _load(g_a, at, inside)
    g_keys = (g_kk - kk * tl.sum(g_kk * kk, 1, keep_dims=True)) * over
    g_za = (gb * kk + gk * k_t * scale_ka) * rate * (1 - rate)
    _store(grad_k, at, gk * (1 + (rate - 1) * scale_ka) + g_keys * scale_kk, inside)
    _store(grad_zw, at, g_zw, inside)
    _store(grad_za, at, g_za, inside)
    to = sums + tl.program_id(0).to(tl.int64) * (n * H * N) + c
    tl.store(to, tl.sum(g_keys * k_t, 0, keep_dims=True))
    tl.store(to + H * N, tl.sum(gk * k_t * (rate - 1), 0, keep_dims=True))
    tl.store(to + 2 * H * N, tl.sum(g_zw, 0, keep_dims=True))
    tl.store(to + 3 * H * N, tl.sum(g_za, 0, keep_dims=True))
    if FIRST:
        gate = tl.sigmoid(_load(zv, at, inside) + _vector(v0, c))
        g_zv = gv * (_load(v_first, at, inside) - _load(v, at, inside)) * gate * (1 - gate)
        _store(grad_first, at, gv * gate, inside)
        _store(grad_zv, at, g_zv, inside)
        tl.store(to + 4 * H * N, tl.sum(g_zv, 0, keep_dims=True))
        gv -= gv * gate
    _store(grad_v, at, gv, inside)


@triton.jit
def _normalised(y, at, inside, N: tl.constexpr):
    """y of each head with mean 0 and variance 1, and 1 / its standard deviation."""
    y_t = _load(y, at, inside)
    centred = y_t - tl.sum(y_t, 1, keep_dims=True) / N
    over = 1 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / N + EPS)
    return centred * over, over


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated(y, r, k, v, g, r_k, weight, bias, out, M, H, N: tl.constexpr, ROWS: tl.constexpr):
    _row, c, at, inside = _head(M, H, N, ROWS)
    normal, _over = _normalised(y, at, inside, N)
    share = tl.sum(_load(r, at, inside) * _load(k, at, inside) * _vector(r_k, c), 1, keep_dims=True)
    read = normal * _vector(weight, c) + _vector(bias, c) + share * _load(v, at, inside)
    _store(out, at, read * _load(g, at, inside), inside)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated_backward(y, r, k, v, g, r_k, weight, bias, grad, grad_y, grad_r, grad_k, grad_v, grad_g, sums, M, H, N: tl.constexpr,
                    ROWS: tl.constexpr):
    _row, c, at, inside = _head(M, H, N, ROWS)
    normal, over = _normalised(y, at, inside, N)
    r_t = _load(r, at, inside)
    k_t = _load(k, at, inside)
    v_t = _load(v, at, inside)
    scale_rk = _vector(r_k, c)
    scale = _vector(weight, c)
    share = tl.sum(r_t * k_t * scale_rk, 1, keep_dims=True)
    upstream = _load(grad, at, inside)
    _store(grad_g, at, upstream * (normal * scale + _vector(bias, c) + share * v_t), inside)
    g_read = upstream * _load(g, at, inside)
    _store(grad_v, at, g_read * share, inside)
    g_share = tl.sum(g_read * v_t, 1, keep_dims=True)
    _store(grad_r, at, k_t * scale_rk * g_share, inside)
    _store(grad_k, at, r_t * scale_rk * g_share, inside)
    g_normal = g_read * scale
    mean = tl.sum(g_normal, 1, keep_dims=True) / N
    along = tl.sum(g_normal * normal, 1, keep_dims=True) / N
    _store(grad_y, at, (g_normal - mean - normal * along) * over, inside)
    to = sums + tl.program_id(0).to(tl.int64) * (3 * H * N) + c
    tl.store(to, tl.sum(r_t * k_t * g_share, 0, keep_dims=True))
    tl.store(to + H * N, tl.sum(normal * g_read, 0, keep_dims=True))
    tl.store(to + 2 * H * N, tl.sum(g_read, 0, keep_dims=True))
