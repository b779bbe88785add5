"""Version 2 loads four values at a time (float4), and computes four time steps per thread."""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, align, why_not
from kernels.registry import Requires

THREADS, STEP = 64, 128              # per block: largest number of threads; inputs in shared memory at a time
T_GROUP = 4                          # outputs per thread
REQUIRES = Requires(devices=("cuda",), why_not=why_not, T_multiple=T_GROUP)
SOURCE = Source(__file__, "csrc/v2.cu", THREADS=THREADS, STEP=STEP, T_GROUP=T_GROUP)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return _convolve("forward", w, k, eps)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    return _convolve("grad_k", w, grad_out)


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    B, C, T = k.shape
    grad = torch.empty_like(k[0])
    threads = _threads_per_block(k.shape[-1])
    tile = threads * T_GROUP
    SOURCE.launch("grad_w", C * -(-T // tile), threads, align(k), align(grad_out), grad, B, C, T)
    return grad


def _convolve(kernel: str, w: Tensor, k: Tensor, *eps: float) -> Tensor:
    B, C, T = k.shape
    out = torch.empty_like(k)
    threads = _threads_per_block(k.shape[-1])
    tile = threads * T_GROUP
    SOURCE.launch(kernel, B * C * -(-T // tile), threads, align(w), align(k), out, B, C, T, *eps)
    return out


def _threads_per_block(T: int) -> int:
    return min(THREADS, 32 * -(-T // (32 * T_GROUP)))
