"""Whole-tensor operations compute the coordinates of all pixels, and one gather copies the pixels.

This file is the obvious PyTorch code, and the baseline of the Taichi documentation. Each operation is a kernel that writes
eight bytes per pixel, which the next operation reads.
"""

import torch
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.uint8))


def forward(tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> Tensor:
    N, h, w = tile.shape
    rows = torch.arange(height, device=tile.device) - top
    columns = torch.arange(width, device=tile.device) - left
    y, x = torch.meshgrid(rows, columns, indexing="ij")                  # shape (height, width), like all tensors below
    course = torch.floor_divide(y, h)
    row = torch.remainder(y, h)
    column = torch.remainder(x + course * offset, w)
    at = row * w + column
    return tile.view(N, h * w).index_select(1, at.view(-1)).view(N, height, width)
