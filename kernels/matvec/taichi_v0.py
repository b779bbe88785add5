"""Rows of W as they are, a few at a time, read in order by all cores; vectors along k, and one launch for several products.

An output is the sum of LANES chains, lane l adding up k = l, l + LANES, ... in order, whatever the tile: for one row of x a
tile is WIDE rows of W; for more it is FEW rows of W times ROWS of x, so that what was read and converted serves ROWS times.
W needs no packing beyond its form, and no alignment: a mapped file will do.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16
from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.matvec import GROUP, Packed, inputs_of
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.uint8))

LANES = 8
WIDE, FEW, ROWS = 4, 2, 4                # of a tile: rows of W for one row of x; rows of W and of x for several
TOGETHER = 4                             # products in a launch
CHUNK = 2048                             # k of int8 in one float sum: 127 * 127 * CHUNK / LANES < 2^24
Floats = ti.types.ndarray(dtype=ti.f32, ndim=1)
Halves = ti.types.ndarray(dtype=ti.i16, ndim=1)          # bfloat16, or integers
MATRIX = {"float32": Floats, "bfloat16": Halves, "int8": ti.types.ndarray(dtype=ti.i8, ndim=1),
          "int4": ti.types.ndarray(dtype=ti.u8, ndim=1)}
SCALES = {"float32": Floats, "bfloat16": Floats, "int8": Floats, "int4": Halves}


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    if len(weights) > TOGETHER:
        return _in_parts(weights)
    form, K, missing = weights[0].form, inputs_of(weights[0]), TOGETHER - len(weights)
    widths = [len(packed.weight) for packed in weights]
    sizes = [*widths, *[0] * missing]
    matrices = [packed.weight.view(-1) for packed in (*weights, *[weights[0]] * missing)]
    scale, shift = (_joined([getattr(packed, name) for packed in weights]) for name in ("scale", "shift"))
    outputs, tiles = sum(widths), sum(-(-N // WIDE) for N in widths)

    def product(x: Tensor) -> list[Tensor]:
        R = x.shape[1]
        y = x.new_empty(R * outputs)
        launch(_kernel(form, R == 1), *matrices, scale, shift, x.view(-1), y, *sizes, K, R, shares(tiles))
        return [part.view(R, -1) for part in y.split([R * N for N in widths])]

    return product


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1)


def _in_parts(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    starts = range(0, len(weights), TOGETHER)
    products = [bind(weights[start:start + TOGETHER]) for start in starts]
    return lambda x: [y for start, product in zip(starts, products, strict=True)
                      for y in product(x[start:start + TOGETHER].contiguous())]


@cache
def _kernel(form: str, one_row: bool):
    """The kernel for one row of x, or for any number; it computes up to four products, of weights (N0,K) to (N3,K)."""
    tile_n, tile_r = (WIDE, 1) if one_row else (FEW, ROWS)
    stored, scales, sums = MATRIX[form], SCALES[form], SUMS[form]

    @ti.func
    def product(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
                first, end, start, N, K, R, x_at, y_at):
        """The tiles from first to end of those of all products; this one's begin at start."""
        for at in range(ti.max(first, start), ti.min(end, start + _tiles(N, tile_n))):
            for r in range(_tiles(R, tile_r)):
                sums(w, scale, shift, x, y, (at - start) * tile_n, r * tile_r, N, K, R, x_at, y_at, tile_n, tile_r)

    @ti.kernel
    def kernel(w0: stored, w1: stored, w2: stored, w3: stored, scale: scales, shift: scales, x: Floats, y: Floats,
               N0: int, N1: int, N2: int, N3: int, K: int, R: int, n: int):
        for step in range(n * BLOCK):
            start_1 = _tiles(N0, tile_n)
            start_2 = start_1 + _tiles(N1, tile_n)
            start_3 = start_2 + _tiles(N2, tile_n)
            first, end = share(step, start_3 + _tiles(N3, tile_n), n)
            product(w0, scale, shift, x, y, first, end, 0, N0, K, R, 0, 0)
            product(w1, scale, shift, x, y, first, end, start_1, N1, K, R, R * K, N0)
            product(w2, scale, shift, x, y, first, end, start_2, N2, K, R, 2 * R * K, N0 + N1)
            product(w3, scale, shift, x, y, first, end, start_3, N3, K, R, 3 * R * K, N0 + N1 + N2)

    return kernel


def _float_sums(read):
    """read: the conversion to float32, of vectors and of numbers."""
    @ti.func
    def sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
                    n, r, N, K, R, x_at, y_at, tile_n: ti.template(), tile_r: ti.template()):
        """A tile of outputs: rows n, n + 1, ... of W and r, r + 1, ... of x, the last of either again beyond its end.

        x_at: where this product's x begins; y_at: the number of outputs of a row in the products before.
        """
        acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
        for j in range(K // LANES):
            rows = [_vector(x, (x_at + ti.min(r + b, R - 1) * K + j * LANES) & INDEX) for b in ti.static(range(tile_r))]
            for a in ti.static(range(tile_n)):
                weights = read(_vector(w, (ti.min(n + a, N - 1) * K + j * LANES) & INDEX))
                for b in ti.static(range(tile_r)):
                    acc[a][b] += weights * rows[b]
        for a in ti.static(range(tile_n)):
            for b in ti.static(range(tile_r)):
                n_at, r_at = ti.min(n + a, N - 1), ti.min(r + b, R - 1)
                total = _sum(acc[a][b], R >> 30)
                for k in range(K // LANES * LANES, K):
                    total += read(w[n_at * K + k]) * x[x_at + r_at * K + k]
                y[y_at * R + r_at * N + n_at] = total

    return sums


@ti.func
def _int8_sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
               n, r, N, K, R, x_at, y_at, tile_n: ti.template(), tile_r: ti.template()):
    """The same with sums of whole numbers. Their parts are exact in float32 for CHUNK numbers, and are added up as integers."""
    totals = [[0 for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
    for chunk in range(_tiles(K, CHUNK)):
        acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
        end = ti.min(K, (chunk + 1) * CHUNK)
        for j in range(chunk * (CHUNK // LANES), end // LANES):
            rows = [_vector(x, (x_at + ti.min(r + b, R - 1) * K + j * LANES) & INDEX) for b in ti.static(range(tile_r))]
            for a in ti.static(range(tile_n)):
                weights = by_lane(ti.cast, _vector(w, (ti.min(n + a, N - 1) * K + j * LANES) & INDEX), ti.f32)
                for b in ti.static(range(tile_r)):
                    acc[a][b] += weights * rows[b]
        for a in ti.static(range(tile_n)):
            for b in ti.static(range(tile_r)):
                totals[a][b] += by_lane(ti.cast, acc[a][b], ti.i32).sum()
    for a in ti.static(range(tile_n)):
        for b in ti.static(range(tile_r)):
            n_at, r_at = ti.min(n + a, N - 1), ti.min(r + b, R - 1)
            for k in range(K // LANES * LANES, K):
                totals[a][b] += ti.cast(w[n_at * K + k], ti.i32) * ti.cast(x[x_at + r_at * K + k], ti.i32)
            y[y_at * R + r_at * N + n_at] = ti.cast(totals[a][b], ti.f32) * scale[y_at + n_at]


@ti.func
def _int4_sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
               n, r, N, K, R, x_at, y_at, tile_n: ti.template(), tile_r: ti.template()):
    """The same for the floats that the integers of a group stand for, half a group at a time.

    The elements in the low bits and those in the high bits have sums of their own, since one sum would take two terms in an
    iteration, which LLVM may add in another order in another tile.
    """
    low_sums = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
    high_sums = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
    groups = K // GROUP
    for half in range(2 * groups):
        k = half // 2 * GROUP + half % 2 * LANES
        rows = [[_vector(x, (x_at + ti.min(r + b, R - 1) * K + k + part * 16) & INDEX) for part in ti.static(range(2))]
                for b in ti.static(range(tile_r))]
        for a in ti.static(range(tile_n)):
            n_at = ti.min(n + a, N - 1)
            two = by_lane(ti.cast, _vector(w, (n_at * groups * 16 + half * LANES) & INDEX), ti.i32)
            at = (y_at + n_at) * groups + half // 2
            factor, term = from_bfloat16(scale[at]), from_bfloat16(shift[at])
            low = by_lane(ti.cast, two & 15, ti.f32) * factor + term
            high = by_lane(ti.cast, two >> 4, ti.f32) * factor + term
            for b in ti.static(range(tile_r)):
                low_sums[a][b] += low * rows[b][0]
                high_sums[a][b] += high * rows[b][1]
    for a in ti.static(range(tile_n)):
        for b in ti.static(range(tile_r)):
            total = _sum(low_sums[a][b], R >> 30) + _sum(high_sums[a][b], R >> 30)
            y[y_at * R + ti.min(r + b, R - 1) * N + ti.min(n + a, N - 1)] = total


@ti.func
def _tiles(size, tile):
    return (size + tile - 1) // tile


@ti.func
def _vector(array: ti.template(), at):
    return ti.Vector([array[at + lane] for lane in ti.static(range(LANES))])


@ti.func
def _sum(v, zero):
    """The sum of the lanes, in the one order that is written here.

    zero: 0, which the compiler does not know. LLVM may reorder a sum of more than two terms, and does so by what is around it;
    it does not look through an integer operation.
    """
    fours = [_fixed(v[lane] + v[lane + 4], zero) for lane in ti.static(range(4))]
    return _fixed(_fixed(fours[0] + fours[2], zero) + _fixed(fours[1] + fours[3], zero), zero)


@ti.func
def _fixed(x, zero):
    return ti.bit_cast(ti.bit_cast(x, ti.i32) ^ zero, ti.f32)



SUMS = {"float32": _float_sums(as_it_is), "bfloat16": _float_sums(from_bfloat16), "int8": _int8_sums, "int4": _int4_sums}
