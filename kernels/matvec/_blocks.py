"""Computes the values of GGUF's blocks in PyTorch. csrc/blocks.c describes the layouts.

Each public function takes blocks (n,bytes) uint8 and returns the values (n,elements) in `dtype`, float32 or float64. In float32
the values have the same bits as those of ggml and of the package gguf, except for the sign of 0. Source: ggml,
src/ggml-common.h.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Values = Callable[[Tensor, torch.dtype], Tensor]


def q8_0(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks[:, 2:].view(torch.int8).to(dtype) * _half_at(blocks, 0, dtype)


def q4_0(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return (_nibbles(blocks[:, 2:], 16).to(dtype) - 8) * _half_at(blocks, 0, dtype)


def q4_1(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).to(dtype) * _half_at(blocks, 0, dtype) + _half_at(blocks, 2, dtype)


def q5_0(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    q = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return (q.to(dtype) - 16) * _half_at(blocks, 0, dtype)


def q5_1(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    q = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return q.to(dtype) * _half_at(blocks, 0, dtype) + _half_at(blocks, 2, dtype)


def q4_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return _with_minimum(blocks, _nibbles(blocks[:, 16:], 32), dtype)


def q5_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1) & 1
    return _with_minimum(blocks, _nibbles(blocks[:, 48:], 32) | bits.flatten(1) << 4, dtype)


def q6_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    two_bits = blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3                                    # (n,2,4,32)
    q = (_nibbles(blocks[:, :128], 64) | two_bits.flatten(1) << 4).to(torch.int16) - 32
    scaled = q.unflatten(1, (16, 16)) * blocks[:, 192:208].view(torch.int8).to(torch.int16).unsqueeze(2)
    return scaled.flatten(1).to(dtype) * _half_at(blocks, 208, dtype)


def _half_at(blocks: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    return blocks[:, start:start + 2].contiguous().view(torch.float16).to(dtype)


def _nibbles(bytes_: Tensor, length: int) -> Tensor:
    """Returns the low nibbles of each `length` bytes, followed by the high nibbles of the same bytes."""
    parts = bytes_.unflatten(1, (-1, 1, length))
    return torch.cat((parts & 15, parts >> 4), 2).flatten(1)


def _fifth_bits(bytes_: Tensor) -> Tensor:
    """Returns (n,32) numbers, which are 16 where a bit of the four bytes is set, otherwise 0."""
    return (bytes_.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=bytes_.device) & 1).flatten(1) << 4


def _with_minimum(blocks: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns q times eight scales of 6 bits, minus eight minima of 6 bits."""
    low, high, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, both & 15 | low >> 2 & 48), 1).to(dtype) * _half_at(blocks, 0, dtype)
    minima = torch.cat((high & 63, both >> 4 | high >> 2 & 48), 1).to(dtype) * _half_at(blocks, 2, dtype)
    return (q.to(dtype).unflatten(1, (8, 32)) * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)
