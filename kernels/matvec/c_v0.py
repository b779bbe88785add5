"""C code (csrc/products.h) reads several distant rows of W per thread, with prefetch, multiply-adds and byte dot products."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import native
from kernels.matvec import FORMATS, GROUP, KINDS, TOGETHER, BFloat16, Blocks, Int4, Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), why_not=native.why_not, formats=tuple(FORMATS))
BLOCK = TOGETHER * GROUP                 # numbers of a row that are prepared together for int4 and GGUF's blocks
CACHED = 2**19                           # int8: elements of x per call that stay in the cache; at least 64 rows
AMX_ROWS = 512                           # int8 with AMX: rows multiplied by weights that are packed once (csrc/amx.c)
MANY_ROWS = 64                           # from this many rows on, converting W once for all rows is faster
TILE_ROWS = 12                           # a multiple of the rows in a tile of x (csrc/many_rows.c) at every level
TILED_ROWS = 84 * TILE_ROWS              # rows of x copied into tiles at a time, to bound the memory
SMALL = 2**16                            # products up to which one thread finishes before a second would wake


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x, strict=True)]


def int8_product(packed: Int8) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes y (R,N) from a contiguous float32 x (R,K), which it rounds as FBGEMM does.

    The model's int8 layers use it, because FBGEMM's rounding and Int8.rounded differ in ties.
    """
    N, K = packed.weight.shape
    most_rows = max(AMX_ROWS if native.has_amx() else 64, CACHED // K)
    offset = packed.rounding.offset
    step = torch.tensor(1 / packed.rounding.steps, dtype=torch.float32, device="cpu")
    per_step, scale = (1 / step).item(), packed.scale * step
    weight = packed.stored

    def product(x: Tensor) -> Tensor:
        R = len(x)
        q, largest, y = x.new_empty(R, K, dtype=torch.uint8), x.new_empty(R, 1), x.new_empty(R, N)
        native.run("matvec_quantize", _threads(R, K), R, K, packed.non_negative, offset, per_step, x, q, largest)
        for first in range(0, R, most_rows):
            rows, n = slice(first, first + most_rows), min(most_rows, R - first)
            threads = 1 if N * K * n <= SMALL else native.threads_for(N)
            native.run("matvec", threads, KINDS["int8"], packed.by_input, N, K, n, 1, K, offset, True, threads,
                       weight, scale, None, largest[rows], q[rows], y[rows])
        return y

    return product


def bfloat16_product(weight: Tensor, x: Tensor) -> Tensor:
    """Returns y (R,N) of a bfloat16 W (N,K) and a float32 x (R,K), which is not rounded.

    MANY_ROWS or more rows are summed in a different order from fewer rows. Otherwise the bits of a row's result do not depend
    on the other rows.
    """
    R, N, K = len(x), *weight.shape
    weight, x, y = weight.contiguous(), x.contiguous(), x.new_empty(R, N)
    if R < MANY_ROWS:
        threads = 1 if N * K * R <= SMALL else native.threads_for(N)
        native.run("matvec", threads, KINDS["bfloat16 as float32"], False, N, K, R, K, 0, 0, False, threads,
                   weight, None, None, x, None, y)
    else:
        tiles = x.new_empty(min(TILED_ROWS, R + TILE_ROWS), K)
        for rows, out in zip(x.split(TILED_ROWS), y.split(TILED_ROWS), strict=True):
            native.run("matvec_tiles", native.threads_for(len(rows)), len(rows), K, rows, tiles)
            native.run("matvec_many_rows", native.threads_for(N), N, K, len(rows), weight, tiles, out)
    return y


def dense(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Returns the matrix W (N,K), and unpacks int4 and GGUF's blocks in C."""
    if isinstance(packed, Blocks):
        matrix = torch.empty(len(packed.weight), packed.K, dtype=torch.float32, device="cpu")
        native.run("matvec_unpack_blocks", native.threads_for(len(matrix)), KINDS[packed.format], *matrix.shape,
                   packed.weight.contiguous(), matrix)
        return matrix.to(dtype)
    if not isinstance(packed, Int4):
        return packed.dense(dtype)
    N = len(packed.weight)
    K = _padded_K(packed)
    weight, scale, shift = packed.map(Tensor.contiguous)
    matrix = torch.empty(N, K, dtype=dtype, device="cpu")
    native.run("matvec_unpack", native.threads_for(N), N, K, dtype == torch.bfloat16, weight, scale, shift, matrix)
    return matrix[:, :packed.K]


def _product(packed: Packed) -> Callable[[Tensor], Tensor]:
    N = len(packed.weight)
    K = packed.K if isinstance(packed, Blocks) else _padded_K(packed)    # int4 is stored padded, a file's blocks are not
    weight = packed.stored
    _, scale, shift = (*packed, None, None)[:3]
    offset = packed.rounding.offset if isinstance(packed, Int8) else 0

    def product(x: Tensor) -> Tensor:
        R = len(x)
        floats, q = _inputs(x, packed)
        y = x.new_empty(R, N)
        threads = 1 if N * K * R <= SMALL else native.threads_for(N)
        q_row = q.shape[1] * q.itemsize
        native.run("matvec", threads, KINDS[packed.format], packed.by_input, N, K, R, floats.shape[1], q_row, offset, False,
                   threads, weight, scale, shift, floats, q, y)
        return y

    return product


def _inputs(x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Returns the fields x and q of the C struct `product`.

    The field x contains x in float32, or scales and sums for int4 and GGUF's blocks. The field q contains the rounded x.
    """
    if isinstance(packed, BFloat16):
        return x, x.bfloat16()
    if isinstance(packed, Int8):
        return x, (x + packed.rounding.offset).to(torch.uint8)
    if isinstance(packed, Int4 | Blocks):
        R, K = len(x), _padded_K(packed)
        per_block = 2 * BLOCK // (Blocks.inputs if isinstance(packed, Blocks) else GROUP)
        floats = x.new_empty(R, K // BLOCK * per_block)
        q = x.new_empty(R, K, dtype=torch.uint8)
        native.run("matvec_arrange", _threads(R, K), KINDS[packed.format], R, K, per_block,
                   torch.nn.functional.pad(x, (0, K - packed.K)) if K > packed.K else x, q, floats)
        return floats, q
    return x, x


def _padded_K(packed: Packed) -> int:
    return -(-packed.K // BLOCK) * BLOCK if isinstance(packed, Int4 | Blocks) else packed.K


def _threads(R: int, K: int) -> int:
    """Returns the number of threads that prepare x (R,K), one row at a time."""
    return 1 if R * K <= SMALL else native.threads_for(R)
