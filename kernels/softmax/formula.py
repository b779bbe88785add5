"""The reference computes the formula by PyTorch operations in eager mode, each of which reads and writes whole tensors.

Tests compare every implementation with this file in float64.
"""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))


def forward(x: Tensor) -> Tensor:
    largest = x.max(dim=-1, keepdim=True).values
    numerator = torch.exp(x - largest)
    return numerator / numerator.sum(dim=-1, keepdim=True)


def backward(y: Tensor, grad_y: Tensor) -> Tensor:
    weighted = y * grad_y
    return weighted - y * weighted.sum(dim=-1, keepdim=True)
