"""torch.compile compiles the formula in one line, in which each output is the sum of a window of k times w.

    out = eps + (windows(k) * w).sum(-1)             windows(k)[b,c,t,i] = k[b,c,t+i-(T-1)], zero before the first step

The first call compiles the formula for all sizes, which takes seconds. The result is one loop nest with the sum inside, without
a (B,C,T,T) tensor. A loop over the lag would be unrolled to T operations. Half of the products multiply padding zeros.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.backends.compiled import any_size, compiled
from kernels.registry import Requires

REQUIRES = Requires(compiled=True)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return compiled(_correlation)(any_size(_pad_before(k)), any_size(w)).add_(eps)


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    future = F.pad(grad_out, (0, k.shape[-1] - 1))
    return (compiled(_product)(any_size(_pad_before(k)), any_size(grad_out)),
            compiled(_correlation)(any_size(future), any_size(w.flip(-1))))


def _pad_before(k: Tensor) -> Tensor:
    return F.pad(k, (k.shape[-1] - 1, 0))


def _correlation(padded: Tensor, w: Tensor) -> Tensor:
    return (_windows(padded, w.shape[-1]) * w[:, None]).sum(-1)


def _product(padded: Tensor, grad_out: Tensor) -> Tensor:
    """Returns grad_w[c,i] = sum_b sum_t k[b,c,t+i-(T-1)] grad_out[b,c,t]."""
    return (_windows(padded, grad_out.shape[-1]) * grad_out[:, :, None]).sum((0, -1))


def _windows(padded: Tensor, T: int) -> Tensor:
    """Returns a view (B,C,T,T) of `padded` (B,C,2T-1), in which element i of window t is padded[t + i]."""
    B, C, length = padded.shape
    return padded.as_strided((B, C, T, T), (C * length, length, 1, 1))
