"""Version 3 computes sixteen time steps of two batches per thread, so that each load of w serves both batches."""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, align, why_not
from kernels.registry import Requires

THREADS, STEP = 256, 128             # per block: largest number of threads; inputs in shared memory at a time
T_GROUP, B_GROUP = 16, 2             # outputs per thread: time steps, batches
STRIDE = STEP + 4                    # padding between rows in shared memory
REQUIRES = Requires(devices=("cuda",), why_not=why_not, T_multiple=T_GROUP)
SOURCE = Source(__file__, "csrc/v3.cu", THREADS=THREADS, STEP=STEP, T_GROUP=T_GROUP, B_GROUP=B_GROUP)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return _convolve("forward", w, k, eps)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    return _convolve("grad_k", w, grad_out)


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    B, C, T = k.shape
    grad = torch.empty_like(k[0])
    b_lanes, t_lanes = _block(B, T)
    tile = t_lanes * T_GROUP
    SOURCE.launch("grad_w", C * -(-T // tile), (b_lanes, t_lanes), align(k), align(grad_out), grad, B, C, T,
                  shared=4 * b_lanes * (tile + 2 * STRIDE))
    return grad


def _convolve(kernel: str, w: Tensor, k: Tensor, *eps: float) -> Tensor:
    B, C, T = k.shape
    out = torch.empty_like(k)
    b_lanes, t_lanes = _block(-(-B // B_GROUP), T)
    rows = b_lanes * B_GROUP
    tile = t_lanes * T_GROUP
    SOURCE.launch(kernel, -(-B // rows) * C * -(-T // tile), (b_lanes, t_lanes), align(w), align(k), out, B, C, T, *eps,
                  shared=4 * (tile + STEP + rows * STRIDE))
    return out


def _block(B: int, T: int) -> tuple[int, int]:
    """Returns a block's threads along the batch and along time: whole warps, and no more than the sizes can use."""
    b_lanes = min(16, 1 << (B - 1).bit_length())
    in_a_warp = 32 // b_lanes
    return b_lanes, min(THREADS // b_lanes, in_a_warp * -(-T // (T_GROUP * in_a_warp)))
