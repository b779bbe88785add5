"""What Taichi kernels do lane by lane: conversions of vectors, and bfloat16 in memory, which Taichi does not have.

LLVM puts the lanes together again; on a whole vector Taichi's own conversions abort the process. Half precision is read and
written as 16-bit integers, which saves a pass over memory before and after a kernel.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends.taichi import ti


class Stored(NamedTuple):
    """How numbers of a dtype lie in memory: the type of an array of vectors of them, and what reads and writes one vector."""

    array: Any
    read: Any
    write: Any


def stored(dtype: torch.dtype, lanes: int) -> Stored:
    """Of float32 or bfloat16."""
    if dtype == torch.bfloat16:
        return Stored(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.i16), ndim=1), from_bfloat16, to_bfloat16)
    return Stored(ti.types.ndarray(dtype=ti.types.vector(lanes, ti.f32), ndim=1), as_it_is, as_it_is)


def cut(tensor: Tensor, C: int) -> Tensor:
    """Without the channels that fill up a vector."""
    return tensor if tensor.shape[-1] == C else tensor[..., :C]


@ti.func
def as_it_is(x):
    return x


@ti.func
def from_bfloat16(x):
    return by_lane(ti.bit_cast, by_lane(ti.cast, x, ti.i32) << 16, ti.f32)


@ti.func
def to_bfloat16(x):
    """To nearest, ties to even; a NaN, whose bits could carry into an infinity's, becomes one with no other bits."""
    bits = by_lane(ti.bit_cast, x, ti.u32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return by_lane(ti.cast, ti.select((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded), ti.i16)


@ti.func
def by_lane(convert: ti.template(), x, dtype: ti.template()):
    """ti.cast or ti.bit_cast of each lane of a vector; of a scalar as it is."""
    if ti.static(x.is_tensor()):
        return ti.Vector([convert(x[lane], dtype) for lane in ti.static(range(x.get_shape()[0]))])
    else:
        return convert(x, dtype)
