"""The scan is parallel over time: each warp of a block computes a segment of 16 steps of 32 channels, with 8 warps per block.

Each warp reads a segment into registers once, and sums the segment's contribution to the state. The warps exchange the sums in
shared memory, and each warp computes the state before the segment from the sums. This takes one barrier per 128 steps. As in
taichi_scan, e^k = m * 2^n with an integer n, and every rescaling is by a power of two. A segment's decay e^(16 w) is computed
in float64. |k|, |p| and |time_first| are clamped to 1.1e7, and e^(u+k) relative to the state to 2^64.

The backward first computes the state before each chunk of 128 steps, which takes extra memory of 3/128 of k. Then the chunks
are processed from last to first. A warp passes through a segment twice. The forward pass sums the segment's contribution to
the state's gradient. The backward pass uses the sums of the later segments, and computes the gradients of the steps. The
backward reads and writes 7 tensors of the size of k, and the forward 3. The forward has some 60 instructions per step, and the
backward 130, so the memory bandwidth of an H200 should limit both (estimated). k, v, y and their gradients may be in bfloat16;
the arithmetic is in float32.
"""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, why_not
from kernels.registry import Requires

REQUIRES = Requires(devices=("cuda",), dtypes=(torch.float32, torch.bfloat16), why_not=why_not)

LANES, WARPS, STEPS = 32, 8, 16
SOURCE = Source(__file__, "csrc/scan.cu", WARPS=WARPS, STEPS=STEPS, BFLOAT16=0)


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(v)
    after = _empty_like(a, b, p)
    _launch("scan_forward", k, time_decay, time_first, k, v, a, b, p, y, *after)
    return y, *after


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    states = a.new_empty(-(-k.shape[1] // (WARPS * STEPS)) + 1, 3, *a.shape)
    _launch("scan_states", k, time_decay, time_first, k, v, a, b, p, states)
    grad_decay, grad_first, grad_k, grad_v, *grad_state = _empty_like(a, a, k, v, a, b)
    _launch("scan_backward", k, time_decay, time_first, k, v, a, b, p, states, grad_y, grad_a, grad_b,
            grad_k, grad_v, grad_decay, grad_first, *grad_state)
    return grad_decay.sum(0), grad_first.sum(0), grad_k, grad_v, *grad_state


def _empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _launch(kernel: str, k: Tensor, *tensors: Tensor) -> None:
    B, T, C = k.shape
    source = SOURCE.variant(BFLOAT16=int(k.dtype == torch.bfloat16))
    source.launch(kernel, B * -(-C // LANES), (LANES, WARPS), *tensors, B, T, C)
