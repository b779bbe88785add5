"""In C (csrc/draw.c): a thread for each row, and a heap that finds the likeliest of the tokens that top_p can keep."""

import torch
from torch import Tensor

from kernels import native
from kernels.draw import Bias, Filters
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), why_not=native.why_not)
SMALL = 2**16                            # up to so many logits, one thread is done before another one is awake
OF_TOKEN, OF_BLOCK, OF_BIAS = 12, 16, 4  # bytes of scratch: of a token in a list, of a block of 512 tokens, of a logit


def draw(logits: Tensor, uniform: Tensor, filters: Filters, bias: Bias) -> Tensor:
    rows, V = logits.shape
    n = len(bias.ids)
    usable = logits.stride(1) == 1 and (n == 0 or rows == 1 or logits.stride(0) >= V)    # in C a bias is added in place
    logits = logits if usable else logits.contiguous()
    uniform = uniform.double().contiguous()
    threads = 1 if rows * V <= SMALL else native.threads_for(rows)
    size = -(-(OF_BLOCK * (V // 512 + 1) + OF_TOKEN * V + OF_BIAS * n) // 64) * 64
    scratch = logits.new_empty(threads * size, dtype=torch.uint8)
    drawn = uniform.new_empty(rows, dtype=torch.int64)
    top_k = filters.top_k if filters.top_k < V else 0
    native.run("draw", threads, rows, logits.stride(0), V, n, size, top_k, filters.filters_first, float(filters.temperature),
               float(filters.top_p), float(filters.min_p), logits, uniform, drawn, *bias, scratch)
    return drawn
