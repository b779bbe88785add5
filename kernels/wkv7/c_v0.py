"""The passes of taichi_v3 in C (csrc/wkv7.c), with fused multiply-adds; log_w's gradient needs no running sum."""

import torch
from torch import Tensor

from kernels import native
from kernels.native.forms import FORMS
from kernels.registry import Requires

CHUNK, STAGED, LANES = 16, 9, 16  # as in wkv7.c: steps, vectors that are made ready for each, lanes at most
REQUIRES = Requires(devices=("cpu",), why_not=native.why_not, dtypes=tuple(FORMS), N_multiple=16)


def kept(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    """sa."""
    return ((B, T, H, N),)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *kept: Tensor) -> tuple[Tensor, Tensor]:
    N = v.shape[-1]
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    (sa,) = kept or (None,)
    _run("forward", (N + CHUNK * STAGED + 1) * N, r, log_w, k, v, a, b, state, sa, y, after)
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
    """Calls the C function with its struct call. scratch_size: numbers for each thread."""
    B, T, H, N = r.shape
    threads = native.threads_for(B * H)
    scratch = log_w.new_empty(threads * scratch_size)
    native.run(f"wkv7_{direction}_{FORMS[r.dtype]}", threads, B, T, H, N, scratch_size, scratch, r, log_w, *others)
