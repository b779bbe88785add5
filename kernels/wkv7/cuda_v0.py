"""Version 0 computes the recurrence as written, with a row of the state per thread; 5 multiply-adds take 9 memory accesses."""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, why_not
from kernels.registry import Requires

REQUIRES = Requires(devices=("cuda",), why_not=why_not, dtypes=(torch.float32, torch.bfloat16))

CHUNK = 16                           # steps between two states that forward saves
THREADS = 128
SOURCE = Source(__file__, "csrc/v0.cu", CHUNK=CHUNK, BFLOAT16=0)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    return ((B, H, -(-T // CHUNK), N, N),)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *states: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, N = v.shape
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    _source(v).launch("forward_keeping" if states else "forward", -(-B * H * N // THREADS), THREADS,
                      r, log_w, k, v, a, b, state, y, after, *states, B * H, T, H, N)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             states: Tensor, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, T, H, N = v.shape
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b)]
    grad_state = grad_state.clone()
    history = state.new_empty(B, H, CHUNK + 1, N, N)
    sums = state.new_empty(B, H, 2, N)
    _source(v).launch("backward", B * H, min(N, THREADS), r, log_w, k, v, a, b, states, grad_y, *grads, grad_state,
                      history, sums, T, H, N)
    return *grads, grad_state


def _source(v: Tensor) -> Source:
    return SOURCE.variant(BFLOAT16=int(v.dtype == torch.bfloat16))
