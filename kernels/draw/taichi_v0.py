"""A thread draws a row, in C for this CPU's vectors (csrc/draw.c); a heap finds the likeliest of what top_p can keep."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.backends.bitcode import function
from kernels.backends.taichi import BLOCK, launch, ti
from kernels.draw import Filters
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",), native=True)
SOURCE = Path(__file__).parent / "csrc" / "draw.c"
SMALL = 2**16                            # up to so many logits, one thread is done before another one is awake
OF_TOKEN = 4 + 8                         # bytes of scratch for each token: a weight, and an entry of a list
SPARE = 128                              # bytes of scratch beside them


def draw(logits: Tensor, uniform: Tensor, filters: Filters) -> Tensor:
    rows, V = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    uniform = uniform.double().contiguous()
    threads = 1 if rows * V <= SMALL else min(rows, torch.get_num_threads())
    size = (OF_TOKEN * V + V // 64 + SPARE) // 8 * 8     # V / 64 bytes: a float64 for each block of 512
    taken = logits.new_zeros(1, dtype=torch.int32)
    scratch = logits.new_empty(threads * size, dtype=torch.uint8)
    drawn = uniform.new_empty(rows, dtype=torch.int64)
    launch(_kernel(threads == 1), taken, *(tensor.data_ptr() for tensor in (taken, logits, uniform, drawn, scratch)), rows,
           logits.stride(0), V, size, filters.top_k, filters.temperature, filters.top_p, filters.min_p,
           int(filters.filters_first), threads)
    return drawn


@cache
def _kernel(serial: bool):
    """The kernel. serial: by the calling thread alone, which wakes no other."""
    draw_rows = function(SOURCE, "draw")

    @ti.kernel
    def kernel(first: ti.types.ndarray(dtype=ti.i32, ndim=1), taken: ti.i64, logits: ti.i64, uniform: ti.i64, drawn: ti.i64,
               scratch: ti.i64, rows: int, row_size: int, V: int, scratch_size: int, top_k: int, temperature: float,
               top_p: float, min_p: float, filters_first: int, n: int):
        ti.loop_config(serialize=serial)
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                draw_rows(taken, logits, uniform, drawn, scratch, rows, row_size, V, scratch_size, top_k, temperature, top_p,
                          min_p, filters_first, step // BLOCK)

    return kernel
