"""The operations between the matrix products in Triton, for GPUs: the functions of c.py, with the same arguments.

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
MAX_MIXES = 6                            # arguments of _mix and _mix_backward
ROWS = 32                                # per program
ROWS_BACK = 16                           # per program of the mixes' backward pass, which needs twice the registers
BLOCK = 128                              # channels per program of the mixes
HEAD = 64                                # channels of a head up to which a program has ROWS rows; fewer rows for wider heads
ELEMENTS = 1024                          # per program of the squared ReLU
FASTEST_LOG_W, LEAST_NORM, EPS = tl.constexpr(-0.6065306597126334), tl.constexpr(1e-12), tl.constexpr(64e-5)    # as rwkv7_fused

SIZES = ("M", "T")                       # not specialised: one compilation for all numbers of rows and steps
ROWS_ALONE = ("M",)

Tensors = tuple[Tensor, ...]


def supports(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool:
    """Whether the kernels support these tensors, of one dtype and with heads of N channels. dtype: that of the results."""
    first = tensors[0]
    return (first.dtype in DTYPES and (dtype or first.dtype) in DTYPES and N & (N - 1) == 0
            and all(tensor.dtype == first.dtype for tensor in tensors))


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
        to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """As fused.mix."""
    x = x.contiguous()
    mus = _contiguous(*mus)
    last_x = None if last_x is None else last_x.contiguous()
    _, T, C = x.shape
    rows = x.numel() // C
    mixes = x.new_empty(len(mus), *x.shape, dtype=dtype)
    launch(_mix, (triton.cdiv(rows, ROWS), triton.cdiv(C, BLOCK)), x, _or_unused(last_x, x), *_padded(mus, MAX_MIXES), mixes,
            rows, T, C, len(mus), last_x is not None, to_previous, ROWS, BLOCK, num_warps=4)
    return (x, last_x, *mus), mixes.unbind()


def mix_backward(saved: Sequence[Any], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]:
    """As fused.mix_backward; the gradient of last_x is None if there was no last_x."""
    x, last_x, *mus = saved
    _, T, C = x.shape
    rows = x.numel() // C
    programs = triton.cdiv(rows, ROWS_BACK)
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    sums = x.new_empty(programs, len(mus), C, dtype=torch.float32)
    launch(_mix_backward, (programs, triton.cdiv(C, BLOCK)), x, _or_unused(last_x, x), *_padded(tuple(mus), MAX_MIXES),
            *_padded(_contiguous(*grads), MAX_MIXES), grad_x, _or_unused(grad_last_x, x), sums,
            rows, T, C, len(mus), last_x is not None, to_previous, ROWS_BACK, BLOCK, num_warps=8)
    return grad_x, grad_last_x, *sums.sum(0).view(len(mus), 1, 1, C).unbind()


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
                   grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
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
    extra_k, extra_v = (None if grad is None else grad.contiguous() for grad in extra)
    launch(_gates_backward, (programs, H), k, v, v if v_first is None else v_first.contiguous(), *_padded(z, 3),
            *_padded(_contiguous(*vectors), 5), inverse, *grads, _or_unused(extra_k, k), _or_unused(extra_v, v), grad_k, grad_v,
            _or_unused(grad_first, v), *_padded(grad_z, 3), sums, rows, H, N, len(vectors), v_first is not None,
            extra_k is not None, extra_v is not None, R, num_warps=4)
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
    """Runs on the device of x, since Triton would use the current one. Does nothing for an empty x."""
    if x.numel():
        with torch.cuda.device_of(x):
            kernel[grid](x, *others, num_warps=num_warps, enable_fp_fusion=True)


def _contiguous(*tensors: Tensor) -> Tensors:
    return tuple(tensor.contiguous() for tensor in tensors)


def _or_unused(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """`unused` in place of None, for an argument that the kernel does not read."""
    return unused if tensor is None else tensor


def _padded(tensors: Sequence[Tensor], n: int) -> Tensors:
    """n arguments: the tensors, then ones that the kernel does not read."""
    return *tensors, *[tensors[0]] * (n - len(tensors))


def _rows(N: int) -> int:
    """The rows of a program for heads of N channels."""
    return max(1, ROWS * HEAD // max(N, HEAD))


@triton.jit
def _load(x, offsets, mask):
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, offsets, value, mask):
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


# Token shift: previous + (x - previous) mu; with TO_PREVIOUS x + (previous - x) mu


@triton.jit
def _load_steps(x, last_x, row, c, mask, T, C, LAST: tl.constexpr):
    """x of these rows and of their previous steps."""
    now = _load(x, row * C + c, mask)
    first = row % T == 0
    previous = _load(x, (row - 1) * C + c, mask & (first == 0))
    if LAST:
        previous += _load(last_x, row // T * C + c, mask & first)
    return now, previous


@triton.jit
def _one_mix(s, out, offsets, now, previous, c, C, mask, TO_PREVIOUS: tl.constexpr):
    mu = _load(s, c, c < C)
    _store(out, offsets, previous + (now - previous) * (1 - mu) if TO_PREVIOUS else previous + (now - previous) * mu, mask)


@triton.jit(do_not_specialize=SIZES)
def _mix(x, last_x, s0, s1, s2, s3, s4, s5, out, M, T, C, n: tl.constexpr, LAST: tl.constexpr, TO_PREVIOUS: tl.constexpr,
         ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < M) & (c < C)
    now, previous = _load_steps(x, last_x, row, c, mask, T, C, LAST)
    offsets = row * C + c
    size = M.to(tl.int64) * C
    _one_mix(s0, out, offsets, now, previous, c, C, mask, TO_PREVIOUS)
    if n > 1:
        _one_mix(s1, out + size, offsets, now, previous, c, C, mask, TO_PREVIOUS)
    if n > 2:
        _one_mix(s2, out + 2 * size, offsets, now, previous, c, C, mask, TO_PREVIOUS)
    if n > 3:
        _one_mix(s3, out + 3 * size, offsets, now, previous, c, C, mask, TO_PREVIOUS)
    if n > 4:
        _one_mix(s4, out + 4 * size, offsets, now, previous, c, C, mask, TO_PREVIOUS)
    if n > 5:
        _one_mix(s5, out + 5 * size, offsets, now, previous, c, C, mask, TO_PREVIOUS)


@triton.jit
def _add_gradients(s, g, sums, number: tl.constexpr, n: tl.constexpr, row, c, mask, delta, T, C, now, previous, last,
                   TO_PREVIOUS: tl.constexpr):
    """Adds one mix's gradients of x as the current and as the previous step, and of last_x; stores that of its mu."""
    mu = _load(s, c, c < C)
    weight = mu if TO_PREVIOUS else 1 - mu
    grad = _load(g, row * C + c, mask)
    next_grad = _load(g, (row + 1) * C + c, mask & ((row + 1) % T != 0))
    total = tl.sum(grad * delta, 0, keep_dims=True)
    offset = (tl.program_id(0).to(tl.int64) * n + number) * C + c
    tl.store(sums + offset, total if TO_PREVIOUS else -total, mask=c < C)
    return now + grad * (1 - weight), previous + next_grad * weight, last + grad * weight


@triton.jit(do_not_specialize=SIZES)
def _mix_backward(x, last_x, s0, s1, s2, s3, s4, s5, g0, g1, g2, g3, g4, g5, grad_x, grad_last, sums, M, T, C, n: tl.constexpr,
                  LAST: tl.constexpr, TO_PREVIOUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < M) & (c < C)
    x_now, x_previous = _load_steps(x, last_x, row, c, mask, T, C, LAST)
    delta = x_previous - x_now
    now = tl.zeros([ROWS, BLOCK], tl.float32)
    previous = now
    last = now
    now, previous, last = _add_gradients(s0, g0, sums, 0, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    if n > 1:
        now, previous, last = _add_gradients(s1, g1, sums, 1, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    if n > 2:
        now, previous, last = _add_gradients(s2, g2, sums, 2, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    if n > 3:
        now, previous, last = _add_gradients(s3, g3, sums, 3, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    if n > 4:
        now, previous, last = _add_gradients(s4, g4, sums, 4, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    if n > 5:
        now, previous, last = _add_gradients(s5, g5, sums, 5, n, row, c, mask, delta, T, C, now, previous, last, TO_PREVIOUS)
    _store(grad_x, row * C + c, now + previous, mask)
    if LAST:
        _store(grad_last, row // T * C + c, last, mask & (row % T == 0))


@triton.jit
def _squared_relu(x, grad, out, n, BACKWARD: tl.constexpr, ELEMENTS: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    relu = tl.maximum(_load(x, offsets, offsets < n), 0.0, propagate_nan=tl.PropagateNan.ALL)
    if BACKWARD:
        _store(out, offsets, 2 * relu * _load(grad, offsets, offsets < n), offsets < n)
    else:
        _store(out, offsets, relu * relu, offsets < n)


# RWKV-7's gates, and the input of its output projection; the formulas are in ../rwkv7/fused.py


@triton.jit
def _head(M, H, N: tl.constexpr, ROWS: tl.constexpr):
    """Rows (ROWS,1), the head's channels (1,N), offsets (ROWS,N), and the mask of rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    return row, c, row * (H * N) + c, row < M


@triton.jit
def _vector(x, c):
    return tl.load(x + c).to(tl.float32)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, log_w, new_k, new_v, a, b, M, H, N: tl.constexpr,
           FIRST: tl.constexpr, ROWS: tl.constexpr):
    row, c, offsets, mask = _head(M, H, N, ROWS)
    k_t = _load(k, offsets, mask)
    keys = k_t * _vector(k_k, c)
    inverse_norm = 1 / tl.maximum(tl.sqrt(tl.sum(keys * keys, 1, keep_dims=True)), LEAST_NORM)
    kk = keys * inverse_norm
    rate = tl.sigmoid(_load(za, offsets, mask) + _vector(a0, c))
    _store(log_w, offsets, tl.sigmoid(_load(zw, offsets, mask) + _vector(w0, c)) * FASTEST_LOG_W, mask)
    _store(new_k, offsets, k_t * (1 + (rate - 1) * _vector(k_a, c)), mask)
    _store(a, offsets, -kk, mask)
    _store(b, offsets, kk * rate, mask)
    tl.store(inverse + row * H + tl.program_id(1), inverse_norm, mask=mask)
    if FIRST:
        v_t = _load(v, offsets, mask)
        gate = tl.sigmoid(_load(zv, offsets, mask) + _vector(v0, c))
        _store(new_v, offsets, v_t + (_load(v_first, offsets, mask) - v_t) * gate, mask)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates_backward(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, g_log_w, g_k, g_v, g_a, g_b, extra_k, extra_v,
                    grad_k, grad_v, grad_first, grad_zw, grad_za, grad_zv, sums, M, H, N: tl.constexpr, n: tl.constexpr,
                    FIRST: tl.constexpr, EXTRA_K: tl.constexpr, EXTRA_V: tl.constexpr, ROWS: tl.constexpr):
    row, c, offsets, mask = _head(M, H, N, ROWS)
    k_t = _load(k, offsets, mask)
    scale_kk = _vector(k_k, c)
    scale_ka = _vector(k_a, c)
    inverse_norm = tl.load(inverse + row * H + tl.program_id(1), mask=mask, other=0.0)
    kk = k_t * scale_kk * inverse_norm
    rate = tl.sigmoid(_load(za, offsets, mask) + _vector(a0, c))
    decay = tl.sigmoid(_load(zw, offsets, mask) + _vector(w0, c))
    gk = _load(g_k, offsets, mask)
    gv = _load(g_v, offsets, mask)
    if EXTRA_K:
        gk += _load(extra_k, offsets, mask)
    if EXTRA_V:
        gv += _load(extra_v, offsets, mask)
    gb = _load(g_b, offsets, mask)
    g_zw = _load(g_log_w, offsets, mask) * FASTEST_LOG_W * decay * (1 - decay)
    g_kk = gb * rate - _load(g_a, offsets, mask)
    g_keys = (g_kk - kk * tl.sum(g_kk * kk, 1, keep_dims=True)) * inverse_norm
    g_za = (gb * kk + gk * k_t * scale_ka) * rate * (1 - rate)
    _store(grad_k, offsets, gk * (1 + (rate - 1) * scale_ka) + g_keys * scale_kk, mask)
    _store(grad_zw, offsets, g_zw, mask)
    _store(grad_za, offsets, g_za, mask)
    partials = sums + tl.program_id(0).to(tl.int64) * (n * H * N) + c
    tl.store(partials, tl.sum(g_keys * k_t, 0, keep_dims=True))
    tl.store(partials + H * N, tl.sum(gk * k_t * (rate - 1), 0, keep_dims=True))
    tl.store(partials + 2 * H * N, tl.sum(g_zw, 0, keep_dims=True))
    tl.store(partials + 3 * H * N, tl.sum(g_za, 0, keep_dims=True))
    if FIRST:
        gate = tl.sigmoid(_load(zv, offsets, mask) + _vector(v0, c))
        g_zv = gv * (_load(v_first, offsets, mask) - _load(v, offsets, mask)) * gate * (1 - gate)
        _store(grad_first, offsets, gv * gate, mask)
        _store(grad_zv, offsets, g_zv, mask)
        tl.store(partials + 4 * H * N, tl.sum(g_zv, 0, keep_dims=True))
        gv -= gv * gate
    _store(grad_v, offsets, gv, mask)


@triton.jit
def _normalised(y, offsets, mask, N: tl.constexpr):
    """y of each head with mean 0 and variance 1, and 1 / its standard deviation."""
    y_t = _load(y, offsets, mask)
    centred = y_t - tl.sum(y_t, 1, keep_dims=True) / N
    inverse_std = 1 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / N + EPS)
    return centred * inverse_std, inverse_std


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated(y, r, k, v, g, r_k, weight, bias, out, M, H, N: tl.constexpr, ROWS: tl.constexpr):
    _row, c, offsets, mask = _head(M, H, N, ROWS)
    normal, _inverse_std = _normalised(y, offsets, mask, N)
    bonus = tl.sum(_load(r, offsets, mask) * _load(k, offsets, mask) * _vector(r_k, c), 1, keep_dims=True)
    ungated = normal * _vector(weight, c) + _vector(bias, c) + bonus * _load(v, offsets, mask)
    _store(out, offsets, ungated * _load(g, offsets, mask), mask)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated_backward(y, r, k, v, g, r_k, weight, bias, grad, grad_y, grad_r, grad_k, grad_v, grad_g, sums, M, H, N: tl.constexpr,
                    ROWS: tl.constexpr):
    _row, c, offsets, mask = _head(M, H, N, ROWS)
    normal, inverse_std = _normalised(y, offsets, mask, N)
    r_t = _load(r, offsets, mask)
    k_t = _load(k, offsets, mask)
    v_t = _load(v, offsets, mask)
    scale_rk = _vector(r_k, c)
    scale = _vector(weight, c)
    bonus = tl.sum(r_t * k_t * scale_rk, 1, keep_dims=True)
    upstream = _load(grad, offsets, mask)
    _store(grad_g, offsets, upstream * (normal * scale + _vector(bias, c) + bonus * v_t), mask)
    g_ungated = upstream * _load(g, offsets, mask)
    _store(grad_v, offsets, g_ungated * bonus, mask)
    g_bonus = tl.sum(g_ungated * v_t, 1, keep_dims=True)
    _store(grad_r, offsets, k_t * scale_rk * g_bonus, mask)
    _store(grad_k, offsets, r_t * scale_rk * g_bonus, mask)
    g_normal = g_ungated * scale
    mean = tl.sum(g_normal, 1, keep_dims=True) / N
    along = tl.sum(g_normal * normal, 1, keep_dims=True) / N
    _store(grad_y, offsets, (g_normal - mean - normal * along) * inverse_std, mask)
    partials = sums + tl.program_id(0).to(tl.int64) * (3 * H * N) + c
    tl.store(partials, tl.sum(r_t * k_t * g_bonus, 0, keep_dims=True))
    tl.store(partials + H * N, tl.sum(normal * g_ungated, 0, keep_dims=True))
    tl.store(partials + 2 * H * N, tl.sum(g_ungated, 0, keep_dims=True))
