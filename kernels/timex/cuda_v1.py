"""Version 1 copies the inputs that the outputs of a block share into shared memory, and computes one output per thread."""

import torch
from torch import Tensor

from kernels.backends.cuda import Source, why_not
from kernels.registry import Requires

THREADS, STEP = 128, 128             # per block: largest number of threads; inputs in shared memory at a time
REQUIRES = Requires(devices=("cuda",), why_not=why_not)
SOURCE = Source(__file__, "csrc/v1.cu", THREADS=THREADS, STEP=STEP)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return _convolve("forward", w, k, eps)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    return _convolve("grad_k", w, grad_out)


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    B, C, T = k.shape
    grad = torch.empty_like(k[0])
    threads = _threads_per_block(k.shape[-1])
    SOURCE.launch("grad_w", C * -(-T // threads), threads, k, grad_out, grad, B, C, T)
    return grad


def _convolve(kernel: str, w: Tensor, k: Tensor, *eps: float) -> Tensor:
    B, C, T = k.shape
    out = torch.empty_like(k)
    threads = _threads_per_block(k.shape[-1])
    SOURCE.launch(kernel, B * C * -(-T // threads), threads, w, k, out, B, C, T, *eps)
    return out


def _threads_per_block(T: int) -> int:
    return min(THREADS, 32 * -(-T // 32))
