"""A walk through far rows of W at once, in C (csrc/products.h): fused multiply-adds, products of bytes, prefetch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.matvec import GROUP, KINDS, TOGETHER, Packed, inputs_of
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), native=True, dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))
BLOCK = TOGETHER * GROUP                 # of a row in int4
SMALL = 2**16                            # up to so many products, one thread is done before another one is awake


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    """To the bit what kernels.matvec.unpacked gives."""
    N, K = len(packed.weight), inputs_of(packed)
    weight, *of_groups = (tensor.contiguous() for tensor in packed)
    matrix = torch.empty(N, K, dtype=dtype)
    native.run("matvec_unpack", native.threads_for(N), N, K, dtype == torch.bfloat16, weight, *of_groups, matrix)
    return matrix


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
            floats, whole = x.new_empty(R, K // BLOCK * 2 * TOGETHER), x.new_empty(R, K, dtype=torch.uint8)
            native.run("matvec_arrange", 1, R * (K // BLOCK), x, whole, floats)
        threads = 1 if N * K * R <= SMALL else native.threads_for(N)
        native.run("matvec", threads, KINDS[form], N, K, R, floats.shape[1], K * whole.itemsize, offset, threads, *packed,
                   floats, whole, y)
        return y

    return product
