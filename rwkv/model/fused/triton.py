"""The GPU implementation of FusedBackend (backend.py), in Triton: token shift and squared ReLU.

A row is one step of one sequence, so there are B T rows. A program computes ROWS rows of BLOCK channels. All arithmetic is in
float32, and results are rounded once. The gradient of a vector is summed over a program's rows, then over the programs in a
fixed order, without atomics, so that repeated runs give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, no-any-return"
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_MIXES = 6                            # number of mixes for which _mix and _mix_backward have arguments
ROWS = 32                                # rows per program
ROWS_BACK = 16                           # rows per program of _mix_backward, which needs twice the registers
BLOCK = 128                              # channels per program of _mix and _mix_backward
ELEMENTS = 1024                          # elements per program of _squared_relu

SIZES = ("M", "T")                       # Triton does not specialise these, so one compilation serves all sizes
ROWS_ALONE = ("M",)

Tensors = tuple[Tensor, ...]


def supports(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool:
    """Returns True if the kernels support these tensors, results in `dtype`, and heads of N channels.

    The tensors must have the same dtype, which is also the default of `dtype`.
    """
    first = tensors[0]
    return (first.dtype in DTYPES and (dtype or first.dtype) in DTYPES and N & (N - 1) == 0
            and all(tensor.dtype == first.dtype for tensor in tensors))


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
        to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """Computes fused.mix."""
    x = x.contiguous()
    mus = contiguous(*mus)
    last_x = None if last_x is None else last_x.contiguous()
    _, T, C = x.shape
    rows = x.numel() // C
    mixes = x.new_empty(len(mus), *x.shape, dtype=dtype)
    launch(_mix, (triton.cdiv(rows, ROWS), triton.cdiv(C, BLOCK)), x, or_unused(last_x, x), *pad_to(mus, MAX_MIXES), mixes,
           rows, T, C, len(mus), last_x is not None, to_previous, ROWS, BLOCK, num_warps=4)
    return (x, last_x, *mus), mixes.unbind()


def mix_backward(saved: Sequence[Any], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]:
    """Computes fused.mix_backward. The gradient of last_x is None if last_x was None."""
    x, last_x, *mus = saved
    _, T, C = x.shape
    rows = x.numel() // C
    programs = triton.cdiv(rows, ROWS_BACK)
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    sums = x.new_empty(programs, len(mus), C, dtype=torch.float32)
    launch(_mix_backward, (programs, triton.cdiv(C, BLOCK)), x, or_unused(last_x, x), *pad_to(tuple(mus), MAX_MIXES),
           *pad_to(contiguous(*grads), MAX_MIXES), grad_x, or_unused(grad_last_x, x), sums,
           rows, T, C, len(mus), last_x is not None, to_previous, ROWS_BACK, BLOCK, num_warps=8)
    return grad_x, grad_last_x, *sums.sum(0).view(len(mus), 1, 1, C).unbind()


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """Returns max(x, 0)^2. With `grad`, the gradient of that result, returns the gradient of x instead."""
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(_squared_relu, (triton.cdiv(x.numel(), ELEMENTS),), x, x if grad is None else grad.contiguous(), out, x.numel(),
           grad is not None, ELEMENTS, num_warps=4)
    return out


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *others: object, num_warps: int) -> None:
    """Runs a kernel on the device of x, because Triton would use the current device. Does nothing if x is empty."""
    if x.numel():
        with torch.cuda.device_of(x):
            kernel[grid](x, *others, num_warps=num_warps, enable_fp_fusion=True)


def contiguous(*tensors: Tensor) -> Tensors:
    return tuple(tensor.contiguous() for tensor in tensors)


def or_unused(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Returns the tensor, or `unused` instead of None, because Triton needs a tensor even for an unused argument."""
    return unused if tensor is None else tensor


def pad_to(tensors: Sequence[Tensor], n: int) -> Tensors:
    """Returns n tensors: the given tensors, then repetitions of the first tensor, which the kernel does not read."""
    return *tensors, *[tensors[0]] * (n - len(tensors))


@triton.jit
def load(x, offsets, mask):
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(x, offsets, value, mask):
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


# The token shift is previous + (x - previous) mu, or x + (previous - x) mu with TO_PREVIOUS.


@triton.jit
def _load_steps(x, last_x, row, c, mask, T, C, LAST: tl.constexpr):
    now = load(x, row * C + c, mask)
    first = row % T == 0
    previous = load(x, (row - 1) * C + c, mask & (first == 0))
    if LAST:
        previous += load(last_x, row // T * C + c, mask & first)
    return now, previous


@triton.jit
def _one_mix(s, out, offsets, now, previous, c, C, mask, TO_PREVIOUS: tl.constexpr):
    mu = load(s, c, c < C)
    store(out, offsets, previous + (now - previous) * (1 - mu) if TO_PREVIOUS else previous + (now - previous) * mu, mask)


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
    """Adds a mix's contributions to the gradients of x, as the current and as the previous step, and of last_x.

    Stores this program's partial sum of the gradient of mu.
    """
    mu = load(s, c, c < C)
    weight = mu if TO_PREVIOUS else 1 - mu
    grad = load(g, row * C + c, mask)
    next_grad = load(g, (row + 1) * C + c, mask & ((row + 1) % T != 0))
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
    store(grad_x, row * C + c, now + previous, mask)
    if LAST:
        store(grad_last, row // T * C + c, last, mask & (row % T == 0))


@triton.jit
def _squared_relu(x, grad, out, n, BACKWARD: tl.constexpr, ELEMENTS: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    relu = tl.maximum(load(x, offsets, offsets < n), 0.0, propagate_nan=tl.PropagateNan.ALL)
    if BACKWARD:
        store(out, offsets, 2 * relu * load(grad, offsets, offsets < n), offsets < n)
    else:
        store(out, offsets, relu * relu, offsets < n)
