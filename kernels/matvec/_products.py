"""Matrix products y = x W^T in Taichi kernels for CPUs.

Vectors go along k. Of float weights an output is the sum of 8 chains, of which chain l adds up k = l, l + 8, ... in order. W
needs no alignment: a mapped file will do. Integers are multiplied and added in 16 bits, in vectors of 16, as long as no sum
can be too large; x is whole numbers then. Several rows of x are multiplied in tiles, in which what is read and converted is
used several times; that changes no bit of a row's result.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
from functools import cache

from kernels.backends.lanes import as_it_is, by_lane, from_bfloat16
from kernels.backends.taichi import INDEX, ti
from kernels.matvec import GROUP, LARGEST, SMALLEST

LANES, CHAINS = 8, 4                     # of a vector; vectors of integers that are summed each in a chain of its own
WIDE = 2 * LANES                         # lanes of a vector of integers in 16 bits
WHOLE_16 = WIDE * CHAINS                 # of those, elements that are summed side by side
EXACT = 2**24 // (255 * 127)             # products of an int8 weight and a whole number whose sum is exact in float32
ROWS, COLUMNS = 4, 3                     # of x and of W, of a tile of outputs: its sums fit into the registers of AVX2
COLUMNS_4 = 2                            # the same in int4
WORDS = GROUP // 4                       # of 16 bits, of a group
BLOCK_4 = LANES * GROUP                  # of a row of W in int4: eight groups, side by side
OF_BLOCK = 2 * LANES                     # floats that belong to a block of x in int4: eight groups' steps and sums
TO_EVEN = 1.5 * 2.0**23                  # a float32 to which this is added is a whole number, a half rounded to the even one
Floats = ti.types.ndarray(dtype=ti.f32, ndim=1)
Halves = ti.types.ndarray(dtype=ti.i16, ndim=1)          # bfloat16, or integers
MATRIX = {"float32": Floats, "bfloat16": Halves, "int8": ti.types.ndarray(dtype=ti.i8, ndim=1), "int4": Halves}
SCALES = {"float32": Floats, "bfloat16": Floats, "int8": Floats, "int4": Halves}


def products_in_16_bits(steps):
    """How many products of an int8 weight and a whole number up to `steps` may be added up in 16 bits."""
    return (2**15 - 1) // (127 * steps)


def _in_floats(rows, convert):
    """Float weights: tiles of COLUMNS outputs of `rows` rows. convert: from a number of W, or a vector of them, to float32.

    The rows of W in a tile are far from each other, so that each is the next of a long stretch that is read in order. Of
    neighbours the CPU would fetch ahead what has been read already.
    """

    @ti.func
    def products(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), q: ti.template(),
                 y: ti.template(), begin, end, R, K, w_at, scale_at, x_at, x_row, q_at, q_row, depth, y_at, y_row, zero):
        stretch = stretch_of(end - begin, COLUMNS)
        for n in range(begin, ti.min(begin + stretch, end)):
            for r in range(tiles(R, rows)):
                tile(w, x, y, n, stretch, end, r * rows, R, K, w_at, x_at, x_row, y_at, y_row, zero)

    @ti.func
    def tile(w: ti.template(), x: ti.template(), y: ti.template(), n, stretch, end, first, R, K, w_at, x_at, x_row, y_at, y_row,
             zero):
        ns = [ti.min(n + j * stretch, end - 1) for j in ti.static(range(COLUMNS))]
        rs = [ti.min(first + i, R - 1) for i in ti.static(range(rows))]
        acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(COLUMNS))] for _ in ti.static(range(rows))]
        whole, k = K // LANES * LANES, 0
        while k < whole:
            weights = [convert(vector(w, w_at + ns[j] * K + k)) for j in ti.static(range(COLUMNS))]
            for i in ti.static(range(rows)):
                values = vector(x, x_at + rs[i] * x_row + k)
                for j in ti.static(range(COLUMNS)):
                    acc[i][j] += weights[j] * values
            k = (k + LANES) ^ zero       # LLVM cannot count these steps: it would join several and reorder their sums
        for i in ti.static(range(rows)):
            for j in ti.static(range(COLUMNS)):
                total = sum_of(acc[i][j], zero)
                rest = whole
                while rest < K:
                    total += convert(w[w_at + ns[j] * K + rest]) * x[x_at + rs[i] * x_row + rest]
                    rest = (rest + 1) ^ zero
                y[y_at + rs[i] * y_row + ns[j]] = total

    return products


def _in_int8(rows, in_steps):
    """W in int8 and several rows of whole numbers, multiplied in float32, which is exact for EXACT products of a chain. Tiles
    as in _in_floats. in_steps: behind the K numbers of a row of x is its factor, the size of a step."""
    @ti.func
    def products(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), q: ti.template(),
                 y: ti.template(), begin, end, R, K, w_at, scale_at, x_at, x_row, q_at, q_row, depth, y_at, y_row, zero):
        stretch = stretch_of(end - begin, COLUMNS)
        for n in range(begin, ti.min(begin + stretch, end)):
            for r in range(tiles(R, rows)):
                tile(w, scale, x, y, n, stretch, end, r * rows, R, K, w_at, scale_at, x_at, x_row, y_at, y_row, zero)

    @ti.func
    def tile(w: ti.template(), scale: ti.template(), x: ti.template(), y: ti.template(), n, stretch, end, first, R, K, w_at,
             scale_at, x_at, x_row, y_at, y_row, zero):
        ns = [ti.min(n + j * stretch, end - 1) for j in ti.static(range(COLUMNS))]
        rs = [ti.min(first + i, R - 1) for i in ti.static(range(rows))]
        sums = [[ti.Vector([0] * LANES) for _ in ti.static(range(COLUMNS))] for _ in ti.static(range(rows))]
        whole, k = K // LANES * LANES, 0
        while k < whole:
            acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(COLUMNS))] for _ in ti.static(range(rows))]
            for part in range(k // LANES, ti.min(k + EXACT * LANES, whole) // LANES):
                weights = [_from_integers(vector(w, w_at + ns[j] * K + part * LANES)) for j in ti.static(range(COLUMNS))]
                for i in ti.static(range(rows)):
                    values = vector(x, x_at + rs[i] * x_row + part * LANES)
                    for j in ti.static(range(COLUMNS)):
                        acc[i][j] += weights[j] * values
            for i in ti.static(range(rows)):
                for j in ti.static(range(COLUMNS)):
                    sums[i][j] += by_lane(ti.cast, acc[i][j], ti.i32)
            k += EXACT * LANES
        for i in ti.static(range(rows)):
            for j in ti.static(range(COLUMNS)):
                at, row = x_at + rs[i] * x_row, w_at + ns[j] * K
                total = scaled(sums[i][j].sum(), w, row, x, at, whole, K, scale[scale_at + ns[j]], zero)
                if ti.static(in_steps):
                    total *= x[at + K]
                y[y_at + rs[i] * y_row + ns[j]] = total

    return products


@ti.func
def _from_integers(x):
    return by_lane(ti.cast, x, ti.f32)


def _one_row_in_int8(in_steps):
    """One row and W in int8, which is faster in 16 bits: a chain is added up in them for `depth` products."""
    @ti.func
    def products(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), q: ti.template(),
                 y: ti.template(), begin, end, R, K, w_at, scale_at, x_at, x_row, q_at, q_row, depth, y_at, y_row, zero):
        stretch = stretch_of(end - begin, COLUMNS)
        for n in range(begin, ti.min(begin + stretch, end)):
            ns = [ti.min(n + j * stretch, end - 1) for j in ti.static(range(COLUMNS))]
            acc = [[ti.Vector([0] * LANES) for _ in ti.static(range(2))] for _ in ti.static(range(COLUMNS))]
            first_block, blocks = 0, K // WHOLE_16
            while first_block < blocks:
                parts = [[ti.Vector([0] * WIDE, dt=ti.i16) for _ in ti.static(range(CHAINS))]
                         for _ in ti.static(range(COLUMNS))]
                for block in range(first_block, ti.min(blocks, first_block + depth)):
                    for c in ti.static(range(CHAINS)):
                        values = wide(q, q_at + block * WHOLE_16, c * WIDE)
                        for j in ti.static(range(COLUMNS)):
                            weights = by_lane(ti.cast, wide(w, w_at + ns[j] * K + block * WHOLE_16, c * WIDE), ti.i16)
                            parts[j][c] = plus_product(parts[j][c], weights, values)
                for j in ti.static(range(COLUMNS)):
                    for c in ti.static(range(CHAINS)):
                        for half in ti.static(range(2)):
                            acc[j][half] += in_32_bits(parts[j][c], half)
                first_block += depth
            for j in ti.static(range(COLUMNS)):
                whole = (acc[j][0] + acc[j][1]).sum()
                total = scaled(whole, w, w_at + ns[j] * K, q, q_at, blocks * WHOLE_16, K, scale[scale_at + ns[j]], zero)
                if ti.static(in_steps):
                    total *= x[x_at + K]
                y[y_at + ns[j]] = total

    return products


@ti.func
def scaled(whole, w: ti.template(), w_at, x: ti.template(), x_at, done, K, scale, zero):
    """The sum of products of integers, of which those of k < done are in `whole`, times the scale."""
    total, k = whole, done
    while k < K:
        total += ti.cast(w[w_at + k], ti.i32) * ti.cast(x[x_at + k], ti.i32)
        k = (k + 1) ^ zero
    return fixed(ti.cast(total, ti.f32) * scale, zero)


def _in_int4(rows):
    """Integers in groups: the sum over groups of scale step sum(q x) + shift sum(x). A row of x is what `arrange` has made of
    it: whole numbers, and from x_at on the steps and sums of their groups. The rows of W are far from each other, as in
    _in_floats."""
    @ti.func
    def products(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), q: ti.template(),
                 y: ti.template(), begin, end, R, K, w_at, scale_at, x_at, x_row, q_at, q_row, depth, y_at, y_row, zero):
        stretch = stretch_of(end - begin, COLUMNS_4)
        for n in range(begin, ti.min(begin + stretch, end)):
            for r in range(tiles(R, rows)):
                tile(w, scale, shift, x, q, y, n, stretch, end, r * rows, R, K, w_at, scale_at, x_at, x_row, q_at, q_row,
                     y_at, y_row, zero)

    @ti.func
    def tile(w: ti.template(), scale: ti.template(), shift: ti.template(), x: ti.template(), q: ti.template(),
             y: ti.template(), n, stretch, end, first, R, K, w_at, scale_at, x_at, x_row, q_at, q_row, y_at, y_row, zero):
        blocks = tiles(K, BLOCK_4)
        ns = [ti.min(n + j * stretch, end - 1) for j in ti.static(range(COLUMNS_4))]
        at = [x_at + ti.min(first + i, R - 1) * x_row for i in ti.static(range(rows))]
        whole_at = [q_at + ti.min(first + i, R - 1) * q_row for i in ti.static(range(rows))]
        acc = [[ti.Vector([0.0] * LANES) for _ in ti.static(range(COLUMNS_4))] for _ in ti.static(range(rows))]
        for block in range(blocks):
            groups = [(ns[j] * blocks + block) * LANES for j in ti.static(range(COLUMNS_4))]
            parts = [[ti.Vector([0] * WIDE, dt=ti.i16) for _ in ti.static(range(COLUMNS_4))] for _ in ti.static(range(rows))]
            for word in range(WORDS // 2):
                words = [wide(w, w_at + groups[j] * WORDS + word * WIDE) for j in ti.static(range(COLUMNS_4))]
                for m in ti.static(range(4)):
                    weights = [by_lane(ti.cast, words[j] >> (4 * m) & 15, ti.i16) for j in ti.static(range(COLUMNS_4))]
                    for i in ti.static(range(rows)):
                        values = wide(q, whole_at[i] + block * BLOCK_4 + word * 4 * WIDE, m * WIDE)
                        for j in ti.static(range(COLUMNS_4)):
                            parts[i][j] = plus_product(parts[i][j], weights[j], values)
            for i in ti.static(range(rows)):
                steps, of_groups = vector(x, at[i] + block * OF_BLOCK), vector(x, at[i] + block * OF_BLOCK, LANES)
                for j in ti.static(range(COLUMNS_4)):
                    scales = from_bfloat16(vector(scale, scale_at + groups[j]))
                    shifts = from_bfloat16(vector(shift, scale_at + groups[j]))
                    products = by_lane(ti.cast, in_32_bits(parts[i][j], 0) + in_32_bits(parts[i][j], 1), ti.f32)
                    shifted = fixed(shifts * of_groups, zero)
                    acc[i][j] = fixed(acc[i][j] + fixed(fixed(products * steps, zero) * scales + shifted, zero), zero)
        for i in ti.static(range(rows)):
            for j in ti.static(range(COLUMNS_4)):
                y[y_at + ti.min(first + i, R - 1) * y_row + ns[j]] = sum_of(acc[i][j], zero)

    return products


@ti.func
def arrange(x: ti.template(), x_at, q: ti.template(), q_at, y: ti.template(), y_at, K, block, zero):
    """What a product in int4 reads of a block of a row of x (K, a multiple of LANES): in q whole numbers of steps, LARGEST
    for the largest of a group, in the order of the integers of W; in y the steps of the eight groups, and then their sums.
    """
    for group in range(LANES):
        first = block * BLOCK_4 + group * GROUP
        vectors = ti.min(ti.max(K - first, 0), GROUP) // LANES
        largest, sums, top, total = ti.Vector([0.0] * LANES), ti.Vector([0.0] * LANES), SMALLEST, 0.0
        for v in range(vectors):
            values = vector(x, x_at + first + v * LANES)
            largest = ti.max(largest, ti.max(values, 0.0 - values))
        for lane in ti.static(range(LANES)):
            top = ti.max(top, largest[lane])
        for v in range(GROUP // LANES):
            whole = ti.Vector([0.0] * LANES)
            if v < vectors:
                whole = to_whole(vector(x, x_at + first + v * LANES) * (LARGEST / top), zero)
            sums += whole
            for lane in ti.static(range(LANES)):         # element 8 v + lane of the group
                word, half, nibble = v % 2 * 2 + lane // 4, ti.static(lane % 4 // 2), lane % 2 * 2 + v // 2
                place = q_at + block * BLOCK_4 + (word * 4 + nibble) * WIDE + half * LANES + group
                q[place] = ti.cast(whole[lane], ti.i16)
        for lane in ti.static(range(LANES)):
            total += sums[lane]
        y[y_at + block * OF_BLOCK + group] = top / LARGEST
        y[y_at + block * OF_BLOCK + LANES + group] = total * (top / LARGEST)


@ti.func
def stretch_of(size, columns):
    """How many rows of W apart the rows of a tile are, of `size` rows. Odd: stretches that are a large power of two apart would
    compete for the same places of the caches."""
    return tiles(size, columns) | 1


@ti.func
def tiles(size, tile):
    return (size + tile - 1) // tile


@ti.func
def vector(array: ti.template(), at, beyond: ti.template() = 0):
    """The elements from at + beyond on; vectors that differ in `beyond` alone share the computation of their addresses."""
    return ti.Vector([array[(at & INDEX) + beyond + lane] for lane in ti.static(range(LANES))])


@ti.func
def wide(array: ti.template(), at, beyond: ti.template() = 0):
    """The same for WIDE elements."""
    return ti.Vector([array[(at & INDEX) + beyond + lane] for lane in ti.static(range(WIDE))])


@ti.func
def plus_product(total, a, b):
    """total + a b, all in 16 bits."""
    return by_lane(ti.cast, total + by_lane(ti.cast, a * b, ti.i16), ti.i16)


@ti.func
def in_32_bits(v, half: ti.template()):
    """The first or the second half of WIDE integers."""
    return ti.Vector([ti.cast(v[half * LANES + lane], ti.i32) for lane in ti.static(range(LANES))])


@ti.func
def to_whole(x, zero):
    """x rounded to whole numbers, a half to the even one."""
    return fixed(x + TO_EVEN, zero) - TO_EVEN


@ti.func
def sum_of(v, zero):
    """The sum of the lanes, in the one order that is written here.

    zero: 0, which the compiler does not know. LLVM may reorder a sum of more than two terms, and does so by what is around it;
    it does not look through an integer operation.
    """
    fours = fixed(part_of(v, 0, 4) + part_of(v, 4, 4), zero)
    twos = fixed(part_of(fours, 0, 2) + part_of(fours, 2, 2), zero)
    return fixed(twos[0] + twos[1], zero)


@ti.func
def part_of(v, first: ti.template(), size: ti.template()):
    return ti.Vector([v[first + lane] for lane in ti.static(range(size))])


@ti.func
def fixed(x, zero):
    """x, a number or a vector, as LLVM cannot see through."""
    return by_lane(ti.bit_cast, by_lane(ti.bit_cast, x, ti.i32) ^ zero, ti.f32)


@cache
def products_of(form, rows, whole_numbers=False):
    """The function that computes the outputs y[r,n] of begin <= n < end for R rows of x.

    form: of W. rows: 1 for one row of x, else ROWS. whole_numbers: y in int8 lacks the factor of its row of x, the size of a
    step. w_at, scale_at, x_at, q_at, y_at: where W (N,K), its scales, x and y begin in the arrays. x_row, q_row, y_row: from
    one row to the next. x: its elements; in int8 whole numbers, with the size of a step behind them; in int4 the y of
    `arrange`. q: the whole numbers in 16 bits, in int8 and int4. depth: in int8, products_in_16_bits. zero: 0, see sum_of.
    """
    if form == "int4":
        return _in_int4(rows)
    if form == "int8":
        return _one_row_in_int8(not whole_numbers) if rows == 1 else _in_int8(rows, not whole_numbers)
    return _in_floats(rows, as_it_is if form == "float32" else from_bfloat16)
