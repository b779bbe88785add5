"""Rows of W as they are, a few at a time, read in order by all cores; vectors along k, and one launch for several products.

For one row of x a tile is WIDE rows of W; for more it is FEW rows of W times ROWS of x, so that what was read and converted
serves ROWS times. W needs no packing beyond its form, and no alignment: a mapped file will do.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.products import FEW, GROUP, MATRIX, ROWS, SCALES, SUMS, WIDE, Floats, tiles
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.matvec import Packed, inputs_of
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.uint8))

TOGETHER = 4                             # products in a launch


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    if len(weights) > TOGETHER:
        return _in_parts(weights)
    form, K, missing = weights[0].form, inputs_of(weights[0]), TOGETHER - len(weights)
    widths = [len(packed.weight) for packed in weights]
    sizes = [*widths, *[0] * missing]
    matrices = [packed.weight.view(-1) for packed in (*weights, *[weights[0]] * missing)]
    scale, shift = (_joined([getattr(packed, name) for packed in weights]) for name in ("scale", "shift"))
    outputs, count = sum(widths), sum(-(-N // WIDE) for N in widths)

    def product(x: Tensor) -> list[Tensor]:
        R = x.shape[1]
        y = x.new_empty(R * outputs)
        launch(_kernel(form, R == 1), *matrices, scale, shift, x.view(-1), y, *sizes, K, R, shares(count))
        return [part.view(R, -1) for part in y.split([R * N for N in widths])]

    return product


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1)


def _in_parts(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    starts = range(0, len(weights), TOGETHER)
    products = [bind(weights[start:start + TOGETHER]) for start in starts]
    return lambda x: [y for start, product in zip(starts, products, strict=True)
                      for y in product(x[start:start + TOGETHER].contiguous())]


@cache
def _kernel(form: str, one_row: bool):
    """The kernel for one row of x, or for any number; it computes up to four products, of weights (N0,K) to (N3,K)."""
    tile_n, tile_r = (WIDE, 1) if one_row else (FEW, ROWS)
    stored, scales, sums = MATRIX[form], SCALES[form], SUMS[form]

    @ti.func
    def product(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
                first, end, start, N, K, R, x_at, n_at):
        """The tiles from first to end of those of all products; this one's begin at start, and its outputs of a row at n_at."""
        scale_at = n_at
        if ti.static(form == "int4"):
            scale_at *= K // GROUP
        for at in range(ti.max(first, start), ti.min(end, start + tiles(N, tile_n))):
            for r in range(tiles(R, tile_r)):
                sums(w, scale, shift, x, y, (at - start) * tile_n, r * tile_r, N, K, R, 0, scale_at, x_at, 0, n_at * R,
                     tile_n, tile_r)

    @ti.kernel
    def kernel(w0: stored, w1: stored, w2: stored, w3: stored, scale: scales, shift: scales, x: Floats, y: Floats,
               N0: int, N1: int, N2: int, N3: int, K: int, R: int, n: int):
        for step in range(n * BLOCK):
            start_1 = tiles(N0, tile_n)
            start_2 = start_1 + tiles(N1, tile_n)
            start_3 = start_2 + tiles(N2, tile_n)
            first, end = share(step, start_3 + tiles(N3, tile_n), n)
            product(w0, scale, shift, x, y, first, end, 0, N0, K, R, 0, 0)
            product(w1, scale, shift, x, y, first, end, start_1, N1, K, R, R * K, N0)
            product(w2, scale, shift, x, y, first, end, start_2, N2, K, R, 2 * R * K, N0 + N1)
            product(w3, scale, shift, x, y, first, end, start_3, N3, K, R, 3 * R * K, N0 + N1 + N2)

    return kernel
