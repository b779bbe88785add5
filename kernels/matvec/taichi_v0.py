"""Rows of W as they are, read in order by all cores; vectors along k."""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.products import GROUP, MATRIX, SCALES, SUMS, Floats
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.matvec import Packed, inputs_of
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.uint8))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def _product(packed: Packed) -> Callable[[Tensor], Tensor]:
    form, N, K = packed.form, len(packed.weight), inputs_of(packed)
    matrix, scale, shift = (tensor.view(-1) for tensor in packed)

    def product(x: Tensor) -> Tensor:
        y = x.new_empty(len(x), N)
        flat = _with_sums(x) if form == "int4" else x.view(-1)
        launch(_kernel(form), matrix, scale, shift, flat, y.view(-1), N, K, len(x), shares(N))
        return y

    return product


def _with_sums(x: Tensor) -> Tensor:
    """x, and after it its sums in groups, flat."""
    return torch.cat((x.flatten(), x.view(-1, GROUP).sum(1)))


@cache
def _kernel(form: str):
    stored, scales, sums = MATRIX[form], SCALES[form], SUMS[form]

    @ti.kernel
    def kernel(w: stored, scale: scales, shift: scales, x: Floats, y: Floats, N: int, K: int, R: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, N, n)
            for row in range(first, end):
                for r in range(R):
                    sums(w, scale, shift, x, y, row, r, N, K, 0, 0, 0, R * K, 0, R >> 30)

    return kernel
