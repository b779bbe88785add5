"""C code (csrc/draw.c) samples with one thread per row, and a heap sorts only the candidates of top_k and top_p."""

import torch
from torch import Tensor

from kernels import native
from kernels.draw import Bias, Filters
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), why_not=native.why_not)
SMALL = 2**16                            # logits up to which one thread finishes before a second would wake
BLOCK = 512                              # tokens whose weights are summed in float32, as in draw.c


def draw(logits: Tensor, uniform: Tensor, filters: Filters, bias: Bias) -> Tensor:
    rows, V = logits.shape
    n = len(bias.ids)
    usable = logits.stride(1) == 1 and (n == 0 or rows == 1 or logits.stride(0) >= V)    # C adds the bias in place
    logits = logits if usable else logits.contiguous()
    uniform = uniform.double().contiguous()
    threads = 1 if rows * V <= SMALL else native.threads_for(rows)
    size = (V // BLOCK + 1) * native.size_of("draw_block") + V * native.size_of("draw_token") + n * logits.itemsize
    size = -(-size // 64) * 64
    scratch = logits.new_empty(threads * size, dtype=torch.uint8)
    drawn = uniform.new_empty(rows, dtype=torch.int64)
    top_k = filters.top_k if filters.top_k < V else 0
    native.run("draw", threads, rows, logits.stride(0), V, n, size, top_k, filters.filters_first, float(filters.temperature),
               float(filters.top_p), float(filters.min_p), logits, uniform, drawn, *bias, scratch)
    return drawn
