"""Version 4 multiplies by Toeplitz blocks of w, which all batches share, on tensor cores; a float32 is split into two tf32.

The sum big * big + big * small + small * big is accurate to about 2^-22. At B=32 C=768 T=768 the forward needs 47 GFLOP of tf32
products, which take 0.15 ms at the rate of mma.sync on an H200 (0.6 of 495 TFLOP/s). Float32 multiply-adds would take 0.22 ms.
For 48 mma instructions, which take some 300 cycles, a warp issues 173 other instructions and reads 10 words per lane from
shared memory. These numbers are estimated, not measured.

A block computes 32, 16 or 8 batches, so B = 1 takes as long as B = 8. A nonfinite value also makes up to 63 earlier steps NaN,
because zero times infinity is NaN.
"""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, align, why_not
from kernels.registry import Requires

REQUIRES = Requires(devices=("cuda",), why_not=why_not, T_multiple=4)

THREADS, BLOCK, TILE = 128, 256, 64       # as in v4.cu: threads and time steps per block; time steps per tile of grad_w
SOURCE, SOURCE_16, SOURCE_8 = (Source(__file__, "csrc/v4.cu", N_TILES=n) for n in (4, 2, 1))     # 32, 16, 8 batches each


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(k)
    source, blocks = _source_and_blocks(k)
    source.launch("forward", blocks, THREADS, w, align(k), out, *k.shape, eps)
    return out


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    grad = torch.empty_like(grad_out)
    source, blocks = _source_and_blocks(grad_out)
    source.launch("grad_k", blocks, THREADS, w, align(grad_out), grad, *grad.shape)
    return grad


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    _B, C, T = k.shape
    grad = torch.empty_like(k[0])
    tiles = -(-T // TILE)
    sums = k.new_empty(C, tiles, 2 * TILE)
    SOURCE.launch("grad_w_tiles", C * tiles, THREADS, align(k), align(grad_out), sums, *k.shape)
    SOURCE.launch("grad_w", -(-grad.numel() // THREADS), THREADS, sums, grad, C, T)
    return grad


def _source_and_blocks(x: Tensor) -> tuple[Source, int]:
    """Returns the source that needs the least padding of the batch, and the number of blocks."""
    B, C, T = x.shape
    source = SOURCE if B > 16 else SOURCE_16 if B > 8 else SOURCE_8
    return source, -(-B // (8 * source.macros["N_TILES"])) * C * -(-T // BLOCK)
