"""The float matrix that an int4 form stands for, by a Taichi kernel."""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from functools import cache

import torch
from torch import Tensor

from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16, to_bfloat16
from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.matvec import GROUP, Packed, inputs_of
from kernels.matvec._products import BLOCK_4, LANES, WORDS, Floats, Halves, vector


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
