"""A single launch copies rows of the tile: an output row repeats one tile row, so only the row's start requires divisions.

On a CPU a row of the tile is copied in vectors of 64 bytes up to the end, then again from the beginning. Pixels before the
first and after the last whole vector of the output are copied one by one. To reduce the number of such pixels, the rows of a
narrow tile are first repeated to `period` columns. On a GPU a block of threads computes a row, and adjacent threads compute
adjacent pixels.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), dtypes=(torch.float32, torch.uint8))

VECTOR = 64  # bytes
LONG = 32  # tiles with at least this many vectors per row are not repeated
THREADS = 128  # threads per row, on a GPU
PIXELS = {torch.float32: ti.f32, torch.uint8: ti.u8}


def forward(tile: Tensor, offset: int, top: int, left: int, height: int, width: int) -> Tensor:
    N, h, w = tile.shape
    out = tile.new_empty(N, height, width)
    first = origin(h, w, offset, top, left)
    if tile.is_cuda:
        launch(rows_cuda(tile.dtype), tile.view(-1), out.view(-1), h, w, height, width, *first)
    else:
        _on_cpu(tile, out, first)
    return out


def origin(h: int, w: int, offset: int, top: int, left: int) -> tuple[int, int, int]:
    """Returns the tile's row and column at the output's first pixel, and the offset, as small non-negative numbers."""
    return -top % h, (-top // h * offset - left) % w, offset % w


def _on_cpu(tile: Tensor, out: Tensor, first: tuple[int, int, int]) -> None:
    N, h, w = tile.shape
    _, height, width = out.shape
    lanes = VECTOR // tile.itemsize
    period = _period(h, w, height, width, lanes)
    wide = tile if period == w else tile.new_empty(N, h, period)
    flat = out.view(-1)
    vectors = flat[:flat.numel() // lanes * lanes].view(-1, lanes)
    assert flat.data_ptr() % VECTOR == 0, "a vector store to an unaligned address ends the process"
    launch(_rows_cpu(tile.dtype), tile.view(-1), wide.view(-1), flat, vectors, h, w, period, height, width, *first, N * height,
           shares(N * height))


def _period(h: int, w: int, height: int, width: int, lanes: int) -> int:
    """Returns the number of columns of the repeated tile, a multiple of w.

    The columns are at least LONG vectors, unless repeating the tile would cost more than 1/32 of the work.
    """
    worth = height * width // (32 * h)
    return w * max(1, min(-(-LONG * lanes // w), worth // w))


@cache
def _rows_cpu(dtype: torch.dtype) -> Any:
    lanes = VECTOR // dtype.itemsize
    Flat = ti.types.ndarray(dtype=PIXELS[dtype], ndim=1)
    Lanes = ti.types.vector(lanes, PIXELS[dtype])

    @ti.kernel
    def rows_cpu(tile: Flat, wide: Flat, out: Flat, vectors: ti.types.ndarray(dtype=Lanes, ndim=1), h: int, w: int,
                 period: int, height: int, width: int, row_0: int, column_0: int, offset: int, rows: int, n: int):
        for i in range(wide.shape[0] if period > w else 0):
            wide[i] = tile[i // period * w + i % w]
        for step in range(n * BLOCK):
            first, end = share(step, rows, n)
            for row in range(first, end):
                tile_row, column = _start(row, h, w, height, row_0, column_0, offset)
                at = row * width
                stop = row * width + width
                while at < stop:
                    run_end = ti.min(at + period - column, stop)
                    shift = tile_row * period + column - at  # offset from an output pixel to its source
                    vector_0, vector_end = (at + lanes - 1) // lanes, run_end // lanes
                    whole = ti.min(vector_0 * lanes, run_end)
                    rest = ti.max(vector_end * lanes, whole)
                    for i in range(at, whole):
                        out[i] = wide[i + shift]
                    for vector in range(vector_0, vector_end):
                        base = (vector * lanes + shift) & INDEX
                        vectors[vector] = Lanes([wide[base + lane] for lane in ti.static(range(lanes))])
                    for i in range(rest, run_end):
                        out[i] = wide[i + shift]
                    at = run_end
                    column = 0

    return rows_cpu


@cache
def rows_cuda(dtype: torch.dtype) -> Any:
    Flat = ti.types.ndarray(dtype=PIXELS[dtype], ndim=1)

    @ti.kernel
    def rows_cuda(tile: Flat, out: Flat, h: int, w: int, height: int, width: int, row_0: int, column_0: int, offset: int):
        ti.loop_config(block_dim=THREADS)
        for thread in range(out.shape[0] // width * THREADS):
            row, x = thread // THREADS, thread % THREADS
            tile_row, column = _start(row, h, w, height, row_0, column_0, offset)
            column = (column + x) % w
            while x < width:
                out[row * width + x] = tile[tile_row * w + column]
                x += THREADS
                column += THREADS % w
                column -= w * ti.cast(column >= w, ti.i32)

    return rows_cuda


@ti.func
def _start(row, h, w, height, row_0, column_0, offset):
    """Returns the row of the tiles that output row `row`, counted over all images, repeats, and the first pixel's column."""
    y = row_0 + row % height
    shift = ti.cast(y // h, ti.i64) * offset  # shift of the course; 32 bits would overflow for high outputs of wide tiles
    return row // height * h + y % h, ti.cast((column_0 + shift) % w, ti.i32)
