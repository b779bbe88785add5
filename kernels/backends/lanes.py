"""Functions for vectors in Taichi kernels: conversions, the exponential, and bfloat16 in memory.

Vectors are converted element by element, because Taichi's own conversion of a whole vector aborts the process; LLVM merges the
elements into vector instructions again. Taichi has no type for bfloat16. So kernels read and write bfloat16 as 16-bit integers,
which saves separate conversions of whole tensors before and after a kernel.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends.taichi import ti

LOG2_E = 1.4426950408889634
EXP2 = (1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
        0.00015403530393381606)          # polynomial of 2^f for |f| <= 1/2, accurate to 1e-8


class Storage(NamedTuple):
    """Taichi's type of an array of vectors of a dtype, and functions that convert a vector from and to float32."""

    array: Any
    read: Any
    write: Any


def storage_of(dtype: torch.dtype, lanes: int) -> Storage:
    """Returns how vectors of `lanes` elements of `dtype` (float32 or bfloat16) are stored."""
    if dtype == torch.bfloat16:
        return Storage(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.i16), ndim=1), from_bfloat16, to_bfloat16)
    return Storage(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.f32), ndim=1), identity, identity)


def crop_channels(tensor: Tensor, C: int) -> Tensor:
    """Returns the first C channels of each row, without the padding to whole vectors."""
    return tensor if tensor.shape[-1] == C else tensor[..., :C]


@ti.func
def identity(x):
    return x


@ti.func
def from_bfloat16(x):
    return by_lane(ti.bit_cast, by_lane(ti.cast, x, ti.i32) << 16, ti.f32)


@ti.func
def to_bfloat16(x):
    """Rounds to nearest, ties to even. Every NaN becomes 0x7FC0, since rounding could turn a NaN into infinity."""
    bits = by_lane(ti.bit_cast, x, ti.u32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return by_lane(ti.cast, ti.select((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded), ti.i16)


def by_lane(convert: Callable[..., Any], x: Any, dtype: Any) -> Any:
    """Applies `convert`, which is ti.cast or ti.bit_cast, to each element of a vector, or to a scalar, inside a kernel.

    A @ti.func with a loop over the elements would give the same result, but Taichi needs 10 ms to parse the loop at each call
    site.
    """
    x = ti.lang.impl.expr_init(x)
    if not x.is_tensor():
        return convert(x, dtype)
    elements = ti.lang.impl.get_runtime().compiling_callable.ast_builder().expand_exprs([x.ptr])
    return ti.lang.matrix.make_matrix([convert(ti.lang.expr.Expr(element), dtype) for element in elements])


by_lane.__module__ = ti.lang.__name__    # Taichi warns about functions from other modules


@ti.func
def exp(x):
    """Returns e^x for -80 <= x <= 0, accurate to 2 units in the last place.

    Taichi's own exp is not vectorised, because it calls a function for each element.
    """
    z = x * LOG2_E
    power = ti.floor(z + 0.5)
    f = z - power
    m = 0.0 * f + EXP2[-1]
    for c in ti.static(EXP2[-2::-1]):
        m = m * f + c
    return m * by_lane(ti.bit_cast, (by_lane(ti.cast, power, ti.i32) + 127) << 23, ti.f32)
