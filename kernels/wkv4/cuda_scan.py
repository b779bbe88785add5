"""The scan with time in parallel too: a warp takes 16 steps of 32 channels, and a block eight such segments at once.

Each segment is read into registers once and summed, the sums go through shared memory, and each warp then starts from the
state before its own segment: one barrier for 128 steps. As in taichi_scan e^k = m * 2^n with an integer n, and every
rescaling is by a power of two; a segment's decay e^(16 w) comes from float64. (|k|, |p| and |time_first| over 1.1e7 count as
1.1e7, a share over 2^64 as 2^64.)

The backward scans k and v once more for the state before each chunk of 128 steps (extra memory: 3/128 of k), then takes the
chunks last to first. A warp goes through its segment forward, summing what its gradients add up to, and, once the segments
after it have told theirs, back again. So it moves 7 tensors like k, the forward 3; with some 60 instructions for a step
forward and 130 backward, both should stay below what an H200 executes while its memory delivers those. (Estimated.)
"""

import torch
from torch import Tensor

from kernels.backends.cuda import Source
from kernels.registry import Requires

REQUIRES = Requires(packages=("cuda.core",), devices=("cuda",))

LANES, WARPS, STEPS = 32, 8, 16
SOURCE = Source(__file__, "csrc/scan.cu", WARPS=WARPS, STEPS=STEPS)


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    y, after = torch.empty_like(v), _empty_like(a, b, p)
    _launch("scan_forward", k, time_decay, time_first, k, v, a, b, p, y, *after)
    return y, *after


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    states = k.new_empty(-(-k.shape[1] // (WARPS * STEPS)) + 1, 3, *a.shape)
    _launch("scan_states", k, time_decay, time_first, k, v, a, b, p, states)
    grad_decay, grad_first, grad_k, grad_v, *grad_state = _empty_like(a, a, k, v, a, b)
    _launch("scan_backward", k, time_decay, time_first, k, v, a, b, p, states, grad_y, grad_a, grad_b,
            grad_k, grad_v, grad_decay, grad_first, *grad_state)
    return grad_decay.sum(0), grad_first.sum(0), grad_k, grad_v, *grad_state


def _empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _launch(kernel: str, k: Tensor, *tensors: Tensor) -> None:
    B, T, C = k.shape
    SOURCE.launch(kernel, B * -(-C // LANES), (LANES, WARPS), *tensors, B, T, C)
