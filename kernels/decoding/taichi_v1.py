"""Products by PyTorch, and all that lies between two of them in one launch: for many rows, of which its products make more.

In int8 the products are sums of whole numbers, exact in any order, so that a row's result is taichi_v0's to the bit.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decoding import Instruction, Program, Run
from kernels.decoding.taichi_v0 import REQUIRES as REQUIRES
from kernels.decoding.taichi_v0 import launches_of
from kernels.matvec import unpacked

LARGE = {"down", "up", "wkv7"}           # instructions for which other threads are worth waking
Bind = Callable[[Tensor], Callable[[], object]]


def bind(program: Program, form: str) -> Run:
    steps = list(_steps(program))
    calls: list[Callable[[], object]] = []
    bound_to: ref[Tensor] | None = None

    def run(registers: Tensor) -> None:
        nonlocal calls, bound_to
        if bound_to is None or bound_to() is not registers:      # making views of registers takes as long as a small product
            calls = found = [step(registers[:]) for step in steps]
            bound_to = ref(registers, lambda _: found.clear())             # their memory is freed when the registers are
        for call in calls:
            call()

    return run


def _steps(program: Program) -> Iterator[Bind]:
    """Functions of the registers, of which each gives the call that carries out a step of the program on them."""
    kept = [instruction for instruction in program.instructions if instruction.name != "arrange"]
    parts = [list(part) for _, part in groupby(kept, lambda each: each.name == "product")]
    others = [part for part in parts if part[0].name != "product"]
    large = [part for part in others if LARGE & {each.name for each in part}]
    by_all = iter(launches_of(large, program, "float32"))
    by_one = iter(launches_of([part for part in others if part not in large], program, "float32", threads=1))
    for part in parts:
        if part[0].name == "product":
            yield from (partial(_product, program, each) for each in part)
        else:
            yield partial(partial, next(by_all if part in large else by_one))


def _product(program: Program, product: Instruction, registers: Tensor) -> Callable[[], object]:
    x_at, y_at, N, K, extra, _, number = product.arguments
    weight = program.weights[number]
    function = program.functions[number] or (lambda rows: F.linear(rows, unpacked(weight, torch.float32)[:, :K]))
    x, y = registers[:, x_at:x_at + K], registers[:, y_at:y_at + N]
    if weight.form == "int8":
        step = registers[:, extra:extra + 1]
        return lambda: torch.mul(function(x), step, out=y)
    return lambda: y.copy_(function(x))
