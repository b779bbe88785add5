"""The C forms of what stands between the matrix products, for CPUs: csrc/fused.c and csrc/rwkv7_fused.c have the formulas.

Rows are the steps of all texts, (B,T); all arithmetic is in float32. Gradients of vectors are summed in an order that depends
on no number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native

MIXES = {(torch.float32, torch.float32): "float32", (torch.bfloat16, torch.bfloat16): "bfloat16",
         (torch.float32, torch.bfloat16): "autocast"}    # by the dtypes of x and of its mixes
MOST_MIXES = 6                           # as in fused.c
ROWS = 32                                # of a task, as in both sources
PIECE = 2 ** 14                          # numbers of a task of the squared ReLU
SERIAL = 2 ** 14                         # elements up to which one thread is done before another one is awake

Tensors = tuple[Tensor, ...]


def takes(*tensors: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the C forms compute on these tensors, which are all of one dtype: of dtype, where it is given."""
    first = tensors[0]
    return (first.device.type == "cpu" and (dtype or first.dtype) in native.FORMS and native.why_not() is None
            and all(tensor.dtype == first.dtype for tensor in tensors))


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """As fused.mix; what it keeps is x, last_x and the mus."""
    x, mus = x.contiguous(), tuple(map(_float32, mus))
    last_x = None if last_x is None else _float32(last_x)
    mixes = tuple(torch.empty_like(x, dtype=dtype) for _ in mus)
    _run_mixes("forward", x, last_x, mus, mixes, None, None, None)
    return (x, last_x, *mus), mixes


def mix_backward(kept: Sequence[Tensor | None], grads: Tensors) -> tuple[Tensor | None, ...]:
    """As fused.mix_backward, with None for the gradient of last_x where there was none."""
    x, last_x, *others = kept
    mus = tuple(mu for mu in others if mu is not None)
    assert x is not None
    grad_x = torch.empty_like(x)
    grad_last_x = None if last_x is None else torch.empty_like(last_x)
    grad_mus = x.new_empty(_tasks(x), len(mus), x.shape[-1], dtype=torch.float32)
    _run_mixes("backward", x, last_x, mus, tuple(grad.contiguous() for grad in grads), grad_x, grad_last_x, grad_mus)
    return grad_x, grad_last_x, *(grad.view(1, 1, -1) for grad in _total(grad_mus))


def _run_mixes(direction: str, x: Tensor, last_x: Tensor | None, mus: Tensors, mixes: Tensors,
               *of_backward: Tensor | None) -> None:
    """Calls the C function with its struct call."""
    _, T, C = x.shape
    unused = [None] * (MOST_MIXES - len(mus))
    native.run(f"mixes_{direction}_{MIXES[x.dtype, mixes[0].dtype]}", _threads(x), x.numel() // C, T, C, len(mus), x, last_x,
               *mus, *unused, *mixes, *unused, *of_backward)


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """max(x, 0)^2, or the gradient of x from the gradient of that."""
    x = x.contiguous()
    out = torch.empty_like(x)
    threads = 1 if x.numel() <= SERIAL else native.threads_for(-(-x.numel() // PIECE))
    native.run(f"squared_relu_{native.FORMS[x.dtype]}", threads, x.numel(), x, None if grad is None else grad.contiguous(), out)
    return out


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """(log_w, k, v, a, b, 1 / |k k_k|) of rwkv7_fused.gates, from z = (zw, za[, zv]) and vectors k_k, k_a, w0, a0[, v0]."""
    H = k.shape[-1] // N
    inverse = k.new_empty(*k.shape[:-1], H, dtype=torch.float32)
    log_w = torch.empty_like(k, dtype=torch.float32)
    new_k, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    new_v = v if v_first is None else torch.empty_like(v)
    _run_rwkv7("gates_forward", k, N, k, v, v_first, *_three(z), *_five(vectors), inverse,
               log_w, new_k, new_v, a, b, *[None] * 7)
    return log_w, new_k, new_v, a, b, inverse


def gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                   grads: Tensors) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """From the gradients of log_w, k, v, a and b those of (k, v, v_first), of z, and of the vectors (C,)."""
    grad_k, grad_z = torch.empty_like(k), tuple(torch.empty_like(part) for part in z)
    grad_v, grad_first = (grads[2], None) if v_first is None else (torch.empty_like(v), torch.empty_like(v))
    sums = k.new_empty(_tasks(k), 5, k.shape[-1], dtype=torch.float32)
    _run_rwkv7("gates_backward", k, N, k, v, v_first, *_three(z), *_five(vectors), inverse,
               *(grad.contiguous() for grad in grads), grad_k, grad_v, grad_first, *_three(grad_z), sums)
    return (grad_k, grad_v, grad_first), grad_z, _total(sums)[:len(vectors)]


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor:
    """(GroupNorm(y) + (sum over the head of r k r_k) v) g of rwkv7_fused.output, from vectors r_k, weight and bias."""
    out = torch.empty_like(r)
    _run_rwkv7("output_forward", r, N, y, r, k, v, g, *map(_float32, vectors), out, *[None] * 6)
    return out


def gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                   grad: Tensor) -> tuple[Tensors, Tensors]:
    """From the gradient of what gated returns those of y, r, k, v and g, and of the vectors (C,)."""
    grads = tuple(torch.empty_like(tensor) for tensor in (y, r, k, v, g))
    sums = r.new_empty(_tasks(r), 3, r.shape[-1], dtype=torch.float32)
    _run_rwkv7("output_backward", r, N, y, r, k, v, g, *map(_float32, vectors), grad.contiguous(), *grads, sums)
    return grads, _total(sums)


def _run_rwkv7(name: str, x: Tensor, N: int, *tensors: Tensor | None) -> None:
    """Calls the C function with its struct."""
    C = x.shape[-1]
    native.run(f"rwkv7_{name}_{native.FORMS[x.dtype]}", _threads(x), x.numel() // C, C // N, N, *tensors)


def _three(z: Tensors) -> tuple[Tensor | None, ...]:
    return *z, *[None] * (3 - len(z))


def _five(vectors: Tensors) -> tuple[Tensor | None, ...]:
    return *map(_float32, vectors), *[None] * (5 - len(vectors))


def _total(of_tasks: Tensor) -> Tensors:
    """The sums (C,) of vectors over all tasks, of (tasks,n,C), which float64 rounds once."""
    return of_tasks.sum(0, dtype=torch.float64).float().unbind()


def _tasks(x: Tensor) -> int:
    return -(-(x.numel() // x.shape[-1]) // ROWS)


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= SERIAL else native.threads_for(_tasks(x))


def _float32(tensor: Tensor) -> Tensor:
    """As C reads vectors and states."""
    return tensor.to(torch.float32).contiguous()
