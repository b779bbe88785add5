"""RWKV-7's operations between the matrix products, in C, for CPUs. csrc/fused.c has the formulas.

A row is one step of one sequence, so there are B T rows. All arithmetic is in float32. Gradients of vectors are summed in an
order that does not depend on the number of threads.
"""

import torch
from torch import Tensor

from kernels import native
from kernels.native.dtypes import DTYPES
from rwkv.model.fused.c import Tensors, float32_rows, pad_to, task_sums, threads
from rwkv.model.fused.c import supports as supports


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """Computes fused._gates, from z = (zw, za[, zv]) and vectors k_k, k_a, w0, a0[, v0]."""
    H = k.shape[-1] // N
    inverse = k.new_empty(*k.shape[:-1], H, dtype=torch.float32)
    log_w = torch.empty_like(k, dtype=torch.float32)
    new_k, a, b = torch.empty_like(k), torch.empty_like(k), torch.empty_like(k)
    new_v = v if v_first is None else torch.empty_like(v)
    _run("gates_forward", k, N, k, v, v_first, *pad_to(z, 3), *pad_to(float32_rows(vectors, k.shape[-1]), 5), inverse,
         log_w, new_k, new_v, a, b, *[None] * 10)
    return log_w, new_k, new_v, a, b, inverse


def gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                   grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
                   ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """Computes fused._gates_backward."""
    grad_k, grad_v, grad_z = torch.empty_like(k), torch.empty_like(v), tuple(torch.empty_like(part) for part in z)
    grad_first = None if v_first is None else torch.empty_like(v)
    grad_vectors = _empty_vectors(k, 5)
    extra_grads = (None if grad is None else grad.contiguous() for grad in extra)
    _run("gates_backward", k, N, k, v, v_first, *pad_to(z, 3), *pad_to(float32_rows(vectors, k.shape[-1]), 5), inverse,
         *(grad.contiguous() for grad in grads), *extra_grads, grad_k, grad_v, grad_first, *pad_to(grad_z, 3),
         task_sums(k, 5), grad_vectors)
    return (grad_k, grad_v, grad_first), grad_z, grad_vectors.unbind()[:len(vectors)]


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor:
    """Computes fused._gated."""
    out = torch.empty_like(r)
    _run("output_forward", r, N, y, r, k, v, g, *float32_rows(vectors, r.shape[-1]), out, *[None] * 7)
    return out


def gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                   grad: Tensor) -> tuple[Tensors, Tensors]:
    """Computes fused._gated_backward."""
    grads = tuple(torch.empty_like(tensor) for tensor in (y, r, k, v, g))
    grad_vectors = _empty_vectors(r, 3)
    _run("output_backward", r, N, y, r, k, v, g, *float32_rows(vectors, r.shape[-1]), grad.contiguous(), *grads,
         task_sums(r, 3), grad_vectors)
    return grads, grad_vectors.unbind()


def _run(name: str, x: Tensor, N: int, *tensors: Tensor | None) -> None:
    C = x.shape[-1]
    native.run(f"rwkv7_{name}_{DTYPES[x.dtype]}", threads(x), x.numel() // C, C // N, N, *tensors)


def _empty_vectors(x: Tensor, n: int) -> Tensor:
    return x.new_empty(n, x.shape[-1], dtype=torch.float32)
