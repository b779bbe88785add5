"""A program computes one row, and reads and writes a row that fits into registers only once.

A longer row is read block by block. Each lane of the block keeps the largest x so far, and the sum relative to that x. At the
end the lanes are combined, and a second loop writes the result. Half precision is converted in registers, without converted
copies in memory.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",), dtypes=(torch.float32, torch.bfloat16, torch.float16))

LONGEST = 16384                              # longest row that fits into registers, a power of 2
BLOCK = 4096                                 # columns per block of a longer row
PER_WARP = 512                               # columns per warp: 16 per thread
LOWEST = tl.constexpr(-3.4028234663852886e38)


def forward(x: Tensor) -> Tensor:
    return _launch(_softmax, _softmax_in_blocks, x)


def backward(y: Tensor, grad_y: Tensor) -> Tensor:
    return _launch(_gradient, _gradient_in_blocks, y, grad_y)


def _launch(in_one_piece, in_blocks, *inputs: Tensor) -> Tensor:
    N, M = inputs[0].shape
    result = torch.empty_like(inputs[0])
    kernel, block = (in_one_piece, triton.next_power_of_2(M)) if M <= LONGEST else (in_blocks, BLOCK)
    with torch.cuda.device_of(result):
        kernel[(N,)](*inputs, result, M, block, num_warps=min(16, max(1, block // PER_WARP)),
                     enable_fp_fusion=True)
    return result


@triton.jit
def _softmax(x, y, M, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * M
    i = tl.arange(0, BLOCK)
    values = tl.load(x + start + i, mask=i < M, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(values - tl.max(values, 0))
    tl.store(y + start + i, numerator / tl.sum(numerator, 0), mask=i < M)


@triton.jit
def _softmax_in_blocks(x, y, M, BLOCK: tl.constexpr):
    """Computes a longer row. Maxima start at LOWEST, so that e^(-inf - maximum) is 0 and a row of only -inf is 0/0."""
    start = tl.program_id(0).to(tl.int64) * M
    i = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, M, BLOCK):
        values = tl.load(x + start + first + i, mask=first + i < M, other=-float("inf")).to(tl.float32)
        now = tl.maximum(largest, values)
        total = total * tl.exp(largest - now) + tl.exp(values - now)
        largest = now
    of_row = tl.max(largest, 0)
    share = 1 / tl.sum(total * tl.exp(largest - of_row), 0)
    for first in range(0, M, BLOCK):
        values = tl.load(x + start + first + i, mask=first + i < M, other=-float("inf")).to(tl.float32)
        tl.store(y + start + first + i, tl.exp(values - of_row) * share, mask=first + i < M)


@triton.jit
def _gradient(y, grad_y, grad_x, M, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * M
    i = tl.arange(0, BLOCK)
    share = tl.load(y + start + i, mask=i < M, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + start + i, mask=i < M, other=0.0).to(tl.float32)
    tl.store(grad_x + start + i, share * (grad - tl.sum(share * grad, 0)), mask=i < M)


@triton.jit
def _gradient_in_blocks(y, grad_y, grad_x, M, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * M
    i = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, M, BLOCK):
        share = tl.load(y + start + first + i, mask=first + i < M, other=0.0).to(tl.float32)
        products += share * tl.load(grad_y + start + first + i, mask=first + i < M, other=0.0).to(tl.float32)
    dot = tl.sum(products, 0)
    for first in range(0, M, BLOCK):
        share = tl.load(y + start + first + i, mask=first + i < M, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + start + first + i, mask=first + i < M, other=0.0).to(tl.float32)
        tl.store(grad_x + start + first + i, share * (grad - dot), mask=first + i < M)
