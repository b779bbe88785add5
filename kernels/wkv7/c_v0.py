"""C code (csrc/wkv7.c) computes the passes of taichi_v3 with fused multiply-adds."""

import torch
from torch import Tensor

from kernels import native
from kernels.native.dtypes import DTYPES
from kernels.registry import Requires

CHUNK, STAGED, LANES = 16, 9, 16  # as in wkv7.c: steps, staged vectors per step, largest number of lanes
REQUIRES = Requires(devices=("cpu",), why_not=native.why_not, dtypes=tuple(DTYPES), N_multiple=16)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of sa, the only activation."""
    return ((B, T, H, N),)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *activations: Tensor) -> tuple[Tensor, Tensor]:
    N = v.shape[-1]
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    (sa,) = activations or (None,)
    _run("forward", (N + CHUNK * STAGED + 1) * N, r, log_w, k, v, a, b, state, sa, y, after, *[None] * 7)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, sa: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    _, T, _, N = v.shape
    matrices = 1 + (T + CHUNK - 1) // CHUNK
    gradients = tuple(torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state))
    _run("backward", (matrices * N + (CHUNK + 1) * LANES + CHUNK * STAGED + 1 + T) * N,
         r, log_w, k, v, a, b, state, sa, grad_y, grad_state, *gradients)
    return gradients


def _run(direction: str, scratch_size: int, r: Tensor, log_w: Tensor, *others: Tensor | None) -> None:
    """Calls the C function.

    Args:
        scratch_size: the numbers in scratch memory per thread.
        others: the fields after log_w in the C struct `call`.
    """
    B, T, H, N = r.shape
    threads = native.threads_for(B * H)
    scratch = log_w.new_empty(threads * scratch_size)
    native.run(f"wkv7_{direction}_{DTYPES[r.dtype]}", threads, B, T, H, N, scratch_size, scratch, r, log_w, *others)
