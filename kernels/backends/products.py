"""A tile of a matrix product y = x W^T in Taichi kernels for CPUs: a few rows of W, read in order, times a few rows of x.

Vectors go along k. An output is the sum of 32 chains, of which chain l adds up k = l, l + 32, ... in order, whatever the tile,
so that a row of y does not depend, to the bit, on the rows beside it. W needs no alignment: a mapped file will do.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16
from kernels.backends.taichi import INDEX, ti

LANES, CHAINS = 8, 4                     # of a vector; vectors that are summed each in a chain of its own
WHOLE = LANES * CHAINS
WIDE, FEW, ROWS = 1, 2, 4                # of a tile: rows of W for one row of x; rows of W and of x for several
CHUNK = 2048                             # k of int8 in one float sum: 127 * 127 * CHUNK / LANES < 2^24
GROUP = 32                               # elements of a row of W that share a scale in int4, as in kernels/matvec
Floats = ti.types.ndarray(dtype=ti.f32, ndim=1)
Halves = ti.types.ndarray(dtype=ti.i16, ndim=1)          # bfloat16, or integers
MATRIX = {"float32": Floats, "bfloat16": Halves, "int8": ti.types.ndarray(dtype=ti.i8, ndim=1),
          "int4": ti.types.ndarray(dtype=ti.u8, ndim=1)}
SCALES = {"float32": Floats, "bfloat16": Floats, "int8": Floats, "int4": Halves}


def _float_sums(read, convert=None, scaled=False):
    """read(w, scale, shift, w_at, scale_at, n, K, k): eight weights from k on of row n, as float32.

    convert: the same for a single number, where K need not be whole blocks. scaled: W has a scale for each of its rows, and x is in steps
    of a size for each of its rows.
    """
    has_tail = convert is not None

    @ti.func
    def sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
             n, r, N, K, R, w_at, scale_at, x_at, step_at, y_at, tile_n: ti.template(), tile_r: ti.template()):
        """A tile of outputs: rows n, n + 1, ... of W and r, r + 1, ... of x, the last of either again beyond its end.

        w_at, scale_at, x_at, y_at: where W (N,K), its scales, x (R,K) and y (R,N) begin; step_at: where the sizes of steps are, each
        the first of a vector of the array of x. One row of x takes all chains in one
        pass, so that W is read in order; several take a pass for each chain, which leaves vector registers for more rows.
        """
        together = ti.static(CHAINS if tile_r == 1 else 1)
        totals = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
        for first in range(CHAINS // together):
            acc = [[[ti.Vector([0.0] * LANES) for _ in ti.static(range(together))] for _ in ti.static(range(tile_r))]
                   for _ in ti.static(range(tile_n))]
            for block in range(K // WHOLE):
                for c in ti.static(range(together)):
                    k = block * WHOLE + first * LANES
                    rows = [vector(x, x_at + ti.min(r + b, R - 1) * K + k, c * LANES) for b in ti.static(range(tile_r))]
                    for a in ti.static(range(tile_n)):
                        weights = read(w, scale, shift, w_at, scale_at, ti.min(n + a, N - 1), K, k, c)
                        for b in ti.static(range(tile_r)):
                            acc[a][b][c] += weights * rows[b]
            for a in ti.static(range(tile_n)):
                for b in ti.static(range(tile_r)):
                    for c in ti.static(range(together)):
                        totals[a][b] = _fixed(totals[a][b] + acc[a][b][c], R >> 30)
        for a in ti.static(range(tile_n)):
            for b in ti.static(range(tile_r)):
                n_at, r_at = ti.min(n + a, N - 1), ti.min(r + b, R - 1)
                total = sum_of(totals[a][b], R >> 30)
                if ti.static(has_tail):
                    for k in range(K // WHOLE * WHOLE, K):
                        total += convert(w[w_at + n_at * K + k]) * x[x_at + r_at * K + k]
                if ti.static(scaled):
                    total *= scale[scale_at + n_at] * x[step_at + r_at * LANES]
                y[y_at + r_at * N + n_at] = total

    return sums


def _reader(convert):
    @ti.func
    def read(w: ti.template(), scale: ti.template(), shift: ti.template(), w_at, scale_at, n, K, k, c: ti.template()):
        return convert(vector(w, w_at + n * K + k, c * LANES))

    return read


@ti.func
def _from_integers(x):
    return by_lane(ti.cast, x, ti.f32)


@ti.func
def _read_int4(w: ti.template(), scale: ti.template(), shift: ti.template(), w_at, scale_at, n, K, k, c: ti.template()):
    """Of a group's 16 bytes the low bits hold its first 16 elements."""
    group, bits = n * (K // GROUP) + (k >> 5), (k >> 4 & 1) * 4 + ti.static(c // 2 * 4)
    integers = by_lane(ti.cast, vector(w, w_at + group * 16 + (k & 8), c % 2 * LANES), ti.i32) >> bits & 15
    return _from_integers(integers) * from_bfloat16(scale[scale_at + group]) + from_bfloat16(shift[scale_at + group])


@ti.func
def _int8_sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
               n, r, N, K, R, w_at, scale_at, x_at, step_at, y_at, tile_n: ti.template(), tile_r: ti.template()):
    """The same with sums of whole numbers. Their parts are exact in float32 for CHUNK numbers, and are added up as integers."""
    totals = [[0 for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
    for chunk in range(tiles(K, CHUNK)):
        acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(tile_r))] for _ in ti.static(range(tile_n))]
        end = ti.min(K, (chunk + 1) * CHUNK)
        for j in range(chunk * (CHUNK // LANES), end // LANES):
            rows = [vector(x, x_at + ti.min(r + b, R - 1) * K + j * LANES) for b in ti.static(range(tile_r))]
            for a in ti.static(range(tile_n)):
                weights = by_lane(ti.cast, vector(w, w_at + ti.min(n + a, N - 1) * K + j * LANES), ti.f32)
                for b in ti.static(range(tile_r)):
                    acc[a][b] += weights * rows[b]
        for a in ti.static(range(tile_n)):
            for b in ti.static(range(tile_r)):
                totals[a][b] += by_lane(ti.cast, acc[a][b], ti.i32).sum()
    for a in ti.static(range(tile_n)):
        for b in ti.static(range(tile_r)):
            n_at, r_at = ti.min(n + a, N - 1), ti.min(r + b, R - 1)
            for k in range(K // LANES * LANES, K):
                totals[a][b] += ti.cast(w[w_at + n_at * K + k], ti.i32) * ti.cast(x[x_at + r_at * K + k], ti.i32)
            y[y_at + r_at * N + n_at] = ti.cast(totals[a][b], ti.f32) * scale[scale_at + n_at]


@ti.func
def tiles(size, tile):
    return (size + tile - 1) // tile


@ti.func
def vector(array: ti.template(), at, beyond: ti.template() = 0):
    """The elements from at + beyond on; vectors that differ in `beyond` alone share the computation of their addresses."""
    return ti.Vector([array[(at & INDEX) + beyond + lane] for lane in ti.static(range(LANES))])


@ti.func
def sum_of(v, zero):
    """The sum of the lanes, in the one order that is written here.

    zero: 0, which the compiler does not know. LLVM may reorder a sum of more than two terms, and does so by what is around it;
    it does not look through an integer operation.
    """
    fours = [_fixed(v[lane] + v[lane + 4], zero) for lane in ti.static(range(4))]
    return _fixed(_fixed(fours[0] + fours[2], zero) + _fixed(fours[1] + fours[3], zero), zero)


@ti.func
def _fixed(x, zero):
    """x, a number or a vector, as LLVM cannot see through."""
    return by_lane(ti.bit_cast, by_lane(ti.bit_cast, x, ti.i32) ^ zero, ti.f32)


# By the form of W. A row of x is float32, but in int8 of SUMS it is whole numbers.
FLOAT_SUMS = {"float32": _float_sums(_reader(as_it_is), as_it_is), "bfloat16": _float_sums(_reader(from_bfloat16), from_bfloat16),
              "int8": _float_sums(_reader(_from_integers), _from_integers, scaled=True), "int4": _float_sums(_read_int4)}
SUMS = {**FLOAT_SUMS, "int8": _int8_sums}
