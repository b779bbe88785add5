"""The whole program in one launch: threads take the tiles of an instruction from a counter and wait for each other by spinning.

A barrier costs below 1 us where starting a kernel costs 100 to 300. A thread that the system has stopped delays the others only
by the tile that it holds. The weights stay where they are: a launch reads those that 32-bit indices reach from the first of
them in memory, and a larger program takes several launches.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
# ruff: noqa: SIM102  a static condition decides what is compiled, and stands by itself
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends.products import (
    ARRANGED,
    BLOCK_4,
    LANES,
    MATRIX,
    ROWS,
    SCALES,
    Floats,
    arrange,
    sum_of,
    sums_of,
    tiles,
    vector,
)
from kernels.backends.taichi import BLOCK, INDEX, NUMEL_MAX, launch, ti
from kernels.decoding import FASTEST_LOG_W, LEAST_NORM, Instruction, Program, Wkv4, Wkv7
from kernels.matvec import FORMS, SMALLEST, Packed
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",),
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int32))

WIDTH = 24                               # of an instruction in the code: its number, its tiles for each row, its arguments
NAMES = ("norm", "mix", "product", "small_product", "map", "add", "wkv4", "wkv7", "round", "arrange")
NORM, MIX, PRODUCT, SMALL_PRODUCT, MAP, ADD, WKV4, WKV7, ROUND, ARRANGE = range(len(NAMES))       # as they stand in the code
OF_4, OF_7 = Wkv4(*range(len(Wkv4._fields))), Wkv7(*range(len(Wkv7._fields)))            # the places of their arguments
AFTER_4, AFTER_7 = len(OF_4), len(OF_7)  # the place of what follows them: the width; the heads and N
WIDTH_AT = {"mix": 3, "map": 1, "add": 2, "wkv4": AFTER_4}       # the argument that is the width of the registers
CHANNELS = 128                           # of a tile of what is computed channel by channel
PARTS = 8                                # tiles of a product for each thread: of fewer, the last keeps the others waiting
APART = 16                               # integers between two counters, so that no two are in one cache line
Integers = ti.types.ndarray(dtype=ti.i32, ndim=1)


def bind(program: Program, form: str) -> Callable[[Tensor, int], None]:
    constants, parts = program.constants(), PARTS * torch.get_num_threads()
    launches = [_launch_of(part, program.weights, parts) for part in _within_reach(program)]
    nothing = torch.zeros(1, dtype=FORMS[form])

    used = frozenset(instruction.name for instruction in program.instructions)

    def run(registers: Tensor, R: int) -> None:
        kernel = _kernel(form, used, 1 if R == 1 else ROWS)
        for part in launches:
            part.counters.zero_()
            first = nothing if part.first is None else part.first
            launch(kernel, first, part.scale, part.shift, constants, registers, part.code, part.counters,
                   len(part.code) // WIDTH, R, parts, torch.get_num_threads())

    return run


class _Launch(NamedTuple):
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


def _launch_of(instructions: list[Instruction], weights: list[Packed], parts: int) -> _Launch:
    used = [weights[each.arguments[-1]] for each in instructions if each.name == "product"]
    first = min((packed.weight for packed in used), key=Tensor.data_ptr, default=None)
    code = torch.zeros(len(instructions), WIDTH, dtype=torch.int32)
    scale_at = 0
    for row, (name, arguments) in zip(code, instructions, strict=True):
        numbers = list(arguments)
        if name == "product":
            weight, scale, _ = weights[numbers.pop()]
            numbers += [_elements_between(first, weight), scale_at]
            scale_at += scale.numel()
        full = torch.tensor([NAMES.index(name), _tiles_of(name, arguments, parts), *numbers], dtype=torch.int32)
        row[:len(full)] = full
    joined = [torch.cat([getattr(packed, name).flatten() for packed in used]) if used else torch.zeros(0)
              for name in ("scale", "shift")]
    counters = torch.zeros(2 * APART * len(instructions), dtype=torch.int32)
    return _Launch(None if first is None else first.view(-1), joined[0], joined[1], code.flatten(), counters, used)


def _elements_between(first: Tensor | None, weight: Tensor) -> int:
    assert first is not None
    return (weight.data_ptr() - first.data_ptr()) // weight.itemsize


def _tiles_of(name: str, arguments: tuple[int, ...], parts: int) -> int:
    """The tiles of an instruction; for each row, but those of a product are for all rows."""
    if name in ("product", "small_product"):
        rows = -(-arguments[2] // parts)
        return -(-arguments[2] // rows)
    if name == "wkv7":
        return arguments[-2]             # heads
    if name == "arrange":
        return -(-arguments[2] // BLOCK_4)
    return 1 if name in ("norm", "round") else -(-arguments[WIDTH_AT[name]] // CHANNELS)


@cache
def _kernel(form: str, used: frozenset[str], rows: int):
    """The kernel for programs of these instructions: what a program does not use is not compiled. rows: that share weights."""
    has = [name in used for name in NAMES]
    stored, scales, sums, small_sums = MATRIX[form], SCALES[form], sums_of(form, rows), sums_of("float32", rows)

    @ti.kernel
    def kernel(w: stored, scale: scales, shift: scales, c: Floats, g: Floats, code: Integers, counters: Integers,
               count: int, R: int, parts: int, n: int):
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                for i in range(count):
                    at, name = i * WIDTH, code[i * WIDTH]
                    total = code[at + 1]
                    if name != PRODUCT and name != SMALL_PRODUCT:
                        total *= R
                    tile = ti.atomic_add(counters[2 * i * APART], 1)
                    while tile < total:
                        if ti.static(has[NORM]):
                            if name == NORM:
                                _norm(c, g, code, at + 2, tile, R)
                        if ti.static(has[MIX]):
                            if name == MIX:
                                _mix(c, g, code, at + 2, tile, R, code[at + 1])
                        if ti.static(has[PRODUCT]):
                            if name == PRODUCT:
                                N, K = code[at + 4], code[at + 5]
                                for row in range(tile * tiles(N, parts), ti.min(N, (tile + 1) * tiles(N, parts))):
                                    for r in range(tiles(R, rows)):
                                        sums(w, scale, shift, g, g, row, r * rows, R, N, K, code[at + 7], code[at + 8],
                                             code[at + 2] * R, code[at + 6] * R, code[at + 3] * R, R >> 30)
                        if ti.static(has[SMALL_PRODUCT]):
                            if name == SMALL_PRODUCT:
                                N, K = code[at + 4], code[at + 5]
                                for row in range(tile * tiles(N, parts), ti.min(N, (tile + 1) * tiles(N, parts))):
                                    for r in range(tiles(R, rows)):
                                        small_sums(c, c, c, g, g, row, r * rows, R, N, K, code[at + 6], 0,
                                                   code[at + 2] * R, 0, code[at + 3] * R, R >> 30)
                        if ti.static(has[MAP]):
                            if name == MAP:
                                _map(g, code, at + 2, tile, R, code[at + 1])
                        if ti.static(has[ADD]):
                            if name == ADD:
                                _add(g, code, at + 2, tile, R, code[at + 1])
                        if ti.static(has[WKV4]):
                            if name == WKV4:
                                _wkv4(c, g, code, at + 2, tile, R, code[at + 1])
                        if ti.static(has[WKV7]):
                            if name == WKV7:
                                _wkv7(c, g, code, at + 2, tile, R, code[at + 1])
                        if ti.static(has[ROUND]):
                            if name == ROUND:
                                _round(g, code, at + 2, tile, R)
                        if ti.static(has[ARRANGE]):
                            if name == ARRANGE:
                                _arrange(g, code, at + 2, tile, R, code[at + 1])
                        ti.atomic_add(counters[(2 * i + 1) * APART], 1)
                        tile = ti.atomic_add(counters[2 * i * APART], 1)
                    while ti.atomic_add(counters[(2 * i + 1) * APART], 0) < total:
                        pass

    return kernel


@ti.func
def _norm(c: ti.template(), g: ti.template(), code: ti.template(), at, row, R):
    """A tile is a row."""
    width = code[at + 2]
    x, y = code[at] * R + row * width, code[at + 1] * R + row * width
    if code[at + 6] >= 0:
        added = code[at + 6] * R + row * width
        for j in range(width // LANES):
            for lane in ti.static(range(LANES)):
                g[(x + j * LANES & INDEX) + lane] += g[(added + j * LANES & INDEX) + lane]
    sums = ti.Vector([0.0] * LANES)
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
        normal = normal * vector(c, code[at + 3] + j * LANES) + vector(c, code[at + 4] + j * LANES)
        for lane in ti.static(range(LANES)):
            g[(y + j * LANES & INDEX) + lane] = normal[lane]


@ti.func
def _round(g: ti.template(), code: ti.template(), at, row, R):
    """A tile is a row."""
    width, steps = code[at + 2], ti.cast(code[at + 4], ti.f32)
    x, y = code[at] * R + row * width, code[at + 1] * R + row * width
    largest = ti.Vector([0.0] * LANES)
    for j in range(width // LANES):
        values = vector(g, x + j * LANES)
        if code[at + 5] == 1:
            largest = ti.Vector([ti.max(largest[lane], abs(values[lane])) for lane in ti.static(range(LANES))])
        else:
            largest = ti.Vector([ti.max(largest[lane], values[lane]) for lane in ti.static(range(LANES))])
    top = SMALLEST
    for lane in ti.static(range(LANES)):
        top = ti.max(top, largest[lane])
    for j in range(width // LANES):
        whole = vector(g, x + j * LANES) / top * steps
        for lane in ti.static(range(LANES)):
            g[(y + j * LANES & INDEX) + lane] = ti.round(whole[lane])
    g[code[at + 3] * R + row * LANES] = top / steps


@ti.func
def _arrange(g: ti.template(), code: ti.template(), at, tile, R, blocks):
    """A tile is a block of a row."""
    row, width = tile // blocks, code[at + 2]
    arrange(g, code[at] * R + row * width, g, code[at + 1] * R + row * blocks * ARRANGED, width, tile % blocks)


@ti.func
def _mix(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, R, parts):
    width, n, shares = code[at + 3], code[at + 4], code[at + 5]
    row, first = tile // parts, tile % parts * CHANNELS
    for channel in range(first, ti.min(width, first + CHANNELS)):
        own = row * width + channel
        x, last = g[code[at] * R + own], g[code[at + 1] * R + own]
        for i in range(n):
            g[(code[at + 2] + i * width) * R + own] = last + (x - last) * c[shares + i * width + channel]
        g[code[at + 1] * R + own] = x


@ti.func
def _map(g: ti.template(), code: ti.template(), at, tile, R, parts):
    width, function = code[at + 1], code[at + 2]
    row, first = tile // parts, tile % parts * CHANNELS
    for channel in range(first, ti.min(width, first + CHANNELS)):
        place = code[at] * R + row * width + channel
        y = g[place]
        if function == 0:
            y = ti.tanh(y)
        elif function == 1:
            y = _sigmoid(y)
        else:
            y = ti.max(y, 0.0) * ti.max(y, 0.0)
        g[place] = y


@ti.func
def _add(g: ti.template(), code: ti.template(), at, tile, R, parts):
    width, gate = code[at + 2], code[at + 3]
    row, first = tile // parts, tile % parts * CHANNELS
    for channel in range(first, ti.min(width, first + CHANNELS)):
        own = row * width + channel
        y = g[code[at + 1] * R + own]
        if gate >= 0:
            y *= _sigmoid(g[gate * R + own])
        g[code[at] * R + own] += y


@ti.func
def _wkv4(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, R, parts):
    width = code[at + AFTER_4]
    row, first = tile // parts, tile % parts * CHANNELS
    for channel in range(first, ti.min(width, first + CHANNELS)):
        own = row * width + channel
        a_at, b_at, p_at = code[at + OF_4.a] * R + own, code[at + OF_4.b] * R + own, code[at + OF_4.p] * R + own
        k, v, r = g[code[at + OF_4.k] * R + own], g[code[at + OF_4.v] * R + own], g[code[at + OF_4.r] * R + own]
        a, b, p = g[a_at], g[b_at], g[p_at]
        w, u = c[code[at + OF_4.w] + channel], c[code[at + OF_4.u] + channel]
        top = ti.max(p, u + k)
        past, now = ti.exp(p - top), ti.exp(u + k - top)
        g[code[at + OF_4.y] * R + own] = _sigmoid(r) * (past * a + now * v) / (past * b + now)
        top = ti.max(p + w, k)
        past, now = ti.exp(p + w - top), ti.exp(k - top)
        g[a_at] = past * a + now * v
        g[b_at] = past * b + now
        g[p_at] = top


@ti.func
def _wkv7(c: ti.template(), g: ti.template(), code: ti.template(), at, tile, R, heads):
    """A tile is a head of a row. z, rate, k and v become the decay, b, the key and the value; kk becomes a."""
    N, head = code[at + AFTER_7 + 1], tile % heads
    own, channel = tile * N, head * N
    r_at, k_at, v_at = code[at + OF_7.r] * R + own, code[at + OF_7.k] * R + own, code[at + OF_7.v] * R + own
    z_at, rate_at, g_at = code[at + OF_7.z] * R + own, code[at + OF_7.rate] * R + own, code[at + OF_7.g] * R + own
    gate_at, first_at = code[at + OF_7.gate] * R + own, code[at + OF_7.v_first] * R + own
    state_at, kk_at, y_at = code[at + OF_7.state] * R + own * N, code[at + OF_7.kk] * R + own, code[at + OF_7.y] * R + own
    w0, a0, v0 = code[at + OF_7.w0] + channel, code[at + OF_7.a0] + channel, code[at + OF_7.v0] + channel
    k_k, k_a, r_k = code[at + OF_7.k_k] + channel, code[at + OF_7.k_a] + channel, code[at + OF_7.r_k] + channel
    weight, bias = code[at + OF_7.weight] + channel, code[at + OF_7.bias] + channel
    squares, share = 0.0, 0.0
    for j in range(N):
        k, v = g[k_at + j], g[v_at + j]
        rate = _sigmoid(c[a0 + j] + g[rate_at + j])
        g[rate_at + j] = rate
        g[z_at + j] = ti.exp(FASTEST_LOG_W * _sigmoid(c[w0 + j] + g[z_at + j]))
        if code[at + OF_7.gate] >= 0:
            v += (g[first_at + j] - v) * _sigmoid(c[v0 + j] + g[gate_at + j])
            g[v_at + j] = v
        else:
            g[first_at + j] = v
        kk = k * c[k_k + j]
        squares += kk * kk
        k *= 1.0 + (rate - 1.0) * c[k_a + j]
        share += g[r_at + j] * k * c[r_k + j]
        g[k_at + j] = k
        g[kk_at + j] = kk
    factor = 1.0 / ti.max(ti.sqrt(squares), LEAST_NORM)
    for j in range(N):
        kk = g[kk_at + j] * factor
        g[kk_at + j] = -kk
        g[rate_at + j] *= kk
    _state_and_y(g, state_at, z_at, kk_at, rate_at, k_at, v_at, r_at, y_at, N, R)
    total = 0.0
    for j in range(N):
        total += g[y_at + j]
    mean, squares_away = total / N, 0.0
    for j in range(N):
        squares_away += (g[y_at + j] - mean) ** 2
    scale = 1.0 / ti.sqrt(squares_away / N + c[code[at + OF_7.eps]])
    for j in range(N):
        normal = (g[y_at + j] - mean) * scale * c[weight + j] + c[bias + j]
        g[y_at + j] = (normal + share * g[v_at + j]) * g[g_at + j]


@ti.func
def _state_and_y(g: ti.template(), state_at, w_at, a_at, b_at, k_at, v_at, r_at, y_at, N, R):
    """kernels/wkv7's step for one head: S w + (S a) b + v k, and y = S r, row by row."""
    for i in range(N):
        row = state_at + i * N
        sums = ti.Vector([0.0] * LANES)
        for j in range(N // LANES):
            sums += vector(g, row + j * LANES) * vector(g, a_at + j * LANES)
        sa, v = sum_of(sums, R >> 30), g[v_at + i]
        sums = ti.Vector([0.0] * LANES)
        for j in range(N // LANES):
            now = (vector(g, row + j * LANES) * vector(g, w_at + j * LANES) + sa * vector(g, b_at + j * LANES)
                   + v * vector(g, k_at + j * LANES))
            for lane in ti.static(range(LANES)):
                g[(row + j * LANES & INDEX) + lane] = now[lane]
            sums += now * vector(g, r_at + j * LANES)
        g[y_at + i] = sum_of(sums, R >> 30)


@ti.func
def _sigmoid(x):
    return 1.0 / (1.0 + ti.exp(-x))
