"""The CPU implementation of FusedBackend (backend.py), in C: token shift and squared ReLU. csrc/fused.c has the formulas.

A row is one step of one sequence, so there are B T rows. All arithmetic is in float32. Gradients of vectors are summed in an
order that does not depend on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.native.dtypes import DTYPES
from kernels.operator import contiguous

MIXES = {(torch.float32, torch.float32): "float32", (torch.bfloat16, torch.bfloat16): "bfloat16",
         (torch.float32, torch.bfloat16): "autocast"}    # suffix of the C function, by the dtypes of x and of the mixes
MAX_MIXES = 6                            # fused.c has the same limit
ROWS = 32                                # rows per task, as in every C file
PIECE = 2 ** 14                          # elements per task of the squared ReLU, as in fused.c
SERIAL = 2 ** 14                         # up to this many elements, one thread finishes before a second thread would wake

Tensors = tuple[Tensor, ...]


def supports(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool:
    """Returns True if the C functions support these tensors and results in `dtype`. N is ignored.

    The tensors must have the same dtype, which is also the default of `dtype`.
    """
    first = tensors[0].dtype
    return (first, dtype or first) in MIXES and all(tensor.dtype == first for tensor in tensors)


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
        to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """Computes fused.mix."""
    x, mus = x.contiguous(), float32_rows(mus, x.shape[-1])
    last_x = None if last_x is None else float32_rows((last_x,), x.shape[-1])[0]
    mixes = tuple(torch.empty_like(x, dtype=dtype) for _ in mus)
    _run_mixes("forward", x, last_x, mus, to_previous, mixes, None, None, None, None)
    return (x, last_x, *mus), mixes


def mix_backward(saved: Sequence[Tensor | None], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]:
    """Computes fused.mix_backward. The gradient of last_x is None if last_x was None."""
    x, last_x, *others = saved
    mus = tuple(mu for mu in others if mu is not None)
    assert x is not None
    n, C = len(mus), x.shape[-1]
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    sums, grad_mus = task_sums(x, n + 1), x.new_empty(n, 1, 1, C, dtype=torch.float32)
    _run_mixes("backward", x, last_x, mus, to_previous, tuple(grad.contiguous() for grad in grads), grad_x, grad_last_x,
               sums, grad_mus)
    return grad_x, grad_last_x, *grad_mus.unbind()


def _run_mixes(direction: str, x: Tensor, last_x: Tensor | None, mus: Tensors, to_previous: bool, mixes: Tensors,
               *gradients: Tensor | None) -> None:
    _, T, C = x.shape
    native.run(f"mixes_{direction}_{MIXES[x.dtype, mixes[0].dtype]}", threads(x), x.numel() // C, T, C, len(mus), to_previous,
               x, last_x, *pad_to(mus, MAX_MIXES), *pad_to(mixes, MAX_MIXES), *gradients)


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """Returns max(x, 0)^2. With `grad`, the gradient of that result, returns the gradient of x instead."""
    x = x.contiguous()
    out = torch.empty_like(x)
    n_threads = 1 if x.numel() <= SERIAL else native.threads_for(-(-x.numel() // PIECE))
    native.run(f"squared_relu_{DTYPES[x.dtype]}", n_threads, x.numel(), x, None if grad is None else grad.contiguous(), out)
    return out


def pad_to(tensors: Tensors, n: int) -> tuple[Tensor | None, ...]:
    """Returns n arguments: the tensors, then None as often as needed."""
    return *tensors, *[None] * (n - len(tensors))


def task_sums(x: Tensor, n: int) -> Tensor:
    """Allocates memory (tasks,n,C), uninitialised, for each task's partial sums of n vectors."""
    return x.new_empty(_n_tasks(x), n, x.shape[-1], dtype=torch.float32)


def _n_tasks(x: Tensor) -> int:
    return -(-(x.numel() // x.shape[-1]) // ROWS)


def threads(x: Tensor) -> int:
    return 1 if x.numel() <= SERIAL else native.threads_for(_n_tasks(x))


def float32_rows(tensors: Tensors, C: int) -> Tensors:
    """Makes each tensor contiguous and float32, as C code requires. A tensor is a vector (C,) or a state (B,C).

    Raises ValueError if a tensor's size is not a multiple of C, because C code would read out of bounds.
    """
    for tensor in tensors:
        if tensor.numel() % C:
            raise ValueError(f"a vector must have {C} elements; got the shape {tuple(tensor.shape)}")
    return tuple(contiguous(tensor, torch.float32) for tensor in tensors)
