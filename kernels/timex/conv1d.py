"""PyTorch's own depthwise convolution, F.conv1d with one group per channel, computes the forward pass and both gradients.

The gradients are forward convolutions too, because PyTorch's backward for depthwise weights is far slower on a CPU.
kernels/timex/README.md contains the times.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = _causal(k, w)
    return out.add_(eps) if eps else out


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return grad_w(k, grad_out), grad_k(w, grad_out)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    """Returns the forward convolution of the time-reversed grad_out, reversed again."""
    return _causal(grad_out.flip(-1), w).flip(-1)


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    """Returns the correlation of k and grad_out, computed as a convolution with one group per row and channel."""
    B, C, T = k.shape
    with _full_precision():
        rows = F.conv1d(F.pad(k, (T - 1, 0)).view(1, B * C, 2 * T - 1), grad_out.view(B * C, 1, T), groups=B * C)
    return rows.view(B, C, T).sum(0)


def _causal(k: Tensor, w: Tensor) -> Tensor:
    C, T = w.shape
    with _full_precision():
        return F.conv1d(F.pad(k, (T - 1, 0)), w.unsqueeze(1), groups=C)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turns off TF32, because cuDNN uses TF32 for convolutions by default, with errors of about 1e-3."""
    convolutions = torch.backends.cudnn.conv     # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before
