"""Three passes over a row, which stays in the nearest cache, find the largest element, sum the exponentials, and divide.

On a CPU the kernel uses vectors of 16 columns. e^d for d <= 0 is computed as 2^n times a polynomial in the remainder of d. 2^n
is computed by writing n into the exponent's bits. Results below 2^-126 may be 0. Rows are padded to whole vectors with -inf,
whose result is 0. On a GPU a block of threads computes a row; the threads combine their results in shared memory.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
import torch
from torch import Tensor

from kernels.backends.lanes import by_lane
from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",))

LANES, UNROLLED = 16, 4  # elements per vector; vectors per iteration of a CPU loop
ALIGNMENT = 64  # bytes; a vector load from an unaligned address is a segmentation fault
THREADS = 128  # threads per block of a GPU, a power of 2
ROWS = 2**23  # threads per launch on a GPU: Taichi counts them in 32 bits
LOG2_E, LOG2_E_SHORT = 1.4426950408889634, 1.4426949  # two constants, so that the product is not rounded before n is subtracted
LOWEST = -88.4  # below this, e^d is 0: n = -127 gives the float 0
EXP2 = (9.99999925e-01, 6.93142253e-01, 2.40172189e-01, 5.52797221e-02, 9.1886112e-03, 9.38788132e-04)  # error 8e-8 on [-1, 0]
Lanes = ti.types.vector(LANES, ti.f32)
Vectors = ti.types.ndarray(dtype=Lanes, ndim=1)
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)


def forward(x: Tensor) -> Tensor:
    return _on_cuda(_forward_cuda, x) if x.is_cuda else _on_cpu(_forward_cpu, -torch.inf, x)


def backward(y: Tensor, grad_y: Tensor) -> Tensor:
    return _on_cuda(_backward_cuda, y, grad_y) if y.is_cuda else _on_cpu(_backward_cpu, 0.0, y, grad_y)


def _on_cpu(kernel, padding: float, *inputs: Tensor) -> Tensor:
    N, M = inputs[0].shape
    inputs = tuple(_whole_vectors(tensor, padding) for tensor in inputs)
    result = torch.empty_like(inputs[0])
    launch(kernel, *(tensor.view(-1, LANES) for tensor in (*inputs, result)), N, result.shape[1] // LANES, shares(N))
    return result if result.shape[1] == M else result[:, :M].contiguous()


def _whole_vectors(rows: Tensor, padding: float) -> Tensor:
    N, M = rows.shape
    if M % LANES == 0 and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    padded = rows.new_empty(N, M + -M % LANES)
    padded[:, :M] = rows
    padded[:, M:] = padding
    return padded


def _on_cuda(kernel, *inputs: Tensor) -> Tensor:
    result = torch.empty_like(inputs[0])
    for part in zip(*(tensor.split(ROWS) for tensor in (*inputs, result)), strict=True):
        launch(kernel, *(tensor.view(-1) for tensor in part), *part[0].shape)
    return result


@ti.kernel
def _forward_cpu(x: Vectors, y: Vectors, N: int, V: int, n: int):
    for step in range(n * BLOCK):
        first, end = share(step, N, n)
        for row in range(first, end):
            largest = _largest(x, row * V, V)
            total = _exponentials(x, y, row * V, V, largest)
            _scale(y, row * V, V, 1.0 / total)


@ti.kernel
def _backward_cpu(y: Vectors, grad_y: Vectors, grad_x: Vectors, N: int, V: int, n: int):
    for step in range(n * BLOCK):
        first, end = share(step, N, n)
        for row in range(first, end):
            dot = _dot(y, grad_y, row * V, V)
            _centre(y, grad_y, grad_x, row * V, V, dot)


@ti.func
def _largest(x: ti.template(), at, V):
    largest = [x[at] for _ in ti.static(range(UNROLLED))]
    for j in range(V // UNROLLED):
        o = (at + UNROLLED * j) & INDEX
        for k in ti.static(range(UNROLLED)):
            largest[k] = ti.max(largest[k], x[o + k])
    for j in range(V // UNROLLED * UNROLLED, V):
        largest[0] = ti.max(largest[0], x[at + j])
    for k in ti.static(range(1, UNROLLED)):
        largest[0] = ti.max(largest[0], largest[k])
    return largest[0].max()


@ti.func
def _exponentials(x: ti.template(), y: ti.template(), at, V, largest):
    """Writes the exponentials e^(x - largest) into y and returns their sum."""
    total = [Lanes(0.0) for _ in ti.static(range(2))]
    for j in range(V // UNROLLED):
        o = (at + UNROLLED * j) & INDEX
        e = [_exp(x[o + k] - largest) for k in ti.static(range(UNROLLED))]
        for k in ti.static(range(UNROLLED)):  # all loads precede all stores, because Taichi reloads the address after a store
            y[o + k] = e[k]
            total[k % 2] += e[k]
    for j in range(V // UNROLLED * UNROLLED, V):
        e = _exp(x[at + j] - largest)
        y[at + j] = e
        total[0] += e
    return (total[0] + total[1]).sum()


@ti.func
def _exp(d):
    """Returns e^d for d <= 0, and NaN for NaN."""
    d = ti.select(d < LOWEST, LOWEST, d)
    n = by_lane(ti.cast, d * LOG2_E_SHORT, ti.i32)
    rest = d * LOG2_E - by_lane(ti.cast, n, ti.f32)  # a fused multiply-add, which does not round the product
    power = rest * EXP2[-1] + EXP2[-2]
    for c in ti.static(EXP2[-3::-1]):
        power = power * rest + c
    return power * by_lane(ti.bit_cast, (n + 127) << 23, ti.f32)


@ti.func
def _scale(y: ti.template(), at, V, factor):
    for j in range(V // UNROLLED):
        o = (at + UNROLLED * j) & INDEX
        scaled = [y[o + k] * factor for k in ti.static(range(UNROLLED))]
        for k in ti.static(range(UNROLLED)):
            y[o + k] = scaled[k]
    for j in range(V // UNROLLED * UNROLLED, V):
        y[at + j] = y[at + j] * factor


@ti.func
def _dot(y: ti.template(), grad_y: ti.template(), at, V):
    total = [Lanes(0.0) for _ in ti.static(range(UNROLLED))]
    for j in range(V // UNROLLED):
        o = (at + UNROLLED * j) & INDEX
        for k in ti.static(range(UNROLLED)):
            total[k] += y[o + k] * grad_y[o + k]
    for j in range(V // UNROLLED * UNROLLED, V):
        total[0] += y[at + j] * grad_y[at + j]
    for k in ti.static(range(1, UNROLLED)):
        total[0] += total[k]
    return total[0].sum()


@ti.func
def _centre(y: ti.template(), grad_y: ti.template(), grad_x: ti.template(), at, V, dot):
    for j in range(V // UNROLLED):
        o = (at + UNROLLED * j) & INDEX
        grad = [y[o + k] * (grad_y[o + k] - dot) for k in ti.static(range(UNROLLED))]
        for k in ti.static(range(UNROLLED)):
            grad_x[o + k] = grad[k]
    for j in range(V // UNROLLED * UNROLLED, V):
        grad_x[at + j] = y[at + j] * (grad_y[at + j] - dot)


@ti.kernel
def _forward_cuda(x: Flat, y: Flat, N: int, M: int):
    ti.loop_config(block_dim=THREADS)
    for thread in range(N * THREADS):
        parts = ti.simt.block.SharedArray(THREADS, ti.f32)
        row = thread // THREADS * M
        i = thread % THREADS
        largest = -ti.math.inf
        for j in range((M - i + THREADS - 1) // THREADS):
            largest = ti.max(largest, x[row + i + j * THREADS])
        largest = _join(parts, i, largest, ti.max)
        total = 0.0
        for j in range((M - i + THREADS - 1) // THREADS):
            e = ti.exp(x[row + i + j * THREADS] - largest)
            y[row + i + j * THREADS] = e
            total += e
        total = _join(parts, i, total, _sum)
        for j in range((M - i + THREADS - 1) // THREADS):
            y[row + i + j * THREADS] = y[row + i + j * THREADS] / total


@ti.kernel
def _backward_cuda(y: Flat, grad_y: Flat, grad_x: Flat, N: int, M: int):
    ti.loop_config(block_dim=THREADS)
    for thread in range(N * THREADS):
        parts = ti.simt.block.SharedArray(THREADS, ti.f32)
        row = thread // THREADS * M
        i = thread % THREADS
        dot = 0.0
        for j in range((M - i + THREADS - 1) // THREADS):
            dot += y[row + i + j * THREADS] * grad_y[row + i + j * THREADS]
        dot = _join(parts, i, dot, _sum)
        for j in range((M - i + THREADS - 1) // THREADS):
            at = row + i + j * THREADS
            grad_x[at] = y[at] * (grad_y[at] - dot)


@ti.func
def _sum(a, b):
    return a + b


@ti.func
def _join(parts: ti.template(), i, part, of_two: ti.template()):
    """Combines all threads' values pairwise, with half as many threads at each level. Every thread gets the result."""
    parts[i] = part
    ti.simt.block.sync()
    for level in ti.static(range(THREADS.bit_length() - 1)):
        if i < THREADS >> (level + 1):
            parts[i] = of_two(parts[i], parts[i + (THREADS >> (level + 1))])
        ti.simt.block.sync()
    joined = parts[0]
    ti.simt.block.sync()  # waits until all threads have read the result, before `parts` is overwritten
    return joined
