"""Conversions of vectors in Taichi kernels, and bfloat16 in memory, for which Taichi has no type.

Vectors are converted element by element, because Taichi's own conversion of a whole vector aborts the process; LLVM merges the
elements into vector instructions again. bfloat16 is read and written as 16-bit integers, so that no pass over memory is needed
before and after a kernel.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends.taichi import ti


class Stored(NamedTuple):
    """A dtype in memory: the type of an array of vectors, and the functions that convert a vector from and to float32."""

    array: Any
    read: Any
    write: Any


def stored(dtype: torch.dtype, lanes: int) -> Stored:
    """dtype: float32 or bfloat16."""
    if dtype == torch.bfloat16:
        return Stored(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.i16), ndim=1), from_bfloat16, to_bfloat16)
    return Stored(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.f32), ndim=1), as_it_is, as_it_is)


def cut(tensor: Tensor, C: int) -> Tensor:
    """The first C channels: without those that pad a row to whole vectors."""
    return tensor if tensor.shape[-1] == C else tensor[..., :C]


@ti.func
def as_it_is(x):
    return x


@ti.func
def from_bfloat16(x):
    return by_lane(ti.bit_cast, by_lane(ti.cast, x, ti.i32) << 16, ti.f32)


@ti.func
def to_bfloat16(x):
    """Rounds to nearest, ties to even. Every NaN becomes 0x7FC0, since rounding could turn its bits into an infinity's."""
    bits = by_lane(ti.bit_cast, x, ti.u32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return by_lane(ti.cast, ti.select((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded), ti.i16)


@ti.func
def by_lane(convert: ti.template(), x, dtype: ti.template()):
    """convert(x, dtype) for each element of a vector, or for a scalar; convert: ti.cast or ti.bit_cast."""
    if ti.static(x.is_tensor()):
        return ti.Vector([convert(x[lane], dtype) for lane in ti.static(range(x.get_shape()[0]))])
    else:
        return convert(x, dtype)
