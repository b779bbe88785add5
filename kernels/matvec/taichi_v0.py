"""Rows of W as they are, read in order by all cores; vectors along k."""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.products import BLOCK_4, CHAINS, LANES, MATRIX, ROWS, SCALES, WORDS, Floats, sums_of, tiles
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.matvec import Packed, inputs_of
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int32))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def _product(packed: Packed) -> Callable[[Tensor], Tensor]:
    form, N, K = packed.form, len(packed.weight), inputs_of(packed)
    matrix, scale, shift = (tensor.view(-1) for tensor in packed)

    def product(x: Tensor) -> Tensor:
        R = len(x)
        y = x.new_empty(R, N)
        flat = _arranged(x) if form == "int4" else x.view(-1)
        launch(_kernel(form, 1 if R == 1 else ROWS), matrix, scale, shift, flat, y.view(-1), N, K, R, len(flat) // R, shares(N))
        return y

    return product


def _arranged(x: Tensor) -> Tensor:
    """Each row of x (R,K) as products in int4 read it: what `arrange` of kernels/backends/products.py makes of it, flat."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK_4)).view(-1, LANES, 2, WORDS, 4)
    ordered = x.permute(0, 3, 4, 2, 1).reshape(-1, BLOCK_4 // LANES, LANES)              # (blocks,32,8)
    of_chain = ordered.unflatten(1, (-1, CHAINS)).sum(1)                                 # (blocks,4,8)
    return torch.cat((ordered, -16 * of_chain, of_chain.sum(1, keepdim=True)), 1).flatten()


@cache
def _kernel(form: str, rows: int):
    stored, scales, sums = MATRIX[form], SCALES[form], sums_of(form, rows, whole_numbers=True)

    @ti.kernel
    def kernel(w: stored, scale: scales, shift: scales, x: Floats, y: Floats, N: int, K: int, R: int, x_row: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, N, n)
            for row in range(first, end):
                for r in range(tiles(R, rows)):
                    sums(w, scale, shift, x, y, row, r * rows, R, K, 0, 0, 0, x_row, 0, 0, N, R >> 30)

    return kernel
