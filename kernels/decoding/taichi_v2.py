"""The whole program in one launch, in C for this CPU's vectors (csrc/program.c); Taichi links it, and starts the threads."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.backends.bitcode import function
from kernels.backends.taichi import BLOCK, launch, ti
from kernels.decoding import Program, Run
from kernels.decoding.taichi_v0 import PARTS, WIDTH, Integers, Part, parts_of
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), devices=("cpu",), bitcode=True,
                    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16))
SOURCE = Path(__file__).parent / "csrc" / "program.c"


def bind(program: Program, form: str) -> Run:
    """In float32 the weights may be bfloat16: the sums are, to the bit, those of the same weights in float32."""
    threads = torch.get_num_threads()
    constants, matrices = program.constants(), program.matrices()
    if form == "float32" and program.weights and program.weights[0].form == "bfloat16":
        form = "float32_of_bfloat16"
    starts = [partial(_start, part, form, constants, matrices, program.size, program.whole_size, threads)
              for part in parts_of(program, PARTS * threads)]
    whole = constants.new_zeros(1, dtype=torch.int16)

    def run(registers: Tensor) -> None:
        nonlocal whole
        if len(whole) < len(registers) * program.whole_size:
            whole = registers.new_zeros(len(registers) * program.whole_size, dtype=torch.int16)
        for start in starts:
            start(registers, whole)

    return run


def _start(part: Part, form: str, constants: Tensor, matrices: Tensor, size: int, whole_size: int, threads: int,
           registers: Tensor, whole: Tensor) -> None:
    part.counters.zero_()
    arrays = (part.first, part.scale, part.shift, constants, matrices, registers, whole, part.code, part.counters)
    addresses = (0 if array is None else array.data_ptr() for array in arrays)
    launch(_kernel(form), part.counters, *addresses, int(matrices.dtype == torch.bfloat16), len(part.code) // WIDTH, size,
           whole_size, len(registers), PARTS * threads, threads)


@cache
def _kernel(form: str):
    program = function(SOURCE, f"program_{form}")

    @ti.kernel
    def kernel(counters: Integers, w: ti.i64, scale: ti.i64, shift: ti.i64, c: ti.i64, m: ti.i64, g: ti.i64, q: ti.i64,
               code: ti.i64, counters_at: ti.i64, small: int, count: int, size: int, q_size: int, R: int, parts: int, n: int):
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                program(w, scale, shift, c, m, g, q, code, counters_at, small, count, size, q_size, R, parts)

    return kernel
