"""Benchmarks brick padding at one shape."""

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import BenchCase, Costs, Pass, costs
from kernels.pad import BrickPadding, cases


class Case(BenchCase):
    """N tiles (h,w), padded by pad_x columns and pad_y rows on each side. Each course is shifted by `offset` pixels."""

    op = "pad"
    AXES = ("N", "h", "w", "offset", "pad_x", "pad_y")
    DTYPES = ("float32", "uint8")
    SHAPES = cases.BENCH_SHAPES
    LAUNCHES = True
    baseline = "torch_index"

    def __init__(self, N: int, h: int, w: int, offset: int, pad_x: int, pad_y: int, device: str,
                 dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.offset = offset
        self.padding = (pad_x, pad_y)
        self.tile = cases.tile((N, h, w), dtype, device)
        self.reference = cases.one_line(self.tile, offset, pad_y, pad_x, h + 2 * pad_y, w + 2 * pad_x)

    @staticmethod
    def numbers(N: int, h: int, w: int, offset: int, pad_x: int, pad_y: int) -> int:
        return N * h * w + 2 * N * (h + 2 * pad_y) * (w + 2 * pad_x)

    @property
    def sequence(self) -> Tensor:
        """Returns a tensor as large as the output."""
        return self.reference

    def estimate(self, name: str) -> Costs:
        """Extrapolates from an eighth of the rows, or from 1/512 for `formula`, which takes microseconds per pixel."""
        pad = BrickPadding(name)
        pad_x, pad_y = self.padding
        height, width = self.reference.shape[-2:]
        rows = -(-height // (512 if name == "formula" else 8))
        return costs(lambda: pad.wall(self.tile, self.offset, pad_y, pad_x, rows, width), self.device).times(height / rows)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """Returns the fraction of wrong pixels. Any wrong pixel is an error."""
        wrong = float((BrickPadding(name)(self.tile, self.offset, self.padding) != self.reference).float().mean())
        return {"out": wrong}, {"out": f"{wrong:.2%} of the pixels"} if wrong else {}

    def passes(self, name: str) -> list[Pass]:
        return [Pass("forward", partial(BrickPadding(name), self.tile, self.offset, self.padding), 0,
                     self.tile.nbytes + self.reference.nbytes)]
