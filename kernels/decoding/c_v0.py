"""The whole program in one call of C (csrc/program.c): threads take tiles from a counter and wait for each other by spinning.

A barrier costs below 1 us where starting an operation costs 5 to 300. A thread that the system has stopped delays the others
only by the tile that it holds. The weights stay where they are.
"""

import torch
from torch import Tensor

from kernels import native
from kernels.decoding import PART, Instruction, Program, Run
from kernels.matvec import GROUP, TOGETHER, Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), native=True, dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))

WIDTH = 24                               # of an instruction in the code: its number, its tiles for each row, its arguments
NAMES = ("norm", "mix", "product", "down", "up", "map", "add", "wkv4", "wkv7", "round", "arrange", "halve")  # as in program.c
WIDTH_AT = {"mix": 3, "map": 1, "add": 2, "wkv4": 9, "halve": 2}         # the argument that is the width of the registers
CHANNELS = 128                           # of a tile of what is computed channel by channel
PARTS = 8                                # tiles of a product for each thread: of fewer, the last keeps the others waiting
APART = 16                               # integers between two counters, so that no two are in one cache line


def bind(program: Program, form: str) -> Run:
    """In float32 the weights may be bfloat16: the sums are, to the bit, those of the same weights in float32."""
    threads = torch.get_num_threads()
    constants, matrices = program.constants(), program.matrices()
    name = "float32_of_bfloat16" if form == "float32" and program.weights and program.weights[0].form == "bfloat16" else form
    weights = [packed.map(Tensor.contiguous) for packed in program.weights]
    code = _code(program.instructions, weights, PARTS * threads)
    counters = torch.zeros(len(code) * 2 * APART, dtype=torch.int32)
    whole = torch.zeros(1, dtype=torch.int16)

    def run(registers: Tensor) -> None:
        nonlocal whole
        R = len(registers)
        if len(whole) < R * program.whole_size:
            whole = torch.zeros(R * program.whole_size, dtype=torch.int16)
        counters.zero_()
        native.run(f"decoding_{name}", threads, constants, matrices, registers, whole, code, counters,
                   matrices.dtype == torch.bfloat16, len(code), program.size, program.whole_size, R, PARTS * threads)

    run.weights = weights  # type: ignore[attr-defined]  # the code has their addresses
    return run


def _code(instructions: list[Instruction], weights: list[Packed], parts: int) -> Tensor:
    """The instructions as numbers, (n,WIDTH) int64. parts: tiles of a product."""
    code = torch.zeros(len(instructions), WIDTH, dtype=torch.int64)
    for row, (name, arguments) in zip(code, instructions, strict=True):
        numbers = list(arguments)
        if name == "product":
            packed = weights[numbers.pop()]
            addresses = [*(tensor.data_ptr() for tensor in packed), 0, 0][:3]
            numbers += [*addresses, packed.rounding.offset if isinstance(packed, Int8) else 0]
        full = torch.tensor([NAMES.index(name), _tiles_of(name, arguments, parts), *numbers])
        row[:len(full)] = full
    return code


def _tiles_of(name: str, arguments: tuple[int, ...], parts: int) -> int:
    """The tiles of an instruction; for each row, but those of a product are for all rows."""
    if name in ("product", "down", "up"):
        outputs = -(-arguments[2] // PART) if name == "up" else arguments[2]
        return -(-outputs // -(-outputs // parts))
    if name == "wkv7":
        return arguments[-2]             # heads
    if name == "arrange":
        return -(-arguments[2] // (TOGETHER * GROUP))
    return 1 if name in ("norm", "round") else -(-arguments[WIDTH_AT[name]] // CHANNELS)
