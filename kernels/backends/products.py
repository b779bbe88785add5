"""An output of a matrix product y = x W^T in Taichi kernels for CPUs: a row of W, read in order, times a row of x.

Vectors go along k. An output is the sum of 32 chains, of which chain l adds up k = l, l + 32, ... in order. W needs no
alignment: a mapped file will do. For several rows of x, the weights are converted once for ROWS of them, which changes no bit
of a row's result.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from functools import cache

from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16
from kernels.backends.taichi import INDEX, ti

LANES, CHAINS = 8, 4                     # of a vector; vectors that are summed each in a chain of its own
WHOLE = LANES * CHAINS
ROWS = 4                                 # of x, that share what is read and converted of W
GROUP = 32                               # elements of a row of W that share a scale in int4, as in kernels/matvec
WORDS = GROUP // 8                       # of 32 bits, of a group
BLOCK_4 = LANES * GROUP                  # of a row of W in int4: eight groups, side by side
ARRANGED = BLOCK_4 + 5 * LANES           # numbers that `arrange` makes of the elements of x for a block
Floats = ti.types.ndarray(dtype=ti.f32, ndim=1)
Halves = ti.types.ndarray(dtype=ti.i16, ndim=1)          # bfloat16, or integers
MATRIX = {"float32": Floats, "bfloat16": Halves, "int8": ti.types.ndarray(dtype=ti.i8, ndim=1),
          "int4": ti.types.ndarray(dtype=ti.i32, ndim=1)}
SCALES = {"float32": Floats, "bfloat16": Floats, "int8": Floats, "int4": Halves}


def _sums_in_chains(rows, convert, integers=False, in_steps=False):
    """convert: from a number of W, or a vector of them, to float32.

    integers: W is integers with a scale for each of its rows, and x whole numbers. The sum of a chain is exact in float32 for
    255 * 127 * K / 32 < 2^24, and chains are added up as integers. in_steps: a row of x has a factor, the size of a step.
    """

    @ti.func
    def sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
             n, first, R, K, w_at, scale_at, x_at, x_row, step_at, y_at, y_row, zero):
        at = [x_at + ti.min(first + i, R - 1) * x_row for i in ti.static(range(rows))]
        acc = [ti.Vector([0.0] * LANES) for _ in ti.static(range(rows * CHAINS))]
        for block in range(K // WHOLE):
            for c in ti.static(range(CHAINS)):
                weights = convert(vector(w, w_at + n * K + block * WHOLE, c * LANES))
                for i in ti.static(range(rows)):
                    acc[i * CHAINS + c] += weights * vector(x, at[i] + block * WHOLE, c * LANES)
                    if ti.static(not integers):        # those sums are exact in any order
                        acc[i * CHAINS + c] = fixed(acc[i * CHAINS + c], zero)
        for i in ti.static(range(rows)):
            row, total = ti.min(first + i, R - 1), 0.0
            if ti.static(integers):
                chains = [by_lane(ti.cast, acc[i * CHAINS + c], ti.i32) for c in ti.static(range(CHAINS))]
                whole = (chains[0] + chains[1] + chains[2] + chains[3]).sum()
                for k in range(K // WHOLE * WHOLE, K):
                    whole += ti.cast(w[w_at + n * K + k], ti.i32) * ti.cast(x[at[i] + k], ti.i32)
                total = fixed(ti.cast(whole, ti.f32) * scale[scale_at + n], zero)
                if ti.static(in_steps):
                    total *= x[step_at + row * x_row]
            else:
                halves = [fixed(acc[i * CHAINS + c] + acc[i * CHAINS + c + 1], zero) for c in ti.static((0, 2))]
                total = sum_of(fixed(halves[0] + halves[1], zero), zero)
                for k in range(K // WHOLE * WHOLE, K):
                    total += convert(w[w_at + n * K + k]) * x[at[i] + k]
            y[y_at + row * y_row + n] = total

    return sums


@ti.func
def _from_integers(x):
    return by_lane(ti.cast, x, ti.f32)


def _int4_sums(rows):
    """The same for integers in groups: scale sum(q x) + shift sum(x). A row of x is what `arrange` has made of it."""
    @ti.func
    def sums(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), y: ti.template(),
             n, first, R, K, w_at, scale_at, x_at, x_row, step_at, y_at, y_row, zero):
        blocks = tiles(K, BLOCK_4)
        at = [x_at + ti.min(first + i, R - 1) * x_row for i in ti.static(range(rows))]
        acc = [ti.Vector([0.0] * LANES) for _ in ti.static(range(rows))]
        for block in range(blocks):
            group, x_block = (n * blocks + block) * LANES, block * ARRANGED
            parts = [vector(x, at[i] + x_block, BLOCK_4 + part * LANES) for i in ti.static(range(rows))
                     for part in ti.static(range(CHAINS))]
            for word in range(WORDS):
                words = vector(w, w_at + group * WORDS + word * LANES)
                for m in ti.static(range(LANES)):
                    weights = _of_words(words, m)
                    for i in ti.static(range(rows)):
                        more = weights * vector(x, at[i] + x_block + word * LANES * LANES, m * LANES)
                        parts[CHAINS * i + m % CHAINS] = fixed(parts[CHAINS * i + m % CHAINS] + more, zero)
            scales = from_bfloat16(vector(scale, scale_at + group))
            shifts = from_bfloat16(vector(shift, scale_at + group))
            for i in ti.static(range(rows)):
                halves = [fixed(parts[CHAINS * i + part] + parts[CHAINS * i + part + 2], zero) for part in ti.static((0, 1))]
                products = fixed(halves[0] + halves[1], zero)
                shifted = shifts * vector(x, at[i] + x_block, BLOCK_4 + CHAINS * LANES)
                acc[i] = fixed(acc[i] + fixed(products * scales + shifted, zero), zero)
        for i in ti.static(range(rows)):
            y[y_at + ti.min(first + i, R - 1) * y_row + n] = sum_of(acc[i], zero)

    return sums


@ti.func
def _of_words(words, m: ti.template()):
    """The m-th integers of words, plus 16, as float32.

    A float32 from 16 to 32 counts in its bits from the 19th on: an integer that is moved there is a number as soon as an
    exponent stands beside it.
    """
    by = ti.static(19 - 4 * m)
    moved = words << by if ti.static(by > 0) else words >> -by
    return by_lane(ti.bit_cast, moved & (15 << 19) | 0x41800000, ti.f32)


@ti.func
def arrange(x: ti.template(), x_at, y: ti.template(), y_at, K, block):
    """What a product in int4 reads of a block of a row of x (K): the elements in the order of the integers, with those of the
    eight groups side by side; for each chain what takes away what _of_words has added; and the sums of the groups.
    """
    y_block = y_at + block * ARRANGED
    for group in range(LANES):
        of_chain = ti.Vector([0.0] * CHAINS)
        for element in range(GROUP):
            k = block * BLOCK_4 + group * GROUP + element
            value = 0.0
            if k < K:
                value = x[x_at + k]
            m = element % 4 * 2 + element // 16
            y[y_block + (element // 4 % 4 * LANES + m) * LANES + group] = value
            of_chain[m % CHAINS] += value
        for chain in ti.static(range(CHAINS)):
            y[y_block + BLOCK_4 + chain * LANES + group] = -16.0 * of_chain[chain]
        y[y_block + BLOCK_4 + CHAINS * LANES + group] = of_chain.sum()


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
    fours = [fixed(v[lane] + v[lane + 4], zero) for lane in ti.static(range(4))]
    return fixed(fixed(fours[0] + fours[2], zero) + fixed(fours[1] + fours[3], zero), zero)


@ti.func
def fixed(x, zero):
    """x, a number or a vector, as LLVM cannot see through."""
    return by_lane(ti.bit_cast, by_lane(ti.bit_cast, x, ti.i32) ^ zero, ti.f32)


@cache
def columns_of(form, rows):
    """The function that computes the outputs y[r,n] of CHAINS parts of eight from `part` on, or of the part `last` again.

    W (N,K) of few columns is stored in such parts, (N/8,K,8), so that no sum crosses the lanes. The other arguments are those
    of sums_of.
    """
    convert = as_it_is if form == "float32" else from_bfloat16

    @ti.func
    def columns(w: ti.template(), x: ti.template(), y: ti.template(), part, last, first, R, K, w_at, x_at, x_row, y_at, y_row,
                zero):
        at = [x_at + ti.min(first + i, R - 1) * x_row for i in ti.static(range(rows))]
        parts = [ti.min(part + c, last) for c in ti.static(range(CHAINS))]
        acc = [ti.Vector([0.0] * LANES) for _ in ti.static(range(rows * CHAINS))]
        for k in range(K):
            for c in ti.static(range(CHAINS)):
                weights = convert(vector(w, w_at + (parts[c] * K + k) * LANES))
                for i in ti.static(range(rows)):
                    acc[i * CHAINS + c] = fixed(acc[i * CHAINS + c] + weights * x[at[i] + k], zero)
        for i in ti.static(range(rows)):
            for c in ti.static(range(CHAINS)):
                for lane in ti.static(range(LANES)):
                    y[y_at + ti.min(first + i, R - 1) * y_row + parts[c] * LANES + lane] = acc[i * CHAINS + c][lane]

    return columns


@cache
def sums_of(form, rows, whole_numbers=False):
    """The function that computes y[r,n] for that n and the rows `first` to first + rows - 1 of R rows, or the last of R again.

    form: of W. whole_numbers: a row of x in int8 is whole numbers, and y lacks its factor; otherwise it is in steps.
    w_at, scale_at, x_at, y_at: where W (N,K), its scales, x and y begin in the arrays. x_row, y_row: from one row to the next.
    step_at: in int8, where the size of the first row's steps is, in the array of x. zero: 0, see sum_of.
    """
    if form == "int4":
        return _int4_sums(rows)
    if form == "int8":
        return _sums_in_chains(rows, _from_integers, integers=True, in_steps=not whole_numbers)
    convert = as_it_is if form == "float32" else from_bfloat16
    return _sums_in_chains(rows, convert)
