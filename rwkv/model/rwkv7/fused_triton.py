"""RWKV-7's operations between the matrix products, in Triton, for GPUs: the functions of fused_c.py, with the same arguments.

A row is one step of one sequence, so there are B T rows. A program computes, for some rows of one head, the gates or the input
of the output projection. All arithmetic is in float32, and results are rounded once. The gradient of a vector is summed over a
program's rows, then over the programs in a fixed order, without atomics, so that repeated runs give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, no-any-return"
import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkv.model.fused.triton import ROWS_ALONE, Tensors, contiguous, launch, load, or_unused, pad_to, store
from rwkv.model.fused.triton import supports as supports
from rwkv.model.rwkv7 import architecture

ROWS = 32                                # rows per program
HEAD = 64                                # a program has fewer than ROWS rows if a head has more channels than this
FASTEST_LOG_W, LEAST_NORM, EPS = map(tl.constexpr, (architecture.FASTEST_LOG_W, architecture.LEAST_NORM, architecture.EPS))


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """Computes fused._gates, from z = (zw, za[, zv]) and vectors k_k, k_a, w0, a0[, v0]."""
    k, v, *z = contiguous(k, v, *z)     # type: ignore[assignment]
    C = k.shape[-1]
    rows, H = k.numel() // C, C // N
    inverse = k.new_empty(*k.shape[:-1], H, dtype=torch.float32)
    log_w = torch.empty_like(k, dtype=torch.float32)
    new_k, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    new_v = v if v_first is None else torch.empty_like(v)
    R = _rows_per_program(N)
    launch(_gates, (triton.cdiv(rows, R), H), k, v, v if v_first is None else v_first.contiguous(), *pad_to(z, 3),
           *pad_to(contiguous(*vectors), 5), inverse, log_w, new_k, new_v, a, b, rows, H, N, v_first is not None, R,
           num_warps=4)
    return log_w, new_k, new_v, a, b, inverse


def gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                   grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
                   ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """Computes fused._gates_backward."""
    k, v, inverse, *z = contiguous(k, v, inverse, *z)   # type: ignore[assignment]
    C = k.shape[-1]
    rows, H, R = k.numel() // C, C // N, _rows_per_program(N)
    programs = triton.cdiv(rows, R)
    grad_k, grad_v, grad_z = torch.empty_like(k), torch.empty_like(v), tuple(torch.empty_like(part) for part in z)
    grad_first = None if v_first is None else torch.empty_like(v)
    sums = k.new_empty(programs, len(vectors), C, dtype=torch.float32)
    grads = contiguous(*grads)
    extra_k, extra_v = (None if grad is None else grad.contiguous() for grad in extra)
    launch(_gates_backward, (programs, H), k, v, v if v_first is None else v_first.contiguous(), *pad_to(z, 3),
           *pad_to(contiguous(*vectors), 5), inverse, *grads, or_unused(extra_k, k), or_unused(extra_v, v), grad_k, grad_v,
           or_unused(grad_first, v), *pad_to(grad_z, 3), sums, rows, H, N, len(vectors), v_first is not None,
           extra_k is not None, extra_v is not None, R, num_warps=4)
    return (grad_k, grad_v, grad_first), grad_z, sums.sum(0).unbind()


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor:
    """Computes fused._gated."""
    y, r, k, v, g, *vectors = contiguous(y, r, k, v, g, *vectors)       # type: ignore[assignment]
    C = r.shape[-1]
    rows, H, R = r.numel() // C, C // N, _rows_per_program(N)
    out = torch.empty_like(r)
    launch(_gated, (triton.cdiv(rows, R), H), y, r, k, v, g, *vectors, out, rows, H, N, R, num_warps=4)
    return out


def gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                   grad: Tensor) -> tuple[Tensors, Tensors]:
    """Computes fused._gated_backward."""
    y, r, k, v, g, grad, *vectors = contiguous(y, r, k, v, g, grad, *vectors)   # type: ignore[assignment]
    C = r.shape[-1]
    rows, H, R = r.numel() // C, C // N, _rows_per_program(N)
    programs = triton.cdiv(rows, R)
    grads = tuple(torch.empty_like(tensor) for tensor in (y, r, k, v, g))
    sums = r.new_empty(programs, 3, C, dtype=torch.float32)
    launch(_gated_backward, (programs, H), y, r, k, v, g, *vectors, grad, *grads, sums, rows, H, N, R, num_warps=4)
    return grads, sums.sum(0).unbind()


def _rows_per_program(N: int) -> int:
    return max(1, ROWS * HEAD // max(N, HEAD))


@triton.jit
def _program_tile(M, H, N: tl.constexpr, ROWS: tl.constexpr):
    """Returns this program's rows (ROWS,1), its head's channels (1,N), their offsets (ROWS,N), and the mask of valid rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    return row, c, row * (H * N) + c, row < M


@triton.jit
def _load_vector(x, c):
    return tl.load(x + c).to(tl.float32)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, log_w, new_k, new_v, a, b, M, H, N: tl.constexpr,
           FIRST: tl.constexpr, ROWS: tl.constexpr):
    row, c, offsets, mask = _program_tile(M, H, N, ROWS)
    k_t = load(k, offsets, mask)
    keys = k_t * _load_vector(k_k, c)
    inverse_norm = 1 / tl.maximum(tl.sqrt(tl.sum(keys * keys, 1, keep_dims=True)), LEAST_NORM)
    kk = keys * inverse_norm
    rate = tl.sigmoid(load(za, offsets, mask) + _load_vector(a0, c))
    store(log_w, offsets, tl.sigmoid(load(zw, offsets, mask) + _load_vector(w0, c)) * FASTEST_LOG_W, mask)
    store(new_k, offsets, k_t * (1 + (rate - 1) * _load_vector(k_a, c)), mask)
    store(a, offsets, -kk, mask)
    store(b, offsets, kk * rate, mask)
    tl.store(inverse + row * H + tl.program_id(1), inverse_norm, mask=mask)
    if FIRST:
        v_t = load(v, offsets, mask)
        gate = tl.sigmoid(load(zv, offsets, mask) + _load_vector(v0, c))
        store(new_v, offsets, v_t + (load(v_first, offsets, mask) - v_t) * gate, mask)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gates_backward(k, v, v_first, zw, za, zv, k_k, k_a, w0, a0, v0, inverse, g_log_w, g_k, g_v, g_a, g_b, extra_k, extra_v,
                    grad_k, grad_v, grad_first, grad_zw, grad_za, grad_zv, sums, M, H, N: tl.constexpr, n: tl.constexpr,
                    FIRST: tl.constexpr, EXTRA_K: tl.constexpr, EXTRA_V: tl.constexpr, ROWS: tl.constexpr):
    row, c, offsets, mask = _program_tile(M, H, N, ROWS)
    k_t = load(k, offsets, mask)
    scale_kk = _load_vector(k_k, c)
    scale_ka = _load_vector(k_a, c)
    inverse_norm = tl.load(inverse + row * H + tl.program_id(1), mask=mask, other=0.0)
    kk = k_t * scale_kk * inverse_norm
    rate = tl.sigmoid(load(za, offsets, mask) + _load_vector(a0, c))
    decay = tl.sigmoid(load(zw, offsets, mask) + _load_vector(w0, c))
    gk = load(g_k, offsets, mask)
    gv = load(g_v, offsets, mask)
    if EXTRA_K:
        gk += load(extra_k, offsets, mask)
    if EXTRA_V:
        gv += load(extra_v, offsets, mask)
    gb = load(g_b, offsets, mask)
    g_zw = load(g_log_w, offsets, mask) * FASTEST_LOG_W * decay * (1 - decay)
    g_kk = gb * rate - load(g_a, offsets, mask)
    g_keys = (g_kk - kk * tl.sum(g_kk * kk, 1, keep_dims=True)) * inverse_norm
    g_za = (gb * kk + gk * k_t * scale_ka) * rate * (1 - rate)
    store(grad_k, offsets, gk * (1 + (rate - 1) * scale_ka) + g_keys * scale_kk, mask)
    store(grad_zw, offsets, g_zw, mask)
    store(grad_za, offsets, g_za, mask)
    partials = sums + tl.program_id(0).to(tl.int64) * (n * H * N) + c
    tl.store(partials, tl.sum(g_keys * k_t, 0, keep_dims=True))
    tl.store(partials + H * N, tl.sum(gk * k_t * (rate - 1), 0, keep_dims=True))
    tl.store(partials + 2 * H * N, tl.sum(g_zw, 0, keep_dims=True))
    tl.store(partials + 3 * H * N, tl.sum(g_za, 0, keep_dims=True))
    if FIRST:
        gate = tl.sigmoid(load(zv, offsets, mask) + _load_vector(v0, c))
        g_zv = gv * (load(v_first, offsets, mask) - load(v, offsets, mask)) * gate * (1 - gate)
        store(grad_first, offsets, gv * gate, mask)
        store(grad_zv, offsets, g_zv, mask)
        tl.store(partials + 4 * H * N, tl.sum(g_zv, 0, keep_dims=True))
        gv -= gv * gate
    store(grad_v, offsets, gv, mask)


@triton.jit
def _normalise(y, offsets, mask, N: tl.constexpr):
    """Returns y normalised to mean 0 and variance 1 in each head, and 1 / the standard deviation."""
    y_t = load(y, offsets, mask)
    centred = y_t - tl.sum(y_t, 1, keep_dims=True) / N
    inverse_std = 1 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / N + EPS)
    return centred * inverse_std, inverse_std


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated(y, r, k, v, g, r_k, weight, bias, out, M, H, N: tl.constexpr, ROWS: tl.constexpr):
    _row, c, offsets, mask = _program_tile(M, H, N, ROWS)
    normal, _inverse_std = _normalise(y, offsets, mask, N)
    bonus = tl.sum(load(r, offsets, mask) * load(k, offsets, mask) * _load_vector(r_k, c), 1, keep_dims=True)
    ungated = normal * _load_vector(weight, c) + _load_vector(bias, c) + bonus * load(v, offsets, mask)
    store(out, offsets, ungated * load(g, offsets, mask), mask)


@triton.jit(do_not_specialize=ROWS_ALONE)
def _gated_backward(y, r, k, v, g, r_k, weight, bias, grad, grad_y, grad_r, grad_k, grad_v, grad_g, sums, M, H, N: tl.constexpr,
                    ROWS: tl.constexpr):
    _row, c, offsets, mask = _program_tile(M, H, N, ROWS)
    normal, inverse_std = _normalise(y, offsets, mask, N)
    r_t = load(r, offsets, mask)
    k_t = load(k, offsets, mask)
    v_t = load(v, offsets, mask)
    scale_rk = _load_vector(r_k, c)
    scale = _load_vector(weight, c)
    bonus = tl.sum(r_t * k_t * scale_rk, 1, keep_dims=True)
    upstream = load(grad, offsets, mask)
    store(grad_g, offsets, upstream * (normal * scale + _load_vector(bias, c) + bonus * v_t), mask)
    g_ungated = upstream * load(g, offsets, mask)
    store(grad_v, offsets, g_ungated * bonus, mask)
    g_bonus = tl.sum(g_ungated * v_t, 1, keep_dims=True)
    store(grad_r, offsets, k_t * scale_rk * g_bonus, mask)
    store(grad_k, offsets, r_t * scale_rk * g_bonus, mask)
    g_normal = g_ungated * scale
    mean = tl.sum(g_normal, 1, keep_dims=True) / N
    along = tl.sum(g_normal * normal, 1, keep_dims=True) / N
    store(grad_y, offsets, (g_normal - mean - normal * along) * inverse_std, mask)
    partials = sums + tl.program_id(0).to(tl.int64) * (3 * H * N) + c
    tl.store(partials, tl.sum(r_t * k_t * g_bonus, 0, keep_dims=True))
    tl.store(partials + H * N, tl.sum(normal * g_ungated, 0, keep_dims=True))
    tl.store(partials + 2 * H * N, tl.sum(g_ungated, 0, keep_dims=True))
