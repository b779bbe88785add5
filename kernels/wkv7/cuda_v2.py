"""Version 2 updates the state and computes y and the next sa in one loop per step, 4 columns at a time, with 1 barrier."""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, why_not
from kernels.registry import KernelUnavailable, Requires

REQUIRES = Requires(devices=("cuda",), why_not=why_not, dtypes=(torch.float32, torch.bfloat16), N_multiple=32)

CHUNK = 16                           # steps between two states that forward saves
N_MAX = 448                          # a block needs 104 N bytes of its 48 KiB of static shared memory
SOURCE = Source(__file__, "csrc/v2.cu", N=64, CHUNK=CHUNK, BFLOAT16=0)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    return (B, T, H, N), (B, H, -(-T // CHUNK), N, N)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *sa_and_states: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, N = v.shape
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    _source(v).launch("forward_keeping" if sa_and_states else "forward", B * H, N, r, log_w, k, v, a, b, state, y, after,
                      *sa_and_states, T, H)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             sa: Tensor, states: Tensor, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, T, H, N = v.shape
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state)]
    history = state.new_empty(B, H, CHUNK, N, N)
    _source(v).launch("backward", B * H, N, r, log_w, k, v, a, b, sa, states, grad_y, grad_state, *grads, history, T, H)
    return tuple(grads)


def _source(v: Tensor) -> Source:
    N = v.shape[-1]
    if N > N_MAX:
        raise KernelUnavailable(f"cuda_v2 supports heads of up to {N_MAX} channels; got {N}: use cuda_v0")
    return SOURCE.variant(N=N, BFLOAT16=int(v.dtype == torch.bfloat16))
