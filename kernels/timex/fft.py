"""By the convolution theorem, a product of spectra (torch.fft) computes the convolution in O(T log T) for any w.

Rows are padded, so nothing wraps around. Both gradients are correlations, and so products with a conjugated spectrum. grad_w is
summed over the batch before the inverse transform. The error is proportional to the largest value of a row, even where the
result is small or 0. So a later k can change an earlier output by that error, and steps on which the loss does not depend get a
gradient of that size. The error is acceptable for TimeX, but not for WKV's quotient, in which rows span many orders of
magnitude. So WKV rejects this kernel, and auto never selects it.

F  frequencies of a padded row      N  length of a padded row, at least 2T - 1
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), wkv=False)
BLOCK = {"cpu": 2**18, "cuda": 2**26}    # elements of k per transform, so that on a CPU the spectra fit into the cache


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(k)
    N = padded_length(k.shape[-1])
    for rows in _blocks(k):
        out[:, rows] = _causal(_spectrum(k[:, rows], N) * _spectrum(w[rows].flip(-1), N), N, like=k)
    return out.add_(eps) if eps else out


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    grad_w = torch.empty_like(w)
    grad_k = torch.empty_like(k)
    N = padded_length(k.shape[-1])
    for rows in _blocks(k):
        lag, inputs, outputs = (_spectrum(part, N) for part in (w[rows].flip(-1), k[:, rows], grad_out[:, rows]))
        grad_k[:, rows] = _causal(outputs * lag.conj(), N, like=k)
        grad_w[rows] = _causal((outputs * inputs.conj()).sum(0), N, like=k).flip(-1)
    return grad_w, grad_k


def padded_length(T: int) -> int:
    """Returns the smallest 2^a 3^b >= 2T - 1 with b <= 2, because transforms are fast for lengths with small factors."""
    return min(3**b << max(0, (-(-(2 * T - 1) // 3**b) - 1).bit_length()) for b in range(3))


def _blocks(k: Tensor) -> Iterator[slice]:
    """Yields the ranges of channels that are transformed together, for the whole batch."""
    B, C, T = k.shape
    step = max(1, BLOCK[k.device.type] // (B * T))
    return (slice(start, start + step) for start in range(0, C, step))


def _spectrum(rows: Tensor, N: int) -> Tensor:
    return torch.fft.rfft(rows, N)


def _causal(spectrum: Tensor, N: int, like: Tensor) -> Tensor:
    """Returns the first T steps (...,T) of the rows with the spectrum (...,F)."""
    return torch.fft.irfft(spectrum, N)[..., :like.shape[-1]]
