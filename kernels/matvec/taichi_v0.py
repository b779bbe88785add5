"""Rows of W as they are, a few at once, each the next of a long stretch that is read in order, by all cores."""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16, to_bfloat16
from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.matvec import GROUP, Packed, inputs_of
from kernels.matvec._products import (
    BLOCK_4,
    LANES,
    MATRIX,
    OF_BLOCK,
    ROWS,
    SCALES,
    WORDS,
    Floats,
    Halves,
    arrange,
    products_in_16_bits,
    products_of,
    vector,
)
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


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    """W (N,K) that the int4 form stands for, float32 or bfloat16, in one pass; K is whole groups."""
    y = torch.empty(len(packed.weight), inputs_of(packed), dtype=dtype)
    blocks = y.numel() // BLOCK_4
    launch(_unpack(dtype), *(tensor.view(torch.int16).view(-1) for tensor in packed),
           (y.view(torch.int16) if dtype == torch.bfloat16 else y).view(-1), blocks, shares(blocks))
    return y


@cache
def _unpack(dtype: torch.dtype):
    stored, convert = (Halves, to_bfloat16) if dtype == torch.bfloat16 else (Floats, as_it_is)

    @ti.kernel
    def kernel(w: Halves, scale: Halves, shift: Halves, y: stored, blocks: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, blocks, n)
            for block in range(first, end):
                scales = from_bfloat16(vector(scale, block * LANES))
                shifts = from_bfloat16(vector(shift, block * LANES))
                for word in range(WORDS):
                    words = vector(w, (block * WORDS + word) * LANES)
                    for nibble in ti.static(range(4)):           # of each of eight groups, see Packed
                        q = by_lane(ti.cast, words >> (4 * nibble) & 15, ti.f32)
                        values, at = convert(q * scales + shifts), block * BLOCK_4 + 2 * word
                        for group in ti.static(range(LANES)):
                            y[(at & INDEX) + group * GROUP + nibble % 2 * (GROUP // 2) + nibble // 2] = values[group]

    return kernel


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
