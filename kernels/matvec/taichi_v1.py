"""The same walk through W, in C for this CPU's vectors (csrc/products.h): fused multiply-adds, products of bytes, prefetch."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.backends.bitcode import function
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.matvec import GROUP, TOGETHER, Packed, inputs_of
from kernels.matvec._products import Floats
from kernels.matvec._unpack import unpacked as unpacked
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",), bitcode=True,
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))
SOURCE = Path(__file__).parent / "csrc" / "products.c"
BLOCK_4 = TOGETHER * GROUP               # of a row in int4


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def _product(packed: Packed) -> Callable[[Tensor], Tensor]:
    form, N, K = packed.form, len(packed.weight), inputs_of(packed)
    steps, signed = (round(number) for number in packed.shift.tolist()) if form == "int8" else (0, 0)
    offset = signed * (steps + 1)        # which makes the whole numbers of x bytes without a sign

    def product(x: Tensor) -> Tensor:
        R = len(x)
        y, floats, whole = x.new_empty(R, N), x, x
        if form == "bfloat16":
            whole = x.bfloat16()
        if form == "int8":
            whole = (x + offset).to(torch.uint8)
        if form == "int4":
            floats, whole = x.new_empty(R, K // BLOCK_4 * 2 * TOGETHER), x.new_empty(R, K, dtype=torch.uint8)
            launch(_arrange(), x.view(-1), x.data_ptr(), whole.data_ptr(), floats.data_ptr(), R * (K // BLOCK_4))
        arrays = (*packed, floats, whole, y)
        launch(_kernel(form), y.view(-1), *(array.data_ptr() for array in arrays), N, K, R, floats.shape[1],
               K * whole.itemsize, offset, shares(N))
        return y

    return product


@cache
def _arrange():
    arrange = function(SOURCE, "arrange_blocks")

    @ti.kernel
    def kernel(first: Floats, x: ti.i64, q: ti.i64, y: ti.i64, blocks: int):
        ti.loop_config(serialize=True)
        for _ in range(1):
            arrange(x, q, y, blocks)

    return kernel


@cache
def _kernel(form: str):
    products = function(SOURCE, f"products_{form}")

    @ti.kernel
    def kernel(first: Floats, w: ti.i64, scale: ti.i64, shift: ti.i64, x: ti.i64, q: ti.i64, y: ti.i64, N: int, K: int, R: int,
               x_row: int, q_row: int, offset: int, n: int):
        for step in range(n * BLOCK):
            begin, end = share(step, N, n)
            if begin < end:
                products(w, scale, shift, x, q, y, begin, end, N, K, R, x_row, q_row, offset)

    return kernel
