"""The whole program in one launch: threads take the tiles of an instruction from a counter and wait for each other by spinning.

A barrier costs below 1 us where starting a kernel costs 100 to 300. A thread that the system has stopped delays the others only
by the tile that it holds. The weights stay where they are: a launch reads those that 32-bit indices reach from the first of
them in memory, and a larger program takes several launches.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
# ruff: noqa: SIM102, SIM108  a static condition decides what is compiled, and stands by itself
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends.lanes import as_it_is, by_lane, exp, exp_of_any, from_bfloat16, sigmoid, tanh, to_bfloat16
from kernels.backends.taichi import BLOCK, INDEX, NUMEL_MAX, launch, ti
from kernels.decoding import FASTEST_LOG_W, LEAST_NORM, PART, Instruction, Program, Run, Wkv4, Wkv7
from kernels.matvec import FORMS, SMALLEST, Packed
from kernels.matvec._products import (
    BLOCK_4,
    LANES,
    MATRIX,
    ROWS,
    SCALES,
    Floats,
    Halves,
    arrange,
    fixed,
    products_in_16_bits,
    products_of,
    sum_of,
    tiles,
    to_whole,
    vector,
)
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))

WIDTH = 24                               # of an instruction in the code: its number, its tiles for each row, its arguments
NAMES = ("norm", "mix", "product", "down", "up", "map", "add", "wkv4", "wkv7", "round", "arrange", "halve")
NORM, MIX, PRODUCT, DOWN, UP, MAP, ADD, WKV4, WKV7, ROUND, ARRANGE, HALVE = range(len(NAMES))      # in the code
OF_4, OF_7 = Wkv4(*range(len(Wkv4._fields))), Wkv7(*range(len(Wkv7._fields)))            # the places of their arguments
AFTER_4, AFTER_7 = len(OF_4), len(OF_7)  # the place of what follows them: the width; the heads and N
WIDTH_AT = {"mix": 3, "map": 1, "add": 2, "wkv4": AFTER_4, "halve": 2}       # the argument that is the width of the registers
CHANNELS = 128                           # of a tile of what is computed channel by channel
PARTS = 8                                # tiles of a product for each thread: of fewer, the last keeps the others waiting
EXPONENT = 0x7F800000                    # of a float32: all ones in NaN and infinity
APART = 16                               # integers between two counters, so that no two are in one cache line
Integers = ti.types.ndarray(dtype=ti.i32, ndim=1)


def bind(program: Program, form: str) -> Run:
    launches = launches_of(_within_reach(program), program, form)

    def run(registers: Tensor) -> None:
        for start in launches:
            start(registers)

    return run


def launches_of(parts: list[list[Instruction]], program: Program, form: str, threads: int | None = None) -> list[Run]:
    """Functions that carry out the parts of a program, one launch each.

    threads: all by default. One is the caller's own, which wakes no other: 15 us instead of 90.
    """
    threads = threads or torch.get_num_threads()
    constants, matrices, tiles = program.constants(), program.matrices(), PARTS * threads
    small_form = str(matrices.dtype).removeprefix("torch.")
    used = frozenset(each.name for part in parts for each in part)
    N7 = next((each.arguments[-1] for part in parts for each in part if each.name == "wkv7"), 0)
    nothing, whole = torch.zeros(1, dtype=FORMS[form]), torch.zeros(1, dtype=torch.int16)

    def start(part: Part, registers: Tensor) -> None:
        nonlocal whole
        R = len(registers)
        if len(whole) < R * program.whole_size:
            whole = torch.zeros(R * program.whole_size, dtype=torch.int16)
        part.counters.zero_()
        first = nothing if part.first is None else part.first
        kernel = _kernel(form, small_form, used, N7, 1 if R == 1 else ROWS, threads == 1)
        launch(kernel, first, part.scale, part.shift, constants, matrices, registers.view(-1), whole, part.code,
               part.counters, len(part.code) // WIDTH, program.size, program.whole_size, R, tiles, threads)

    return [partial(start, _launch_of(part, program.weights, tiles)) for part in parts]


def parts_of(program: Program, tiles: int) -> list["Part"]:
    """The program in parts that one launch each carries out. tiles: of a product."""
    return [_launch_of(part, program.weights, tiles) for part in _within_reach(program)]


class Part(NamedTuple):
    """A part of a program. first: of its weights, the one that is first in memory; code: int32, WIDTH for an instruction."""

    first: Tensor | None
    scale: Tensor
    shift: Tensor
    code: Tensor
    counters: Tensor
    weights: list[Packed]                # which must live as long


def _within_reach(program: Program) -> list[list[Instruction]]:
    """The instructions in parts whose weights are near each other."""
    parts: list[list[Instruction]] = [[]]
    span: range | None = None            # of the addresses of the weights of the last part
    for instruction in program.instructions:
        if instruction.name == "product":
            weight = program.weights[instruction.arguments[-1]].weight
            own = range(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
            span = own if span is None else range(min(span.start, own.start), max(span.stop, own.stop))
            if len(span) // weight.itemsize >= NUMEL_MAX:
                parts.append([])
                span = own
        parts[-1].append(instruction)
    return parts


def _launch_of(instructions: list[Instruction], weights: list[Packed], parts: int) -> Part:
    used = [weights[each.arguments[-1]] for each in instructions if each.name == "product"]
    first = min((packed.weight for packed in used), key=Tensor.data_ptr, default=None)
    code = torch.zeros(len(instructions), WIDTH, dtype=torch.int32)
    scale_at = 0
    for row, (name, arguments) in zip(code, instructions, strict=True):
        numbers = list(arguments)
        if name == "product":
            packed = weights[numbers.pop()]
            depth, offset = 0, 0
            if packed.form == "int8":
                steps, signed = (round(number) for number in packed.shift.tolist())
                depth, offset = products_in_16_bits(steps), signed * (steps + 1)
            numbers += [_elements_between(first, packed.weight), scale_at, depth, offset]
            scale_at += packed.scale.numel()
        full = torch.tensor([NAMES.index(name), _tiles_of(name, arguments, parts), *numbers], dtype=torch.int32)
        row[:len(full)] = full
    joined = [torch.cat([getattr(packed, name).flatten() for packed in used]) if used else torch.zeros(0)
              for name in ("scale", "shift")]
    counters = torch.zeros(2 * APART * len(instructions), dtype=torch.int32)
    return Part(None if first is None else first.view(-1), joined[0], joined[1], code.flatten(), counters, used)


def _elements_between(first: Tensor | None, weight: Tensor) -> int:
    assert first is not None
    return (weight.data_ptr() - first.data_ptr()) // weight.itemsize


def _tiles_of(name: str, arguments: tuple[int, ...], parts: int) -> int:
    """The tiles of an instruction; for each row, but those of a product are for all rows."""
    if name in ("product", "down", "up"):
        outputs = -(-arguments[2] // PART) if name == "up" else arguments[2]
        return -(-outputs // -(-outputs // parts))
    if name == "wkv7":
        return arguments[-2]             # heads
    if name == "arrange":
        return -(-arguments[2] // BLOCK_4)
    return 1 if name in ("norm", "round") else -(-arguments[WIDTH_AT[name]] // CHANNELS)


@cache
def _kernel(form: str, small_form: str, used: frozenset[str], N7: int, rows: int, serial: bool):
    """The kernel for programs of these instructions: what a program does not use is not compiled.

    small_form: of the matrices of down and up. N7: N of wkv7. rows: that share weights. serial: by the calling thread alone.
    """
    has = [name in used for name in NAMES]
    x_of = 6 if form == "int4" else 2    # where an instruction says what a product reads: what `arrange` has written, or x
    stored, scales, small = MATRIX[form], SCALES[form], MATRIX[small_form]
    products, down, up = products_of(form, rows), products_of(small_form, rows), _columns_of(small_form, rows)

    @ti.kernel
    def kernel(w: stored, scale: scales, shift: scales, c: Floats, m: small, g: Floats, q: Halves, code: Integers,
               counters: Integers, count: int, size: int, q_size: int, R: int, parts: int, n: int):
        ti.loop_config(serialize=serial)
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                for i in range(count):
                    at, name = i * WIDTH, code[i * WIDTH]
                    total = code[at + 1]
                    if name != PRODUCT and name != DOWN and name != UP:
                        total *= R
                    tile = ti.atomic_add(counters[2 * i * APART], 1)
                    while tile < total:
                        if ti.static(has[NORM]):
                            if name == NORM:
                                _norm(c, g, code, at + 2, tile, size, R)
                        if ti.static(has[MIX]):
                            if name == MIX:
                                _mix(c, g, code, at + 2, tile, size, code[at + 1])
                        if ti.static(has[PRODUCT]):
                            if name == PRODUCT:
                                N, K, w_at, scale_at = code[at + 4], code[at + 5], code[at + 8], code[at + 9]
                                x_at, q_at, y_at, depth = code[at + x_of], code[at + 7], code[at + 3], code[at + 10]
                                begin, end = tile * tiles(N, parts), ti.min(N, (tile + 1) * tiles(N, parts))
                                products(w, scale, shift, g, q, g, begin, end, R, K, w_at, scale_at, x_at, size,
                                         q_at, q_size, depth, y_at, size, R >> 30)
                        if ti.static(has[DOWN]):
                            if name == DOWN:
                                N, K = code[at + 4], code[at + 5]
                                begin, end = tile * tiles(N, parts), ti.min(N, (tile + 1) * tiles(N, parts))
                                down(m, c, c, g, q, g, begin, end, R, K, code[at + 6], 0, code[at + 2], size,
                                     0, 0, 0, code[at + 3], size, R >> 30)
                        if ti.static(has[UP]):
                            if name == UP:
                                N, K = tiles(code[at + 4], PART), code[at + 5]
                                for part in range(tile * tiles(N, parts), ti.min(N, (tile + 1) * tiles(N, parts))):
                                    for r in range(tiles(R, rows)):
                                        up(m, g, g, part, r * rows, R, K, code[at + 6], code[at + 2], size, code[at + 3], size,
                                           R >> 30)
                        if ti.static(has[MAP]):
                            if name == MAP:
                                _map(g, code, at + 2, tile, size, code[at + 1])
                        if ti.static(has[ADD]):
                            if name == ADD:
                                _add(g, code, at + 2, tile, size, code[at + 1])
                        if ti.static(has[WKV4]):
                            if name == WKV4:
                                _wkv4(c, g, code, at + 2, tile, size, code[at + 1])
                        if ti.static(has[WKV7]):
                            if name == WKV7:
                                _wkv7(c, g, code, at + 2, tile, size, R, code[at + 1], N7 // LANES)
                        if ti.static(has[ROUND]):
                            if name == ROUND:
                                _round(g, q, code, at + 2, tile, size, q_size, R)
                        if ti.static(has[ARRANGE]):
                            if name == ARRANGE:
                                _arrange(g, q, code, at + 2, tile, size, q_size, code[at + 1], R)
                        if ti.static(has[HALVE]):
                            if name == HALVE:
                                _halve(g, code, at + 2, tile, size, code[at + 1])
                        ti.atomic_add(counters[(2 * i + 1) * APART], 1)
                        tile = ti.atomic_add(counters[2 * i * APART], 1)
                    while ti.atomic_add(counters[(2 * i + 1) * APART], 0) < total:
                        pass

    return kernel


@cache
def _columns_of(form, rows):
    """The function that computes the PART outputs y[r,n] of part n // PART.

    W (N,K) of few columns is stored in such parts, (N/PART,K,PART), so that no sum crosses the lanes. The other arguments are
    those of products_of.
    """
    convert = as_it_is if form == "float32" else from_bfloat16

    @ti.func
    def columns(w: ti.template(), x: ti.template(), y: ti.template(), part, first, R, K, w_at, x_at, x_row, y_at, y_row, zero):
        at = [x_at + ti.min(first + i, R - 1) * x_row for i in ti.static(range(rows))]
        acc = [ti.Vector([0.0] * LANES) for _ in ti.static(range(rows * PART // LANES))]
        for k in range(K):
            for c in ti.static(range(PART // LANES)):
                weights = convert(vector(w, w_at + (part * K + k) * PART, c * LANES))
                for i in ti.static(range(rows)):
                    acc[i * PART // LANES + c] = fixed(acc[i * PART // LANES + c] + weights * x[at[i] + k], zero)
        for i in ti.static(range(rows)):
            for c in ti.static(range(PART // LANES)):
                for lane in ti.static(range(LANES)):
                    n = part * PART + c * LANES + lane
                    y[y_at + ti.min(first + i, R - 1) * y_row + n] = acc[i * PART // LANES + c][lane]

    return columns


@ti.func
def _norm(c: ti.template(), g: ti.template(), code: ti.template(), at, row, size, R):
    """A tile is a row."""
    width = code[at + 2]
    x, y = row * size + code[at], row * size + code[at + 1]
    sums = ti.Vector([0.0] * LANES)
    if code[at + 6] >= 0:
        added = row * size + code[at + 6]
        for j in range(width // LANES):
            now = vector(g, x + j * LANES) + vector(g, added + j * LANES)
            _store(g, x + j * LANES, now)
            sums += now
    else:
        for j in range(width // LANES):
            sums += vector(g, x + j * LANES)
    mean = sum_of(sums, R >> 30) / width
    squares = ti.Vector([0.0] * LANES)
    for j in range(width // LANES):
        away = vector(g, x + j * LANES) - mean
        squares += away * away
    factor = 1.0 / ti.sqrt(sum_of(squares, R >> 30) / width + c[code[at + 5]])
    for j in range(width // LANES):
        normal = (vector(g, x + j * LANES) - mean) * factor
        _store(g, y + j * LANES, normal * vector(c, code[at + 3] + j * LANES) + vector(c, code[at + 4] + j * LANES))


@ti.func
def _round(g: ti.template(), q: ti.template(), code: ti.template(), at, row, size, q_size, R):
    """A tile is a row."""
    width, steps = code[at + 2], ti.cast(code[at + 4], ti.f32)
    x, y, whole_at = row * size + code[at], row * size + code[at + 1], row * q_size + code[at + 6]
    largest = ti.Vector([0.0] * LANES)
    for j in range(width // LANES):
        values = vector(g, x + j * LANES)
        if code[at + 5] == 1:
            largest = ti.max(largest, ti.max(values, 0.0 - values))
        else:
            largest = ti.max(largest, values)
    top = SMALLEST
    for lane in ti.static(range(LANES)):
        top = ti.max(top, largest[lane])
    wholes = ti.Vector([0.0] * LANES)
    for j in range(width // LANES):
        whole = to_whole(vector(g, x + j * LANES) / top * steps, R >> 30)
        _store(g, y + j * LANES, whole)
        _store(q, whole_at + j * LANES, by_lane(ti.cast, whole, ti.i16))
        wholes += whole
    total = sum_of(wholes, R >> 30)
    finite = ti.bit_cast(total, ti.i32) & EXPONENT != EXPONENT       # max drops a NaN that it meets
    g[row * size + code[at + 3]] = top / steps if finite else total


@ti.func
def _arrange(g: ti.template(), q: ti.template(), code: ti.template(), at, tile, size, q_size, blocks, R):
    """A tile is a block of a row."""
    row, width = tile // blocks, code[at + 2]
    arrange(g, row * size + code[at], q, row * q_size + code[at + 3], g, row * size + code[at + 1], width, tile % blocks,
            R >> 30)


@ti.func
def _halve(g: ti.template(), code: ti.template(), at, tile, size, parts):
    row, first = tile // parts, tile % parts * CHANNELS
    for j in range(ti.min(code[at + 2] - first, CHANNELS) // LANES):
        own = row * size + first + j * LANES
        _store(g, code[at + 1] + own, from_bfloat16(to_bfloat16(vector(g, code[at] + own))))


@ti.func
def _mix(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, size, parts):
    width, n, shares = code[at + 3], code[at + 4], code[at + 5]
    row, first = tile // parts, tile % parts * CHANNELS
    for j in range(ti.min(width - first, CHANNELS) // LANES):
        channel = first + j * LANES
        own = row * size + channel
        last = vector(g, code[at + 1] + own)
        x = vector(g, code[at] + own)
        away = x - last
        for i in range(n):
            _store(g, code[at + 2] + i * width + own, last + away * vector(c, shares + i * width + channel))
        _store(g, code[at + 1] + own, x)


@ti.func
def _map(g: ti.template(), code: ti.template(), at, tile, size, parts):
    width, function = code[at + 1], code[at + 2]
    row, first = tile // parts, tile % parts * CHANNELS
    for j in range(ti.min(width - first, CHANNELS) // LANES):
        place = row * size + code[at] + first + j * LANES
        y = vector(g, place)
        if function == 0:
            y = tanh(y)
        elif function == 1:
            y = sigmoid(y)
        else:
            y = ti.max(y, 0.0) * ti.max(y, 0.0)
        _store(g, place, y)


@ti.func
def _add(g: ti.template(), code: ti.template(), at, tile, size, parts):
    width, gate = code[at + 2], code[at + 3]
    row, first = tile // parts, tile % parts * CHANNELS
    for j in range(ti.min(width - first, CHANNELS) // LANES):
        own = row * size + first + j * LANES
        y = vector(g, code[at + 1] + own)
        if gate >= 0:
            y *= sigmoid(vector(g, gate + own))
        _store(g, code[at] + own, vector(g, code[at] + own) + y)


@ti.func
def _wkv4(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, size, parts):
    width = code[at + AFTER_4]
    row, first = tile // parts, tile % parts * CHANNELS
    for j in range(ti.min(width - first, CHANNELS) // LANES):
        channel = first + j * LANES
        own = row * size + channel
        a_at, b_at, p_at = code[at + OF_4.a] + own, code[at + OF_4.b] + own, code[at + OF_4.p] + own
        k, v, r = (vector(g, code[at + OF_4.k] + own), vector(g, code[at + OF_4.v] + own),
                   vector(g, code[at + OF_4.r] + own))
        a, b, p = vector(g, a_at), vector(g, b_at), vector(g, p_at)
        w, u = vector(c, code[at + OF_4.w] + channel), vector(c, code[at + OF_4.u] + channel)
        top = ti.max(p, u + k)
        past, now = exp_of_any(p - top), exp_of_any(u + k - top)
        _store(g, code[at + OF_4.y] + own, sigmoid(r) * (past * a + now * v) / (past * b + now))
        top = ti.max(p + w, k)
        past, now = exp_of_any(p + w - top), exp_of_any(k - top)
        _store(g, a_at, past * a + now * v)
        _store(g, b_at, past * b + now)
        _store(g, p_at, top)


@ti.func
def _wkv7(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, size, R, heads, vectors: ti.template()):
    """A tile is a head of a row. z, rate, k and v become the decay, b, the key and the value; kk becomes a."""
    N = ti.static(vectors * LANES)
    row, channel = tile // heads * size, tile % heads * N
    own = row + channel
    r_at, k_at, v_at = code[at + OF_7.r] + own, code[at + OF_7.k] + own, code[at + OF_7.v] + own
    z_at, rate_at, g_at = code[at + OF_7.z] + own, code[at + OF_7.rate] + own, code[at + OF_7.g] + own
    gate_at, first_at = code[at + OF_7.gate] + own, code[at + OF_7.v_first] + own
    state_at, kk_at, y_at = code[at + OF_7.state] + row + channel * N, code[at + OF_7.kk] + own, code[at + OF_7.y] + own
    w0, a0, v0 = code[at + OF_7.w0] + channel, code[at + OF_7.a0] + channel, code[at + OF_7.v0] + channel
    k_k, k_a, r_k = code[at + OF_7.k_k] + channel, code[at + OF_7.k_a] + channel, code[at + OF_7.r_k] + channel
    weight, bias = code[at + OF_7.weight] + channel, code[at + OF_7.bias] + channel
    squares, shares = ti.Vector([0.0] * LANES), ti.Vector([0.0] * LANES)
    for i in range(N // LANES):
        j = i * LANES
        k, v = vector(g, k_at + j), vector(g, v_at + j)
        rate = sigmoid(vector(c, a0 + j) + vector(g, rate_at + j))
        _store(g, rate_at + j, rate)
        _store(g, z_at + j, exp(FASTEST_LOG_W * sigmoid(vector(c, w0 + j) + vector(g, z_at + j))))
        if code[at + OF_7.gate] >= 0:
            v += (vector(g, first_at + j) - v) * sigmoid(vector(c, v0 + j) + vector(g, gate_at + j))
            _store(g, v_at + j, v)
        else:
            _store(g, first_at + j, v)
        kk = k * vector(c, k_k + j)
        squares += kk * kk
        k *= 1.0 + (rate - 1.0) * vector(c, k_a + j)
        shares += vector(g, r_at + j) * k * vector(c, r_k + j)
        _store(g, k_at + j, k)
        _store(g, kk_at + j, kk)
    factor, share = 1.0 / ti.max(ti.sqrt(sum_of(squares, R >> 30)), LEAST_NORM), sum_of(shares, R >> 30)
    for i in range(N // LANES):
        j = i * LANES
        kk = vector(g, kk_at + j) * factor
        _store(g, kk_at + j, 0.0 - kk)
        _store(g, rate_at + j, vector(g, rate_at + j) * kk)
    _state_and_y(g, state_at, z_at, kk_at, rate_at, k_at, v_at, r_at, y_at, vectors, R)
    totals = ti.Vector([0.0] * LANES)
    for i in range(N // LANES):
        totals += vector(g, y_at + i * LANES)
    mean, squares_away = sum_of(totals, R >> 30) / N, ti.Vector([0.0] * LANES)
    for i in range(N // LANES):
        away = vector(g, y_at + i * LANES) - mean
        squares_away += away * away
    scale = 1.0 / ti.sqrt(sum_of(squares_away, R >> 30) / N + c[code[at + OF_7.eps]])
    for i in range(N // LANES):
        j = i * LANES
        normal = (vector(g, y_at + j) - mean) * scale * vector(c, weight + j) + vector(c, bias + j)
        _store(g, y_at + j, (normal + share * vector(g, v_at + j)) * vector(g, g_at + j))


@ti.func
def _state_and_y(g: ti.template(), state_at, w_at, a_at, b_at, k_at, v_at, r_at, y_at, vectors: ti.template(), R):
    """kernels/wkv7's step for one head: S w + (S a) b + v k, and y = S r, row by row, of so many vectors.

    A row is stored only after all of it is read: after a store, LLVM reads the arrays' addresses from memory again.
    """
    for i in range(vectors * LANES):
        row = state_at + i * vectors * LANES
        state = [vector(g, row, j * LANES) for j in ti.static(range(vectors))]
        sums = [ti.Vector([0.0] * LANES) for _ in ti.static(range(8))]
        for j in ti.static(range(vectors)):
            sums[j % 4] += state[j] * vector(g, a_at, j * LANES)
        sa, v = sum_of(sums[0] + sums[1] + (sums[2] + sums[3]), R >> 30), g[v_at + i]
        for j in ti.static(range(vectors)):
            state[j] = state[j] * vector(g, w_at, j * LANES) + sa * vector(g, b_at, j * LANES) + v * vector(g, k_at, j * LANES)
            sums[4 + j % 4] += state[j] * vector(g, r_at, j * LANES)
        for j in ti.static(range(vectors)):
            _store(g, row, state[j], j * LANES)
        g[y_at + i] = sum_of(sums[4] + sums[5] + (sums[6] + sums[7]), R >> 30)


@ti.func
def _store(g: ti.template(), at, values, beyond: ti.template() = 0):
    for lane in ti.static(range(LANES)):
        g[(at & INDEX) + (beyond + lane)] = values[lane]
