"""A thread draws a row, in C for this CPU's vectors (csrc/draw.c); a heap finds the likeliest of what top_p can keep."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.backends.bitcode import function
from kernels.backends.taichi import BLOCK, launch, ti
from kernels.draw import Bias, Filters
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",), bitcode=True)
SOURCE = Path(__file__).parent / "csrc" / "draw.c"
SMALL = 2**16                            # up to so many logits, one thread is done before another one is awake
OF_TOKEN, OF_BLOCK, OF_BIAS = 12, 16, 4  # bytes of scratch: an entry of a list; for 512 tokens; a logit


def draw(logits: Tensor, uniform: Tensor, filters: Filters, bias: Bias) -> Tensor:
    (rows, V), n = logits.shape, len(bias.ids)
    usable = logits.stride(1) == 1 and (n == 0 or rows == 1 or logits.stride(0) >= V)    # in C a bias is added in place
    logits = logits if usable else logits.contiguous()
    uniform = uniform.double().contiguous()
    threads = 1 if rows * V <= SMALL else min(rows, torch.get_num_threads())
    size = (OF_BLOCK * (V // 512 + 1) + OF_TOKEN * V + OF_BIAS * (n + 1)) // 8 * 8
    taken = logits.new_zeros(1, dtype=torch.int32)
    scratch = logits.new_empty(threads * size, dtype=torch.uint8)
    drawn = uniform.new_empty(rows, dtype=torch.int64)
    addresses = (tensor.data_ptr() for tensor in (taken, logits, uniform, drawn, *bias, scratch))
    top_k = filters.top_k if filters.top_k < V else 0
    launch(_kernel(threads == 1), taken, *addresses, rows, logits.stride(0), V, n, size, top_k, filters.temperature, filters.top_p,
           filters.min_p, int(filters.filters_first), threads)
    return drawn


@cache
def _kernel(serial: bool):
    """The kernel. serial: by the calling thread alone, which wakes no other."""
    draw_rows = function(SOURCE, "draw")

    @ti.kernel
    def kernel(first: ti.types.ndarray(dtype=ti.i32, ndim=1), taken: ti.i64, logits: ti.i64, uniform: ti.i64, drawn: ti.i64,
               ids: ti.i64, biases: ti.i64, scratch: ti.i64, rows: int, row_size: int, V: int, n_biases: int, scratch_size: int,
               top_k: int, temperature: float, top_p: float, min_p: float, filters_first: int, n: int):
        ti.loop_config(serialize=serial)
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                draw_rows(taken, logits, uniform, drawn, ids, biases, scratch, rows, row_size, V, n_biases, scratch_size, top_k,
                          temperature, top_p, min_p, filters_first, step // BLOCK)

    return kernel
