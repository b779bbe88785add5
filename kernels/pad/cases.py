"""Contains the shapes and inputs of brick padding for the tests and the benchmark."""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.uint8)


class Case(NamedTuple):
    """The arguments of a call: a tile's shape (..., height, width), the offset, and the padding (left, top, right, bottom)."""

    tile: tuple[int, ...]
    offset: int
    padding: tuple[int, int, int, int]


CASES = (
    Case((1, 1), 0, (0, 0, 0, 0)),
    Case((3, 4), 1, (5, 7, 2, 1)),
    Case((3, 2, 5), -2, (9, 4, 11, 3)),
    Case((2, 3, 4, 3), 100, (1, 13, 70, 0)),     # an offset of many tile widths; rows longer than a vector
    Case((1, 7), 3, (80, 9, 130, 8)),            # courses of one row
    Case((6, 1), 5, (33, 20, 31, 1)),            # a tile narrower than any vector
    Case((2, 100), -37, (150, 5, 150, 6)),       # wider than a vector
    Case((48, 32), 10, (64, 40, 64, 40)),        # the tile of the Taichi documentation
)
EMPTY = (Case((0, 3, 4), 1, (2, 2, 2, 2)), Case((0, 4), 1, (3, 0, 3, 0)), Case((2, 0), 1, (0, 5, 0, 5)))
PUBLISHED = (1, 48, 32, 10, 4096, 2048)          # Taichi documentation: images, height, width, offset, padding of columns, rows
PHOTOGRAPHS = (192, 224, 224, 75, 32, 32)        # 64 images of three channels
BENCH_SHAPES = {"cpu": (PUBLISHED, PHOTOGRAPHS), "cuda": (PUBLISHED, PHOTOGRAPHS)}


def tile(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """Returns random pixels from 0 to 254, so that tests detect misplaced pixels, and unwritten pixels, which are 255."""
    generator = torch.Generator().manual_seed(seed)
    return (255 * torch.rand(shape, generator=generator)).to(torch.uint8).to(device, dtype)


def one_line(tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> Tensor:
    """Returns the result of the formula by one gather, for shapes for which formula.py would take minutes.

    Tests compare the gather with formula.py.
    """
    h, w = tile.shape[-2:]
    y = torch.arange(height, device=tile.device)[:, None] - top
    x = torch.arange(width, device=tile.device) - left
    return tile[..., y % h, (x + offset * (y // h)) % w]
