"""Cross-entropy and its gradient in Triton, for GPUs.

A program computes one row of logits in two passes, and overwrites the row with the gradient. Arithmetic is in float32, and the
gradient is rounded to the dtype of the logits.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkv.model.fused.triton import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK = 4096                         # logits that a program reads at a time
LEAST_LOGIT = tl.constexpr(-3.4e38)


def supports(logits: Tensor) -> bool:
    return logits.dtype in DTYPES and logits.is_contiguous()


def replace_by_gradient(logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float, ignored: int) -> Tensor:
    """Computes loss._replace_by_gradient."""
    return _run(logits, targets, l2_wrap, confidence_penalty, ignored, gradient=True)


def negative_log_likelihood(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Returns the negative log-likelihood summed over the rows whose target is not `ignored`. The logits are not changed."""
    return _run(logits, targets, 0.0, 0.0, ignored, gradient=False)


def _run(logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float, ignored: int, gradient: bool) -> Tensor:
    rows, V = logits.shape
    nll = logits.new_empty(rows, dtype=torch.float32)
    block = min(MAX_BLOCK, triton.next_power_of_2(V))
    launch(_cross_entropy, (rows,), logits, targets.contiguous(), nll, V, l2_wrap, confidence_penalty, ignored, gradient,
           confidence_penalty != 0, block, num_warps=8)
    return nll.sum()


@triton.jit
def _cross_entropy(logits, targets, nll, V, l2_wrap, penalty, ignored, GRADIENT: tl.constexpr, PENALTY: tl.constexpr,
                   BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * V
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], LEAST_LOGIT, tl.float32)          # this and the next three have one value per lane
    index = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)                        # sum of e^(x - largest)
    weighted = tl.zeros([BLOCK], tl.float32)                     # sum of x e^(x - largest)
    for first in range(0, V, BLOCK):
        i = first + lane
        value = tl.load(x + i, mask=i < V, other=-float("inf")).to(tl.float32)
        index = tl.where(value > largest, i, index)
        new_largest = tl.maximum(largest, value)
        scale = tl.exp(largest - new_largest)
        exponential = tl.exp(value - new_largest)
        total = total * scale + exponential
        if PENALTY:
            weighted = weighted * scale + tl.where(i < V, value, 0.0) * exponential
        largest = new_largest
    top = tl.max(largest, 0)
    scale = tl.exp(largest - top)
    sum_exp = tl.sum(total * scale, 0)
    target = tl.load(targets + row)
    counts = target != ignored
    logit = tl.load(x + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(nll + row, tl.where(counts, tl.log(sum_exp) + (top - logit), 0.0))
    if GRADIENT:
        argmax = tl.min(tl.where(largest == top, index, V), 0)
        mean = tl.sum(weighted * scale, 0) / sum_exp             # the expected logit under the prediction
        tl.debug_barrier()                                       # the target's logit must be read before it is overwritten
        for first in range(0, V, BLOCK):
            i = first + lane
            value = tl.load(x + i, mask=i < V, other=-float("inf")).to(tl.float32)
            probability = tl.exp(value - top) / sum_exp
            grad = probability - tl.where(i == target, 1.0, 0.0) + tl.where(i == argmax, top * l2_wrap, 0.0)
            if PENALTY:
                grad += penalty * probability * (tl.where(i < V, value, 0.0) - mean)
            tl.store(x + i, tl.where(counts, grad, 0.0).to(logits.dtype.element_ty), mask=i < V)
