"""An output of a matrix product y = x W^T in Taichi kernels for CPUs: a row of W, read in order, times a row of x.

Vectors go along k. An output is the sum of 32 chains, of which chain l adds up k = l, l + 32, ... in order. W needs no
alignment: a mapped file will do. For several rows of x, a row of W is read once, and comes from the cache after that.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16
from kernels.backends.taichi import INDEX, ti

LANES, CHAINS = 8, 4                     # of a vector; vectors that are summed each in a chain of its own
WHOLE = LANES * CHAINS
CHUNK = 2048                             # k of int8 in one float sum: 127 * 127 * CHUNK / LANES < 2^24
GROUP = 32                               # elements of a row of W that share a scale in int4, as in kernels/matvec
BYTES = GROUP // 2                       # of a group
Floats = ti.types.ndarray(dtype=ti.f32, ndim=1)
Halves = ti.types.ndarray(dtype=ti.i16, ndim=1)          # bfloat16, or integers
MATRIX = {"float32": Floats, "bfloat16": Halves, "int8": ti.types.ndarray(dtype=ti.i8, ndim=1),
          "int4": ti.types.ndarray(dtype=ti.u8, ndim=1)}
SCALES = {"float32": Floats, "bfloat16": Floats, "int8": Floats, "int4": Halves}


def _float_sums(read, convert=None, scaled=False):
    """read(w, scale, shift, w_at, scale_at, n, K, block, c): eight weights of row n from 32 block + 8 c on, as float32.

    convert: the same for one number; None where K is whole blocks. scaled: W has a scale for each of its rows, and x is in
    steps, of a size for each of its rows.
    """
    has_tail = convert is not None

    @ti.func
    def sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
             n, r, N, K, w_at, scale_at, x_at, step_at, y_at, zero):
        """y[r,n]. w_at, scale_at, x_at, y_at: where W (N,K), its scales, x (R,K) and y (R,N) begin in the arrays.

        step_at: in int8, where the sizes of steps are, each the first of a vector in the array of x. zero: 0, see sum_of.
        """
        acc = [ti.Vector([0.0] * LANES) for _ in ti.static(range(CHAINS))]
        for block in range(K // WHOLE):
            for c in ti.static(range(CHAINS)):
                weights = read(w, scale, shift, w_at, scale_at, n, K, block, c)
                acc[c] += weights * vector(x, x_at + r * K + block * WHOLE, c * LANES)
        total = sum_of(_fixed(_fixed(acc[0] + acc[1], zero) + _fixed(acc[2] + acc[3], zero), zero), zero)
        if ti.static(has_tail):
            for k in range(K // WHOLE * WHOLE, K):
                total += convert(w[w_at + n * K + k]) * x[x_at + r * K + k]
        if ti.static(scaled):
            total *= scale[scale_at + n] * x[step_at + r * LANES]
        y[y_at + r * N + n] = total

    return sums


def _reader(convert):
    @ti.func
    def read(w: ti.template(), scale: ti.template(), shift: ti.template(), w_at, scale_at, n, K, block, c: ti.template()):
        return convert(vector(w, w_at + n * K + block * WHOLE, c * LANES))

    return read


@ti.func
def _from_integers(x):
    return by_lane(ti.cast, x, ti.f32)


@ti.func
def _int4_sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
               n, r, N, K, w_at, scale_at, x_at, step_at, y_at, zero):
    """The same for integers in groups: scale sum(q x) + shift sum(x). step_at: where the sums of x in each group (R,G) are."""
    G = K // GROUP
    w_n, scale_n, x_r, sums_r = w_at + n * G * BYTES, scale_at + n * G, x_at + r * K, step_at + r * G
    even, odd, shifted = ti.Vector([0.0] * LANES), ti.Vector([0.0] * LANES), ti.Vector([0.0] * LANES)
    for block in range(G // LANES):
        group = block * LANES
        scales = from_bfloat16(vector(scale, scale_n + group))
        shifted += from_bfloat16(vector(shift, scale_n + group)) * vector(x, sums_r + group)
        for lane in ti.static(range(LANES)):
            part = _of_group(w, x, w_n + group * BYTES, x_r + group * GROUP, lane) * scales[lane]
            if ti.static(lane % 2 == 0):
                even += part
            else:
                odd += part
    for group in range(G // LANES * LANES, G):
        even += _of_group(w, x, w_n + group * BYTES, x_r + group * GROUP, 0) * from_bfloat16(scale[scale_n + group])
    total = sum_of(_fixed(_fixed(even + odd, zero) + shifted, zero), zero)
    for group in range(G // LANES * LANES, G):
        total += from_bfloat16(shift[scale_n + group]) * x[sums_r + group]
    y[y_at + r * N + n] = total


@ti.func
def _of_group(w: ti.template(), x: ti.template(), w_at, x_at, group: ti.template()):
    """q x of the group after the one at w_at and x_at, in lanes. The low bits of its bytes hold the first 16 elements."""
    first = by_lane(ti.cast, vector(w, w_at, group * BYTES), ti.i32)
    second = by_lane(ti.cast, vector(w, w_at, group * BYTES + LANES), ti.i32)
    at = ti.static(group * GROUP)
    return (_from_integers(first & 15) * vector(x, x_at, at) + _from_integers(second & 15) * vector(x, x_at, at + LANES)
            + _from_integers(first >> 4) * vector(x, x_at, at + 2 * LANES)
            + _from_integers(second >> 4) * vector(x, x_at, at + 3 * LANES))


@ti.func
def _int8_sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
               n, r, N, K, w_at, scale_at, x_at, step_at, y_at, zero):
    """The same with sums of whole numbers. Their parts are exact in float32 for CHUNK numbers, and are added up as integers."""
    total = 0
    for chunk in range(tiles(K, CHUNK)):
        acc = ti.Vector([0.0] * LANES)
        for j in range(chunk * (CHUNK // LANES), ti.min(K, (chunk + 1) * CHUNK) // LANES):
            acc += _from_integers(vector(w, w_at + n * K + j * LANES)) * vector(x, x_at + r * K + j * LANES)
        total += by_lane(ti.cast, acc, ti.i32).sum()
    for k in range(K // LANES * LANES, K):
        total += ti.cast(w[w_at + n * K + k], ti.i32) * ti.cast(x[x_at + r * K + k], ti.i32)
    y[y_at + r * N + n] = ti.cast(total, ti.f32) * scale[scale_at + n]


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
FLOAT_SUMS = {"float32": _float_sums(_reader(as_it_is), as_it_is),
              "bfloat16": _float_sums(_reader(from_bfloat16), from_bfloat16),
              "int8": _float_sums(_reader(_from_integers), _from_integers, scaled=True), "int4": _int4_sums}
SUMS = {**FLOAT_SUMS, "int8": _int8_sums}
