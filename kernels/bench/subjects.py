"""What the benchmark asks of an operator, and what the operators' answers share.

kernels/bench/OP.py holds a class Subject: the operator at one shape, with every implementation that can be measured.

Where channels do not know each other, the inputs repeat every DISTINCT of them. The float64 reference is then computed for
DISTINCT channels only, and all elements of an implementation's results, at the full shape, are compared with it.
DISTINCT is odd so that a kernel which mixes up the channels of its tiles is caught.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kernels import compare
from kernels.bench import timing
from kernels.bench.peak_memory import extra_bytes

DISTINCT = 7
Shape = tuple[int, ...]              # one size for each of a subject's AXES


@dataclass(frozen=True)
class Pass:
    """One thing to time: its floating-point operations (0: not counted) and the least bytes that it must move."""

    name: str
    run: Callable[[], Any]
    flop: int
    bytes: int


@dataclass(frozen=True)
class Costs:
    """Of a forward and a backward pass: seconds, and bytes beyond inputs and outputs."""

    seconds: float
    extra: float

    def times(self, size: float, work: float | None = None) -> "Costs":
        return Costs(self.seconds * (work or size), self.extra * size)


class Subject(Protocol):
    """An operator at one shape, made as Subject(*sizes, device, dtype).

    AXES: what the sizes are called.  DTYPES: what --dtype may be, the first unless asked.  SHAPES: what is measured unless
    asked, by device; the first is the one in README.md.  SWEEP: the last axis' sizes for a curve, by device; may be empty.
    LAUNCHES: whether launches are counted (_launches.py).  baseline: the name that all are compared with.
    """

    AXES: ClassVar[tuple[str, ...]]
    DTYPES: ClassVar[tuple[str, ...]]
    SHAPES: ClassVar[Mapping[str, tuple[Shape, ...]]]
    SWEEP: ClassVar[Mapping[str, Shape]]
    LAUNCHES: ClassVar[bool]
    baseline: ClassVar[str]
    device: str

    @staticmethod
    def names() -> tuple[str, ...]:
        """Everything that can be timed, whether or not it can be here."""

    @property
    def sequence(self) -> Tensor:
        """The tensor whose copy is the unit of time."""

    def why_not(self, name: str) -> str | None:
        """Why `name` cannot be timed here at this shape; None where it can."""

    def foretold(self, name: str) -> Costs:
        """What all passes together will take, told from a small part of the work."""

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """The err_ratio of each result, and those that are over their tolerance, in words."""

    def passes(self, name: str) -> list[Pass]:
        """What to time: "forward" first, and then, where there is one, "backward"."""


def subject_of(op: str) -> Any:
    """The class Subject of an operator."""
    return importlib.import_module(f"kernels.bench.{op}").Subject


def costs(passes: Callable[[], Any], device: str) -> Costs:
    """Of a function that runs every pass once: measured, the fastest of two calls."""
    extra = extra_bytes(passes, device)
    return Costs(timing.shortest(passes, device), extra)


def repeated(tensor: Tensor, C: int, dim: int) -> Tensor:
    """C channels along `dim`, which repeat those of `tensor`."""
    return tensor.index_select(dim, torch.arange(C, device=tensor.device) % tensor.shape[dim])


def errors_of_repeated(results: Mapping[str, Tensor], reference: Mapping[str, Tensor], dim: int) -> dict[str, float]:
    """Of results whose channels, along `dim`, repeat the reference's.

    One after the other: a reference at the full shape and in float64 is large.
    """
    found: dict[str, float] = {}
    for name, exact in reference.items():
        actual = results[name]
        found |= compare.errors({name: actual}, {name: repeated(exact, actual.shape[dim], dim)})
    return found
