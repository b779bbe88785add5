"""Rows of W as they are, a few at once, each the next of a long stretch that is read in order, by all cores."""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.matvec import Packed, inputs_of
from kernels.matvec._products import (
    BLOCK_4,
    MATRIX,
    OF_BLOCK,
    ROWS,
    SCALES,
    Floats,
    Halves,
    arrange,
    products_in_16_bits,
    products_of,
)
from kernels.matvec._unpack import unpacked as unpacked
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def _product(packed: Packed) -> Callable[[Tensor], Tensor]:
    form, N, K = packed.form, len(packed.weight), inputs_of(packed)
    matrix, scale, shift = (tensor.view(-1) for tensor in packed)
    depth = products_in_16_bits(round(shift[0].item())) if form == "int8" else 0

    def product(x: Tensor) -> Tensor:
        R = len(x)
        y, floats, whole = x.new_empty(R, N), x, x.new_empty(1, dtype=torch.int16)
        if form == "int8":
            whole = x.to(torch.int16)
        if form == "int4":
            blocks = K // BLOCK_4
            floats, whole = x.new_empty(R, OF_BLOCK * blocks), x.new_empty(R, K, dtype=torch.int16)
            launch(_arrange, x.view(-1), whole.view(-1), floats.view(-1), R * blocks)
        launch(_kernel(form, 1 if R == 1 else ROWS), matrix, scale, shift, floats.view(-1), whole.view(-1), y.view(-1), N, K, R,
               floats.shape[1], depth, shares(N))
        return y

    return product


@ti.kernel
def _arrange(x: Floats, q: Halves, y: Floats, blocks: int):
    ti.loop_config(serialize=True)
    for block in range(blocks):
        arrange(x, 0, q, 0, y, 0, blocks * BLOCK_4, block, blocks >> 30)


@cache
def _kernel(form: str, rows: int):
    stored, scales, products = MATRIX[form], SCALES[form], products_of(form, rows, whole_numbers=True)

    @ti.kernel
    def kernel(w: stored, scale: scales, shift: scales, x: Floats, q: Halves, y: Floats, N: int, K: int, R: int, x_row: int,
               depth: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, N, n)
            products(w, scale, shift, x, q, y, first, end, R, K, 0, 0, 0, x_row, 0, K, depth, 0, N, R >> 30)

    return kernel
