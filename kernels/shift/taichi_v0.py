"""One pass over memory each way: a step's mixes are made, and their gradients joined, while it is in registers.

bfloat16 is made, and read, there too; float16 goes through float32. A task is CHUNK steps of one sequence, one after the other,
the channels of a step side by side as they lie in memory: channel by channel, every LANES numbers would come from far apart.
What backward adds up for grad_mus, and what a step sends to the one before, stays in the nearest cache. Tasks leave their sums
side by side, to be added in an order that no thread decides. The mixes are taken AT_ONCE at a time.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels._lanes import cut, stored
from kernels._taichi import BLOCK, launch, share, shares, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",))

LANES = 16  # of a vector of channels
ALIGNMENT = 64  # bytes; a vector load from any other address is a segmentation fault
CHUNK = 64  # steps of a task
AT_ONCE = 3  # mixes
SERIAL = 2**19  # elements of x up to which one thread takes less time than waking the others
Lanes = ti.types.vector(LANES, ti.f32)
Floats = ti.types.ndarray(dtype=Lanes, ndim=1)


def forward(x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    C, (x, last_x, mus) = x.shape[-1], map(_rows, (x, last_x, mus))
    outs = [torch.empty_like(x, dtype=_written(dtype)) for _ in range(len(mus))]
    for few, some in _few_at_once(mus, outs):
        _launch(_forward_kernels(len(some), some[0].dtype), x.shape, x, last_x, few, *_slots(some))
    return tuple(cut(out, C) for out in outs)


def backward(x: Tensor, last_x: Tensor, mus: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    C, (x, last_x, mus) = x.shape[-1], map(_rows, (x, last_x, mus))
    readable, parts = [_rows(grad.to(_written(grad.dtype))) for grad in grads], []
    for few, some in _few_at_once(mus, readable):
        found = torch.empty_like(x), torch.empty_like(last_x), x.new_empty(_tasks(x.shape) + 1, *few.shape)
        _launch(_backward_kernels(len(some), some[0].dtype), x.shape, x, last_x, few, *_slots(some), *found)
        parts.append(found)
    grad_x, grad_last_x, grad_mus = zip(*parts, strict=True)
    of_mus = torch.cat([part[-1] for part in grad_mus])
    return cut(reduce(torch.add, grad_x), C), cut(reduce(torch.add, grad_last_x), C), cut(of_mus, C)


def _written(dtype: torch.dtype) -> torch.dtype:
    """What the kernels read and write for results in dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _few_at_once(mus, tensors):
    """The mus and what belongs to them, AT_ONCE at a time."""
    for first in range(0, len(tensors), AT_ONCE):
        yield mus[first:first + AT_ONCE], tensors[first:first + AT_ONCE]


def _slots(tensors):
    """Where there are fewer than a kernel has arguments for, the first stands for those that it does not look at."""
    return *tensors, *[tensors[0]] * (AT_ONCE - len(tensors))


def _rows(tensor: Tensor) -> Tensor:
    """As the kernels load it: whole vectors of channels, aligned."""
    ready = tensor.shape[-1] % LANES == 0 and tensor.data_ptr() % ALIGNMENT == 0
    return tensor if ready else pad(tensor, (0, -tensor.shape[-1] % LANES))


def _tasks(shape: torch.Size) -> int:
    B, T, _ = shape
    return B * -(-T // CHUNK)


def _launch(kernels: tuple[Any, Any], shape: torch.Size, *tensors: Tensor) -> None:
    (_, T, C), tasks, (serial, parallel) = shape, _tasks(shape), kernels
    if shape.numel() <= SERIAL:
        launch(serial, *tensors, tasks, T, C // LANES)
    else:
        launch(parallel, *tensors, tasks, T, C // LANES, shares(tasks))


@cache
def _forward_kernels(n: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Of n mixes, serial and parallel."""
    Out, _, write = stored(dtype, LANES)

    @ti.kernel
    def serial(x: Floats, last_x: Floats, mus: Floats, out_0: Out, out_1: Out, out_2: Out,
               tasks: int, T: int, C: int):
        ti.loop_config(serialize=True)
        for task in range(tasks):
            _forward_task(task, n, write, x, last_x, mus, [out_0, out_1, out_2], T, C)

    @ti.kernel
    def parallel(x: Floats, last_x: Floats, mus: Floats, out_0: Out, out_1: Out, out_2: Out,
                 tasks: int, T: int, C: int, parts: int):
        for step in range(parts * BLOCK):
            first, end = share(step, tasks, parts)
            for task in range(first, end):
                _forward_task(task, n, write, x, last_x, mus, [out_0, out_1, out_2], T, C)

    return serial, parallel


@cache
def _backward_kernels(n: int, dtype: torch.dtype) -> tuple[Any, Any]:
    Grad, read, _ = stored(dtype, LANES)

    @ti.kernel
    def serial(x: Floats, last_x: Floats, mus: Floats, grad_0: Grad, grad_1: Grad, grad_2: Grad,
               grad_x: Floats, grad_last_x: Floats, grad_mus: Floats, tasks: int, T: int, C: int):
        ti.loop_config(serialize=True)
        for task in range(tasks):
            _backward_task(task, n, read, x, last_x, mus, [grad_0, grad_1, grad_2], grad_x, grad_last_x, grad_mus, T, C)
        ti.loop_config(serialize=True)
        for i in range(n * C):
            _add_up(grad_mus, i, tasks, n * C)

    @ti.kernel
    def parallel(x: Floats, last_x: Floats, mus: Floats, grad_0: Grad, grad_1: Grad, grad_2: Grad,
                 grad_x: Floats, grad_last_x: Floats, grad_mus: Floats, tasks: int, T: int, C: int, parts: int):
        for step in range(parts * BLOCK):
            first, end = share(step, tasks, parts)
            for task in range(first, end):
                _backward_task(task, n, read, x, last_x, mus, [grad_0, grad_1, grad_2], grad_x, grad_last_x, grad_mus, T, C)
        ti.loop_config(serialize=True)
        for i in range(n * C):
            _add_up(grad_mus, i, tasks, n * C)

    return serial, parallel


@ti.func
def _forward_task(task, n: ti.template(), write: ti.template(), x: ti.template(), last_x: ti.template(), mus: ti.template(),
                  outs: ti.template(), T, C):
    chunks = (T + CHUNK - 1) // CHUNK
    b, first = task // chunks, task % chunks * CHUNK
    for t in range(first, ti.min(T, first + CHUNK)):
        at = (b * T + t) * C
        for c in range(C):
            before = last_x[b * C + c]
            if t > 0:
                before = x[at - C + c]
            change = x[at + c] - before
            for i in ti.static(range(n)):
                outs[i][at + c] = write(before + mus[i * C + c] * change)


@ti.func
def _backward_task(task, n: ti.template(), read: ti.template(), x: ti.template(), last_x: ti.template(), mus: ti.template(),
                   grads: ti.template(), grad_x: ti.template(), grad_last_x: ti.template(), grad_mus: ti.template(), T, C):
    chunks = (T + CHUNK - 1) // CHUNK
    b, first = task // chunks, task % chunks * CHUNK
    end = ti.min(T, first + CHUNK)
    for c in range(n * C):
        grad_mus[task * n * C + c] = Lanes(0.0)
    for t in range(first, end):
        at = (b * T + t) * C
        for c in range(C):
            before = last_x[b * C + c]
            if t > 0:
                before = x[at - C + c]
            change, here, total = x[at + c] - before, Lanes(0.0), Lanes(0.0)
            for i in ti.static(range(n)):
                grad = read(grads[i][at + c])
                sum_at = (task * n + i) * C + c
                grad_mus[sum_at] = grad_mus[sum_at] + grad * change  # += of an array's element would be atomic
                here += mus[i * C + c] * grad
                total += grad
            grad_x[at + c] = here
            if t > first:
                grad_x[at - C + c] = grad_x[at - C + c] + (total - here)
            elif t == 0:
                grad_last_x[b * C + c] = total - here
    if end < T:
        at = (b * T + end) * C
        for c in range(C):
            sent = Lanes(0.0)
            for i in ti.static(range(n)):
                grad = read(grads[i][at + c])
                sent += grad - mus[i * C + c] * grad
            grad_x[at - C + c] = grad_x[at - C + c] + sent


@ti.func
def _add_up(parts: ti.template(), i, tasks, stride):
    """The sum over tasks, behind the last of them."""
    total = Lanes(0.0)
    for task in range(tasks):
        total += parts[task * stride + i]
    parts[tasks * stride + i] = total
