"""The operations between the matrix products in C, for CPUs: csrc/fused.c and ../rwkv7/csrc/fused.c have the formulas.

Rows are the steps of all sequences, (B,T); all arithmetic is in float32. Gradients of vectors are summed in an order that does
not depend on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.native.dtypes import DTYPES
from kernels.operator import contiguous

MIXES = {(torch.float32, torch.float32): "float32", (torch.bfloat16, torch.bfloat16): "bfloat16",
         (torch.float32, torch.bfloat16): "autocast"}    # by the dtypes of x and of its mixes
MAX_MIXES = 6                            # as in fused.c
ROWS = 32                                # per task, as in both sources
PIECE = 2 ** 14                          # elements per task of the squared ReLU, as in fused.c
SERIAL = 2 ** 14                         # up to this many elements, one thread finishes before another wakes

Tensors = tuple[Tensor, ...]


def supports(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool:
    """Whether the C functions support these tensors, of one dtype and with heads of any N. dtype: that of the results."""
    first = tensors[0]
    return (dtype or first.dtype) in DTYPES and all(tensor.dtype == first.dtype for tensor in tensors)


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
        to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """As fused.mix."""
    x, mus = x.contiguous(), _float32_rows(mus, x.shape[-1])
    last_x = None if last_x is None else _float32_rows((last_x,), x.shape[-1])[0]
    mixes = tuple(torch.empty_like(x, dtype=dtype) for _ in mus)
    _run_mixes("forward", x, last_x, mus, to_previous, mixes, None, None, None, None)
    return (x, last_x, *mus), mixes


def mix_backward(saved: Sequence[Tensor | None], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]:
    """As fused.mix_backward; the gradient of last_x is None if there was no last_x."""
    x, last_x, *others = saved
    mus = tuple(mu for mu in others if mu is not None)
    assert x is not None
    n, C = len(mus), x.shape[-1]
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    task_sums, grad_mus = _task_sums(x, n + 1), x.new_empty(n, 1, 1, C, dtype=torch.float32)
    _run_mixes("backward", x, last_x, mus, to_previous, tuple(grad.contiguous() for grad in grads), grad_x, grad_last_x,
               task_sums, grad_mus)
    return grad_x, grad_last_x, *grad_mus.unbind()


def _run_mixes(direction: str, x: Tensor, last_x: Tensor | None, mus: Tensors, to_previous: bool, mixes: Tensors,
               *gradients: Tensor | None) -> None:
    _, T, C = x.shape
    native.run(f"mixes_{direction}_{MIXES[x.dtype, mixes[0].dtype]}", _threads(x), x.numel() // C, T, C, len(mus), to_previous,
               x, last_x, *_padded(mus, MAX_MIXES), *_padded(mixes, MAX_MIXES), *gradients)


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """max(x, 0)^2. If grad is given, the gradient of that square: the gradient of x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    threads = 1 if x.numel() <= SERIAL else native.threads_for(-(-x.numel() // PIECE))
    native.run(f"squared_relu_{DTYPES[x.dtype]}", threads, x.numel(), x, None if grad is None else grad.contiguous(), out)
    return out


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """(log_w, k, v, a, b, 1 / |k k_k|) of rwkv7_fused.gates, from z = (zw, za[, zv]) and vectors k_k, k_a, w0, a0[, v0]."""
    H = k.shape[-1] // N
    inverse = k.new_empty(*k.shape[:-1], H, dtype=torch.float32)
    log_w = torch.empty_like(k, dtype=torch.float32)
    new_k, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    new_v = v if v_first is None else torch.empty_like(v)
    _run_rwkv7("gates_forward", k, N, k, v, v_first, *_padded(z, 3), *_padded(_float32_rows(vectors, k.shape[-1]), 5), inverse,
               log_w, new_k, new_v, a, b, *[None] * 10)
    return log_w, new_k, new_v, a, b, inverse


def gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                   grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
                   ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """As rwkv7_fused._gates_backward."""
    grad_k, grad_v, grad_z = torch.empty_like(k), torch.empty_like(v), tuple(torch.empty_like(part) for part in z)
    grad_first = None if v_first is None else torch.empty_like(v)
    grad_vectors = _empty_vectors(k, 5)
    extra_grads = (None if grad is None else grad.contiguous() for grad in extra)
    _run_rwkv7("gates_backward", k, N, k, v, v_first, *_padded(z, 3), *_padded(_float32_rows(vectors, k.shape[-1]), 5), inverse,
               *(grad.contiguous() for grad in grads), *extra_grads, grad_k, grad_v, grad_first, *_padded(grad_z, 3),
               _task_sums(k, 5), grad_vectors)
    return (grad_k, grad_v, grad_first), grad_z, grad_vectors.unbind()[:len(vectors)]


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor:
    """As rwkv7_fused._gated."""
    out = torch.empty_like(r)
    _run_rwkv7("output_forward", r, N, y, r, k, v, g, *_float32_rows(vectors, r.shape[-1]), out, *[None] * 7)
    return out


def gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                   grad: Tensor) -> tuple[Tensors, Tensors]:
    """As rwkv7_fused._gated_backward."""
    grads = tuple(torch.empty_like(tensor) for tensor in (y, r, k, v, g))
    grad_vectors = _empty_vectors(r, 3)
    _run_rwkv7("output_backward", r, N, y, r, k, v, g, *_float32_rows(vectors, r.shape[-1]), grad.contiguous(), *grads,
               _task_sums(r, 3), grad_vectors)
    return grads, grad_vectors.unbind()


def _run_rwkv7(name: str, x: Tensor, N: int, *tensors: Tensor | None) -> None:
    C = x.shape[-1]
    native.run(f"rwkv7_{name}_{DTYPES[x.dtype]}", _threads(x), x.numel() // C, C // N, N, *tensors)


def _padded(tensors: Tensors, n: int) -> tuple[Tensor | None, ...]:
    """n arguments: the tensors, then None."""
    return *tensors, *[None] * (n - len(tensors))


def _task_sums(x: Tensor, n: int) -> Tensor:
    """Uninitialised memory for the sums of n vectors in each task: (tasks,n,C)."""
    return x.new_empty(_tasks(x), n, x.shape[-1], dtype=torch.float32)


def _empty_vectors(x: Tensor, n: int) -> Tensor:
    """Uninitialised memory for n vectors (C,)."""
    return x.new_empty(n, x.shape[-1], dtype=torch.float32)


def _tasks(x: Tensor) -> int:
    return -(-(x.numel() // x.shape[-1]) // ROWS)


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= SERIAL else native.threads_for(_tasks(x))


def _float32_rows(tensors: Tensors, C: int) -> Tensors:
    """Vectors (C,) and states (B,C) as C reads them. Raises ValueError for tensors that C would read out of bounds."""
    for tensor in tensors:
        if tensor.numel() % C:
            raise ValueError(f"a vector must have {C} elements; got shape {tuple(tensor.shape)}")
    return tuple(contiguous(tensor, torch.float32) for tensor in tensors)
