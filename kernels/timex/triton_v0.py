"""Tensor cores multiply by Toeplitz tiles. One such tile serves all time tiles and all batches.

A row is a pair (time tile, batch). All rows have the same weights between an output tile and the input x that is `shift` steps
earlier. So the convolution of a channel is a sum of matrix products over `shift`:

    forward   out[row, i] += k[row, j - shift] * h[shift + i - j]                 h[lag] = w[T - 1 - lag], 0 outside
    grad_k    as forward, with time reversed: grad_out[row, j + shift], h[shift + j - i]
    grad_w    sum over the rows of grad_out[row, i] * k[row, j - shift]: each diagonal i - j adds up to one lag

A float32 product is computed as three TF32 products (tf32x3), with a relative error of 2^-22. Tensor cores truncate their sums,
which biases long sums. So each product sums only DEPTH terms, and is added to the float32 total with rounding. In an emulation
that truncates every addend to 24 bits, with 768 to 4096 positive terms, err_ratio is 4e-7 for DEPTH = 32, 9e-7 for 64, and 2e-5
to 8e-5 for a single sum.

Sums have a fixed order, without atomics. Zero times infinity is NaN, so a nonfinite value makes its whole tile NaN.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",), T_multiple=64)

TILE, DEPTH, DEPTH_OF_ROWS = 64, 32, 16      # steps per tile; steps or rows over which one product sums
WARPS = {16: 4, 64: 4, 128: 8}               # rows per block, at most what registers hold -> warps
OPTIONS = {"num_stages": 2, "enable_fp_fusion": True}


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    return _convolution(w, k, eps, False)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    return _convolution(w, grad_out, 0.0, True)


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    """Returns the gradient of w, in which each lag is the sum of two diagonals of tile products.

    One diagonal has i >= j. The other has i < j, in tiles that are one tile further apart.
    """
    B, C, T = k.shape
    sums = k.new_empty(2, *k.shape[1:])
    with torch.cuda.device_of(k):
        _correlate[(T // TILE * C,)](k, grad_out, sums, B, C, T, TILE, DEPTH_OF_ROWS, num_warps=4, **OPTIONS)
    by_lag, next_lag = sums
    by_lag[:, :-TILE] += next_lag[:, TILE:]
    return by_lag.flip(-1)


def _convolution(w: Tensor, x: Tensor, eps: float, backwards: bool) -> Tensor:
    B, C, T = x.shape
    out = torch.empty_like(x)
    rows = T // TILE * B
    per_block = next((size for size in WARPS if size >= rows), max(WARPS))
    with torch.cuda.device_of(x):
        _convolve[(triton.cdiv(rows, per_block) * C,)](w, x, out, B, C, T, eps, backwards, per_block, TILE, DEPTH,
                                                       num_warps=WARPS[per_block], **OPTIONS)
    return out


@triton.jit
def _convolve(w, x, out, B, C, T, eps, BACKWARDS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
              DEPTH: tl.constexpr):
    """Convolves ROWS rows of one channel. `shift` counts steps from x (steps j) to the output tile (steps i)."""
    rows = T // TILE * B
    i = tl.arange(0, TILE)
    j = tl.arange(0, DEPTH)
    blocks = tl.cdiv(rows, ROWS)
    c, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    block = block if BACKWARDS else blocks - 1 - block           # the blocks with the longest sums start first
    first = block * ROWS // B * TILE
    last = tl.minimum(block * ROWS + ROWS - 1, rows - 1) // B * TILE
    row = block * ROWS + tl.arange(0, ROWS)
    t = tl.minimum(row, rows - 1) // B * TILE
    start = ((tl.minimum(row, rows - 1) % B).to(tl.int64) * C + c) * T + t
    lag_0 = w + c.to(tl.int64) * T + T - 1
    total = tl.zeros([ROWS, TILE], tl.float32)
    for shift in range(0 if BACKWARDS else DEPTH - TILE, T - first if BACKWARDS else last + 1, DEPTH):
        if BACKWARDS:
            at = start + shift
            seen = t + shift < T
            lag = shift + j[:, None] - i[None, :]
        else:
            at = start - shift
            seen = t >= shift
            lag = shift + i[None, :] - j[:, None]
        xs = tl.load(x + at[:, None] + j[None, :], mask=seen[:, None], other=0.0)
        toeplitz = tl.load(lag_0 - lag, mask=lag >= 0, other=0.0)
        total += tl.dot(xs, toeplitz, input_precision="tf32x3")
    tl.store(out + start[:, None] + i[None, :], total + eps, mask=(row < rows)[:, None])


@triton.jit
def _correlate(k, grad_out, sums, B, C, T, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Computes grad_w of one channel for one distance between the tiles of grad_out (steps i) and of k (steps j)."""
    tiles = T // TILE
    i = tl.arange(0, TILE)
    c, distance = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    rows = (tiles - distance) * B
    total = tl.zeros([TILE, TILE], tl.float32)
    batch = tiles.to(tl.int64) * C
    row = tl.arange(0, DEPTH)
    b = row % B
    at = row % B * batch + c.to(tl.int64) * tiles + row // B         # index of the row's k, in tiles
    onwards = DEPTH % B * batch + DEPTH // B
    around = 1 - B * batch
    for first in range(0, rows, DEPTH):
        here = (at * TILE)[:, None] + i[None, :]
        seen = (first + row < rows)[:, None]
        ks = tl.load(k + here, mask=seen, other=0.0)
        gs = tl.load(grad_out + distance * TILE + here, mask=seen, other=0.0)
        total += tl.dot(tl.trans(gs), ks, input_precision="tf32x3")
        b += DEPTH % B                                           # this advances by DEPTH rows without a division
        at += tl.where(b >= B, onwards + around, onwards)
        b -= tl.where(b >= B, B, 0)
    j = i[:, None] - i[None, :]
    sheared = tl.gather(total, j & (TILE - 1), 1)                # column n contains the diagonals i - j = n and n - TILE
    at = sums + c.to(tl.int64) * T + distance * TILE + i
    tl.store(at, tl.sum(tl.where(j >= 0, sheared, 0.0), 0))
    tl.store(at + batch * TILE, tl.sum(tl.where(j < 0, sheared, 0.0), 0))
