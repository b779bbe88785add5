"""The scan computes the recurrence step by step, with exponentials stored as m * 2^n, so that each rescaling is exact.

n is an integer. The state (a, b) is scaled by 2^-P, where P is the larger of the exponents of the decayed state and of the
newest step, so no spread of k loses precision. e^(u+k) relative to the state is clamped to 2^64. The mantissa of e^w, within
[0.7, 1.4], makes b drift away from 2^P. After each chunk the accumulated power moves into P. The power is computed from w
alone, so that the backward recomputes the same bits of P.

The backward stores the state before each chunk, then processes the chunks from last to first. A chunk is recomputed into a
scratch buffer of five numbers per step, which stays in a CPU's L1 cache, and the reverse recurrence reads the buffer. The extra
memory is the scratch buffer and 3/32 of the size of k.

A row (b, c) is computed by one thread on a GPU, and on a CPU by one lane of a vector of neighbouring channels. The CPU kernels
read and write bfloat16 directly. |k|, |p| and |time_first| are clamped to 1.1e7, above which float32 has no fraction. NaN stays
NaN in the same row, and infinity becomes NaN.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.backends.lanes import by_lane, crop_channels, identity, storage_of
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), dtypes=(torch.float32, torch.bfloat16))

FORWARD, BACKWARD = 32, 16  # lanes per vector: the most for which AVX-512's 32 registers suffice
ALIGNMENT = 64  # bytes; a vector load from an unaligned address is a segmentation fault
CHUNK = 32  # steps between saved states
SERIAL = 2**17  # elements up to which one thread is faster than several
SAVED = 5  # numbers per step in the backward's scratch buffer
LIMIT = 1.1e7
INFINITY, NAN = 0x7F800000, 0x7FC00000  # the bits of these floats
LOST, LOST_SHIFT = 16.0, -(2**28)  # largest time_decay, which erases the state in one step, and the exponent of its e^w
LOG2_E, ROOT_2 = 1.4426950408889634, 1.4142135
LN_2, LN_2_HIGH, LN_2_LOW = 0.6931471805599453, 0.693359375, -2.1219444005469058e-4
EXP = (1.0000000018154944, 0.9999997208349418, 0.5000068453211467, 0.16660485760579424, 0.041928080322846804,
       0.007776794816698978, 0.001955775417299989)  # polynomial of e^r on [0, log 2], accurate to 2e-9
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)
Forward = ti.types.ndarray(dtype=ti.types.vector(FORWARD, ti.f32), ndim=1)
Backward = ti.types.ndarray(dtype=ti.types.vector(BACKWARD, ti.f32), ndim=1)


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    C = k.shape[-1]
    k = _rows(k, FORWARD)
    v = _rows(v, FORWARD)
    y = torch.empty_like(k)
    state = time_decay.new_empty(3, len(k), k.shape[-1])
    kernels = (_forward_cuda,) if k.is_cuda else _forward_kernels(k.dtype)
    _launch(kernels, FORWARD, k.shape, (time_decay, time_first, a, b, p), k, v, y, state)
    return crop_channels(y, C), *(crop_channels(part, C).clone() for part in state)


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    C = k.shape[-1]
    k, v, grad_y = (_rows(tensor, BACKWARD) for tensor in (k, v, grad_y))
    B, T, channels = k.shape
    floats = time_decay.new_empty
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grads = floats(4, B, channels)
    states = floats((T + CHUNK - 1) // CHUNK * 3 * B * channels)
    at_once = B * C if k.is_cuda else shares(B * channels // BACKWARD) * BACKWARD
    kernels = (_backward_cuda,) if k.is_cuda else _backward_kernels(k.dtype)
    _launch(kernels, BACKWARD, k.shape, (time_decay, time_first, a, b, p, grad_a, grad_b),
            k, v, grad_y, grad_k, grad_v, grads, states, floats(CHUNK * SAVED * at_once))
    grad_decay, grad_first, grad_a, grad_b = grads
    gradients = grad_decay.sum(0), grad_first.sum(0), grad_k, grad_v, grad_a.clone(), grad_b.clone()
    return tuple(crop_channels(grad, C) for grad in gradients)


def _rows(tensor: Tensor, lanes: int) -> Tensor:
    """Returns the tensor as the kernel loads it: whole, aligned vectors of channels on a CPU, float32 on a GPU."""
    if tensor.is_cuda:
        return tensor.float()
    ready = tensor.shape[-1] % lanes == 0 and tensor.data_ptr() % ALIGNMENT == 0
    return tensor if ready else pad(tensor, (0, -tensor.shape[-1] % lanes))


def _launch(kernels: tuple[Any, ...], lanes: int, shape: torch.Size, small: tuple[Tensor, ...], *tensors: Tensor) -> None:
    """Launches a kernel. On a CPU, `kernels` has two: for one thread and for several. On a GPU it has one."""
    B, T, C = shape
    packed = torch.cat([_rows(tensor, lanes).view(-1) for tensor in small])  # passing one argument is faster
    if packed.is_cuda:
        launch(*kernels, packed, *(tensor.view(-1) for tensor in tensors), B, T, C)
    elif shape.numel() <= SERIAL:
        launch(kernels[0], packed, *tensors, B, T, C // lanes)
    else:
        launch(kernels[1], packed, *tensors, B, T, C // lanes, shares(B * C // lanes))


@cache
def _forward_kernels(dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the kernels for one thread and for several threads, for k, v and y of `dtype`."""
    Rows, read, write = storage_of(dtype, FORWARD)

    @ti.kernel
    def serial(small: Forward, k: Rows, v: Rows, y: Rows, state: Forward, B: int, T: int, C: int):
        ti.loop_config(serialize=True)
        for row in range(B * C):
            _forward_row(row, read, write, small, k, v, y, state, B * C, T, C)

    @ti.kernel
    def parallel(small: Forward, k: Rows, v: Rows, y: Rows, state: Forward, B: int, T: int, C: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * C, n)
            for row in range(first, end):
                _forward_row(row, read, write, small, k, v, y, state, B * C, T, C)

    return serial, parallel


@ti.kernel
def _forward_cuda(small: Flat, k: Flat, v: Flat, y: Flat, state: Flat, B: int, T: int, C: int):
    for row in range(B * C):
        _forward_row(row, identity, identity, small, k, v, y, state, B * C, T, C)


@cache
def _backward_kernels(dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the kernels for one and for several threads, for k, v, grad_y and the gradients of k and v of `dtype`."""
    Rows, read, write = storage_of(dtype, BACKWARD)

    @ti.kernel
    def serial(small: Backward, k: Rows, v: Rows, grad_y: Rows, grad_k: Rows, grad_v: Rows,
               grads: Backward, states: Backward, scratch: Backward, B: int, T: int, C: int):
        ti.loop_config(serialize=True)
        for row in range(B * C):
            _backward_row(row, read, write, small, k, v, grad_y, grad_k, grad_v, grads, states, scratch, 0, 1, B * C, T, C)

    @ti.kernel
    def parallel(small: Backward, k: Rows, v: Rows, grad_y: Rows, grad_k: Rows, grad_v: Rows,
                 grads: Backward, states: Backward, scratch: Backward, B: int, T: int, C: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * C, n)
            for row in range(first, end):
                at = step // BLOCK * (SAVED * CHUNK)
                _backward_row(row, read, write, small, k, v, grad_y, grad_k, grad_v, grads, states, scratch, at, 1, B * C, T, C)

    return serial, parallel


@ti.kernel
def _backward_cuda(small: Flat, k: Flat, v: Flat, grad_y: Flat, grad_k: Flat, grad_v: Flat,
                   grads: Flat, states: Flat, scratch: Flat, B: int, T: int, C: int):
    for row in range(B * C):
        _backward_row(row, identity, identity, small, k, v, grad_y, grad_k, grad_v, grads, states, scratch, row, B * C,
                      B * C, T, C)


@ti.func
def _forward_row(row, read: ti.template(), write: ti.template(), small: ti.template(), k: ti.template(), v: ti.template(),
                 y: ti.template(), state: ti.template(), R, T, C):
    _, decay, shift, drift, bonus, bonus_shift = _weights(small[row % C], small[C + row % C])
    a, b, P, _ = _enter(small, 2 * C + row, R)
    for j in range((T + CHUNK - 1) // CHUNK):
        for t in range(j * CHUNK, ti.min(T, (j + 1) * CHUNK)):
            i = (row // C * T + t) * C + row % C
            m, n = _exp(read(k[i]))
            v_t = read(v[i])
            now = bonus * m * _pow2(ti.min(ti.max(bonus_shift + n - P, -64), 64))
            y[i] = write((a + now * v_t) / (b + now))
            old, new, P_next = _factors(decay, shift, m, n, P)
            a, b, P = old * a + new * v_t, old * b + new, P_next
        a, b, P = _move_power(drift, j, a, b, P)
    scale, p = _leave(P)
    _save(state, row, R, [scale * a, scale * b, p])


@ti.func
def _backward_row(row, read: ti.template(), write: ti.template(), small: ti.template(), k: ti.template(), v: ti.template(),
                  grad_y: ti.template(), grad_k: ti.template(), grad_v: ti.template(), grads: ti.template(),
                  states: ti.template(), scratch: ti.template(), at, stride, R, T, C):
    w, decay, shift, drift, bonus, bonus_shift = _weights(small[row % C], small[C + row % C])
    a, b, P, scale_in = _enter(small, 2 * C + row, R)
    last = (T - 1) // CHUNK
    for j in range(last):
        _save(states, 3 * j * R + row, R, [a, b, by_lane(ti.bit_cast, P, ti.f32)])
        for t in range(j * CHUNK, (j + 1) * CHUNK):
            i = (row // C * T + t) * C + row % C
            m, n = _exp(read(k[i]))
            old, new, P_next = _factors(decay, shift, m, n, P)
            a, b, P = old * a + new * read(v[i]), old * b + new, P_next
        a, b, P = _move_power(drift, j, a, b, P)
    _save(states, 3 * last * R + row, R, [a, b, by_lane(ti.bit_cast, P, ti.f32)])
    grad_a = small[2 * C + 3 * R + row]
    grad_b = small[2 * C + 4 * R + row]
    grad_w = 0.0 * w
    grad_u = 0.0 * w
    for from_last in range(last + 1):
        j = last - from_last
        length = ti.min(CHUNK, T - j * CHUNK)
        first = (row // C * T + j * CHUNK) * C + row % C
        a, b, bits = [states[(3 * j + s) * R + row] for s in ti.static(range(3))]
        P = by_lane(ti.bit_cast, bits, ti.i32)
        for t in range(length):
            m, n = _exp(read(k[first + t * C]))
            now = bonus * m * _pow2(ti.min(ti.max(bonus_shift + n - P, -64), 64))
            old, new, P_next = _factors(decay, shift, m, n, P)
            _save(scratch, at + t * SAVED * stride, stride, [a, b, now, old, new])
            a, b, P = old * a + new * read(v[first + t * C]), old * b + new, P_next
        grad_a, grad_b, P = _move_power(drift, j, grad_a, grad_b, P)
        scale, _ = _leave((1 - ti.min(from_last, 1)) * P)  # the factor is 1 except in the last chunk; an `if` is avoided
        grad_a = scale * grad_a
        grad_b = scale * grad_b
        for back in range(1, length + 1):
            i = first + (length - back) * C
            o = at + (length - back) * SAVED * stride
            a_t, b_t, now, old, new = [scratch[o + s * stride] for s in ti.static(range(SAVED))]
            v_t = read(v[i])
            over = 1.0 / (b_t + now)
            grad_num = over * read(grad_y[i])
            grad_here = now * grad_num * (over * (v_t * b_t - a_t))  # this is v - y, and exact where the step dominates y
            grad_k[i] = write(grad_here + new * (grad_a * v_t + grad_b))
            grad_v[i] = write(now * grad_num + new * grad_a)
            grad_u += grad_here
            grad_w += old * (grad_a * a_t + grad_b * b_t)
            grad_a, grad_b = old * grad_a + grad_num, old * grad_b - grad_num * (over * (a_t + now * v_t))
    _save(grads, row, R, [w * grad_w, grad_u, scale_in * grad_a, scale_in * grad_b])


@ti.func
def _save(x: ti.template(), at, stride, values: ti.template()):
    for s in ti.static(range(len(values))):
        x[at + s * stride] = values[s]


@ti.func
def _weights(time_decay, time_first):
    """Returns w, m and n of e^w, log2 of the mantissa's power over a chunk, and m and n of e^u."""
    m, n = _exp(ti.select(time_decay > LOST, LOST, time_decay))
    w = 0.0 - m * _pow2(ti.max(n, -127))
    decay, shift = _exp(w)
    high = decay > ROOT_2
    shift = ti.select(high, shift + 1, shift)
    decay = ti.select(high, 0.5 * decay, decay)
    drift = CHUNK * (w * LOG2_E - by_lane(ti.cast, shift, ti.f32))
    bonus, bonus_shift = _exp(time_first)
    return w, decay, ti.select(time_decay > LOST, LOST_SHIFT, shift), drift, bonus, bonus_shift


@ti.func
def _enter(small: ti.template(), at, R):
    """Returns the initial state, scaled so that b is in [1, 2), with P, and the factor applied to a and b."""
    a, b, p = [small[at + s * R] for s in ti.static(range(3))]
    m, P = _exp(p)
    n = ti.min(ti.max((by_lane(ti.bit_cast, b, ti.i32) >> 23) - 127, -126), 126)
    scale = m * _pow2(0 - n)
    return scale * a, scale * b, P + n, scale


@ti.func
def _leave(P):
    """Returns 2^P / e^p, which rescales a and b to e^p and corrects the rounding of p, and p = P log 2."""
    p = LN_2 * by_lane(ti.cast, P, ti.f32)
    m, n = _exp(p)
    return _pow2(ti.min(ti.max(P - n, -127), 127)) / m, p


@ti.func
def _factors(decay, shift, m, n, P):
    """Returns the factors of the previous state (e^w) and of v_t (e^k) in the new state, and the new P."""
    lead = n - (P + shift)
    up = ti.max(lead, 0)
    return decay * _pow2(0 - ti.min(up, 127)), m * _pow2(ti.max(lead - up, -127)), P + shift + up


@ti.func
def _move_power(drift, j, a, b, P):
    """Moves the power of e^w's mantissa over chunk j into P, for a and b or for the gradients of a and b."""
    n = by_lane(ti.cast, ti.floor((j + 1) * drift), ti.i32) - by_lane(ti.cast, ti.floor(j * drift), ti.i32)
    scale = _pow2(0 - n)
    return scale * a, scale * b, P + n


@ti.func
def _exp(x):
    """Returns m and n with e^x = m * 2^n and m in [1, 2), within 1 ulp."""
    bits = by_lane(ti.bit_cast, x, ti.i32)  # bits are compared, because fast_math assumes that there is no infinity
    x = by_lane(ti.bit_cast, ti.select(bits == INFINITY, NAN, bits), ti.f32)
    x = ti.select(x > LIMIT, LIMIT, x)  # unlike ti.min, this keeps a NaN
    x = ti.select(x < -LIMIT, -LIMIT, x)
    power = ti.floor(x * LOG2_E)
    n = by_lane(ti.cast, power, ti.i32)
    # x - n log 2, exact because the high part is short; if both products had the same factor, LLVM would add the parts first
    r = (x + power * -LN_2_HIGH) + by_lane(ti.cast, n, ti.f32) * -LN_2_LOW
    m = r * EXP[-1] + EXP[-2]
    for c in ti.static(EXP[-3::-1]):
        m = m * r + c
    return m, n


@ti.func
def _pow2(n):
    """Returns 2^n for n in [-126, 127], and 0 for n = -127."""
    return by_lane(ti.bit_cast, (n + 127) << 23, ti.f32)
