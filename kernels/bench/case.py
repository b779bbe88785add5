"""Defines BenchCase, the benchmark's interface to an operator. kernels/bench/OP.py implements this interface as Case.

If channels are independent, the inputs repeat DISTINCT different channels. So the float64 reference is computed for DISTINCT
channels only, but every element of an implementation's results at the full shape is compared with the reference. DISTINCT is
odd, so that kernels which mix up the channels of their tiles are detected.
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
    """A function to time.

    Attributes:
        flop: number of floating-point operations; 0: not counted.
        bytes: the least number of bytes that the function must read and write.
        reads: True if almost all of these bytes are read, not written.
    """

    name: str
    run: Callable[[], Any]
    flop: int
    bytes: int
    reads: bool = False


@dataclass(frozen=True)
class Costs:
    """The time of a forward and a backward pass together, and their peak bytes beyond inputs and outputs."""

    seconds: float
    peak_extra: float

    def times(self, size: float, work: float | None = None) -> "Costs":
        """Returns the costs with the memory multiplied by `size`, and the time multiplied by `work` (default: `size`)."""
        return Costs(self.seconds * (work or size), self.peak_extra * size)


class BenchCase(ABC):
    """An operator at one shape, constructed as Case(*sizes, device, dtype).

    Attributes:
        op: name of the operator.
        AXES: names of the sizes.
        DTYPES: values of --dtype, the default first.
        SHAPES: default shapes by device; --sweep varies the last size of the first shape.
        SWEEP: default sizes of the last axis for --sweep, by device.
        LAUNCHES: True if launches are counted (profiler.py).
        numbers: function of the sizes that returns the number of elements of all inputs, results and gradients.
        baseline: name of the implementation with which all others are compared.
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
        """Returns the names of all implementations, including those that cannot run here."""
        return registry.names(cls.op)

    @classmethod
    def why_not(cls, name: str, device: str, dtype: str) -> str | None:
        """Returns the reason why an implementation cannot run here on the device with this --dtype, or None."""
        return registry.why_not(cls.op, name, device)

    @property
    @abstractmethod
    def sequence(self) -> Tensor:
        """Returns the tensor whose copying time the results use as a unit."""

    @abstractmethod
    def estimate(self, name: str) -> Costs:
        """Estimates the costs of all passes from a small part of the work."""

    @abstractmethod
    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """Returns the err_ratio of each result, and a description of each error that exceeds its tolerance."""

    @abstractmethod
    def passes(self, name: str) -> list[Pass]:
        """Returns the passes to time: first "forward", then "backward" if the operator has gradients."""


def case_of(op: str) -> Any:
    """Returns the subclass of BenchCase for an operator."""
    return importlib.import_module(f"kernels.bench.{op}").Case


def costs(passes: Callable[[], Any], device: str) -> Costs:
    """Measures a function that runs every pass once: the memory of one call, and the shorter time of two more calls."""
    peak_extra = extra_bytes(passes, device)
    return Costs(min(seconds(passes, device) for _ in range(2)), peak_extra)


def repeat_channels(tensor: Tensor, C: int, dim: int) -> Tensor:
    """Repeats the channels of `tensor` along `dim`, up to C channels."""
    return tensor.index_select(dim, torch.arange(C, device=tensor.device) % tensor.shape[dim])


def errors_of_repeated(results: Mapping[str, Tensor], reference: Mapping[str, Tensor], dim: int) -> dict[str, float]:
    """Returns the err_ratio of each result. The results repeat the reference's channels along `dim`.

    Results are compared one at a time, because a float64 reference at the full shape is large.
    """
    errors: dict[str, float] = {}
    for name, exact in reference.items():
        actual = results[name]
        errors |= compare.errors({name: actual}, {name: repeat_channels(exact, actual.shape[dim], dim)})
    return errors
