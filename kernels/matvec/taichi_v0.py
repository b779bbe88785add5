"""Rows of W as they are, read in order by all cores; vectors along k, and one launch for several products."""

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

TOGETHER = 4                             # products in a launch


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    if len(weights) > TOGETHER:
        return _in_parts(weights)
    form, K, missing = weights[0].form, inputs_of(weights[0]), TOGETHER - len(weights)
    widths = [len(packed.weight) for packed in weights]
    sizes = [*widths, *[0] * missing]
    matrices = [packed.weight.view(-1) for packed in (*weights, *[weights[0]] * missing)]
    scale, shift = (_joined([getattr(packed, name) for packed in weights]) for name in ("scale", "shift"))
    outputs = sum(widths)

    def product(x: Tensor) -> list[Tensor]:
        R = x.shape[1]
        y = x.new_empty(R * outputs)
        launch(_kernel(form), *matrices, scale, shift, _with_sums(x) if form == "int4" else x.view(-1), y, *sizes, K, R,
               x.numel(), shares(outputs))
        return [part.view(R, -1) for part in y.split([R * N for N in widths])]

    return product


def _with_sums(x: Tensor) -> Tensor:
    """x, and after it its sums in groups, flat."""
    return torch.cat((x.flatten(), x.view(-1, GROUP).sum(1)))


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1)


def _in_parts(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    starts = range(0, len(weights), TOGETHER)
    products = [bind(weights[start:start + TOGETHER]) for start in starts]
    return lambda x: [y for start, product in zip(starts, products, strict=True)
                      for y in product(x[start:start + TOGETHER].contiguous())]


@cache
def _kernel(form: str):
    """The kernel computes up to four products, of weights (N0,K) to (N3,K)."""
    stored, scales, sums = MATRIX[form], SCALES[form], SUMS[form]

    @ti.func
    def product(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
                first, end, start, N, K, R, x_at, sums_at):
        """The outputs of a row from first to end of those of all products; this one's begin at start."""
        scale_at = start
        if ti.static(form == "int4"):
            scale_at *= K // GROUP
        for n in range(ti.max(first, start), ti.min(end, start + N)):
            for r in range(R):
                sums(w, scale, shift, x, y, n - start, r, N, K, 0, scale_at, x_at, sums_at, start * R, R >> 30)

    @ti.kernel
    def kernel(w0: stored, w1: stored, w2: stored, w3: stored, scale: scales, shift: scales, x: Floats, y: Floats,
               N0: int, N1: int, N2: int, N3: int, K: int, R: int, sums: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, N0 + N1 + N2 + N3, n)
            G = K // GROUP
            product(w0, scale, shift, x, y, first, end, 0, N0, K, R, 0, sums)
            product(w1, scale, shift, x, y, first, end, N0, N1, K, R, R * K, sums + R * G)
            product(w2, scale, shift, x, y, first, end, N0 + N1, N2, K, R, 2 * R * K, sums + 2 * R * G)
            product(w3, scale, shift, x, y, first, end, N0 + N1 + N2, N3, K, R, 3 * R * K, sums + 3 * R * G)

    return kernel
