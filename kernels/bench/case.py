"""BenchCase, the benchmark's interface to an operator; the class Case in kernels/bench/OP.py is a subclass.

If channels are independent, the inputs repeat DISTINCT different channels. So the float64 reference is computed for DISTINCT
channels only, and every element of an implementation's results, at the full shape, is compared with it. DISTINCT is odd, in
order to detect kernels that mix up the channels of their tiles.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels import compare, registry
from kernels.bench.profiler import extra_bytes
from kernels.bench.timing import seconds

DISTINCT = 7
Shape = tuple[int, ...]              # one size per axis of a case's AXES


@dataclass(frozen=True)
class Pass:
    """A function to time, the number of its floating-point operations (0: not counted), and the least bytes that it must move.

    reads: whether almost all of these bytes are read, not written.
    """

    name: str
    run: Callable[[], Any]
    flop: int
    bytes: int
    reads: bool = False


@dataclass(frozen=True)
class Costs:
    """The costs of a forward and a backward pass together: seconds, and peak bytes beyond inputs and outputs."""

    seconds: float
    peak_extra: float

    def times(self, size: float, work: float | None = None) -> "Costs":
        """The costs with the memory multiplied by `size`, and the time by `work` (default: `size`)."""
        return Costs(self.seconds * (work or size), self.peak_extra * size)


class BenchCase(ABC):
    """An operator at one shape, constructed as Case(*sizes, device, dtype).

    op: the operator.  AXES: the names of the sizes.  DTYPES: the values of --dtype, the default first.  SHAPES: the default
    shapes by device; --sweep varies the first.  SWEEP: the default sizes of the last axis for --sweep, by device, if any.
    LAUNCHES: whether launches are counted (profiler.py).  baseline: the implementation with which all others are compared.
    numbers(*sizes): the number of elements of all inputs, results and gradients, which are in memory at the same time.
    """

    op: ClassVar[str]
    AXES: ClassVar[tuple[str, ...]]
    DTYPES: ClassVar[tuple[str, ...]]
    SHAPES: ClassVar[Mapping[str, tuple[Shape, ...]]]
    SWEEP: ClassVar[Mapping[str, Shape]] = {"cpu": (), "cuda": ()}
    LAUNCHES: ClassVar[bool] = False
    numbers: ClassVar[Callable[..., int]]
    baseline: str
    device: str

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all implementations, whether or not they can run here."""
        return registry.names(cls.op)

    @property
    @abstractmethod
    def sequence(self) -> Tensor:
        """The tensor whose copy is the unit of time in the results."""

    def why_not(self, name: str) -> str | None:
        """Why `name` cannot be timed here at this shape; None if it can."""
        return registry.why_not(self.op, name, self.device)

    @abstractmethod
    def estimate(self, name: str) -> Costs:
        """The costs of all passes, extrapolated from a small part of the work."""

    @abstractmethod
    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """The err_ratio of each result, and a text with the error for each result that exceeds its tolerance."""

    @abstractmethod
    def passes(self, name: str) -> list[Pass]:
        """The passes to time: "forward" first, then "backward" if there is one."""


def case_of(op: str) -> Any:
    """The subclass of BenchCase for an operator."""
    return importlib.import_module(f"kernels.bench.{op}").Case


def costs(passes: Callable[[], Any], device: str) -> Costs:
    """The costs of a function that runs every pass once: the memory of one call, and the shorter time of two more."""
    peak_extra = extra_bytes(passes, device)
    return Costs(min(seconds(passes, device) for _ in range(2)), peak_extra)


def repeated(tensor: Tensor, C: int, dim: int) -> Tensor:
    """A tensor with C channels along `dim`: the channels of `tensor`, repeated."""
    return tensor.index_select(dim, torch.arange(C, device=tensor.device) % tensor.shape[dim])


def errors_of_repeated(results: Mapping[str, Tensor], reference: Mapping[str, Tensor], dim: int) -> dict[str, float]:
    """The err_ratio of results whose channels, along `dim`, repeat those of the reference.

    Results are compared one at a time, because a float64 reference at the full shape is large.
    """
    errors: dict[str, float] = {}
    for name, exact in reference.items():
        actual = results[name]
        errors |= compare.errors({name: actual}, {name: repeated(exact, actual.shape[dim], dim)})
    return errors
