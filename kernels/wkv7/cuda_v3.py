"""Version 3 computes tiles of 4 x 8 numbers, in which 4 products share a load, and runs the key pass in all chunks at once.

Per cycle a multiprocessor of an H100 can execute 128 multiply-adds, but load only 32 numbers from shared memory. That limits
versions 1 and 2, which load one number per multiply-add. Versions 1 and 2 also have only B H blocks of N threads. At B = 8,
H = 12, N = 64 the blocks have 192 warps for 528 schedulers. This version has 384 warps, and in backward_keys 96 T / 64 blocks.
These numbers are estimated, not measured.
"""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, align, why_not
from kernels.registry import KernelUnavailable, Requires

REQUIRES = Requires(devices=("cuda",), why_not=why_not, dtypes=(torch.float32, torch.bfloat16), N_multiple=32)

CHUNK = 64                           # steps between two states that forward saves
GROUP = 4                            # steps whose states backward_keys holds in registers: 32 registers each for N = 64
BLOCKS = 512                         # largest number of blocks of backward_keys, which store 128 MiB of states for N = 64
ROWS, LANES = 4, 8                   # rows of a thread's tile; threads that share these rows
N_MAX = 512                          # a block has 2 N threads
SOURCE = Source(__file__, "csrc/v3.cu", N=64, CHUNK=CHUNK, GROUP=GROUP, LANES=LANES, BFLOAT16=0)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    return (B, T, H, N), (B, H, -(-T // CHUNK), N, N)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *sa_and_states: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, N = v.shape
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    _source(v).launch("forward_keeping" if sa_and_states else "forward", B * H, N // ROWS * LANES,
                      r, log_w, k, v, a, b, align(state), y, after, *sa_and_states, T, H)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             sa: Tensor, states: Tensor, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, T, H, N = v.shape
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state)]
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, grad_state_before = grads
    gsa = torch.empty_like(sa)
    Gs = torch.empty_like(states)
    source = _source(v)
    threads = N // ROWS * LANES
    source.launch("backward_rows", B * H, threads, r, log_w, k, a, b, grad_y, align(grad_state), grad_v, gsa, Gs,
                  grad_state_before, T, H)
    count = B * H * -(-T // CHUNK)
    starts = state.new_empty(min(count, BLOCKS), CHUNK // GROUP, N, N)
    source.launch("backward_keys", len(starts), threads, r, log_w, k, v, a, b, sa, states, grad_y, gsa, Gs, starts,
                  grad_r, grad_log_w, grad_k, grad_a, grad_b, count, T, H)
    return tuple(grads)


def _source(v: Tensor) -> Source:
    N = v.shape[-1]
    if N > N_MAX:
        raise KernelUnavailable(f"cuda_v3 supports heads of up to {N_MAX} channels; got {N}: use cuda_v0")
    return SOURCE.variant(N=N, BFLOAT16=int(v.dtype == torch.bfloat16))
