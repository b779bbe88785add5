"""What the benchmark measures: every implementation of an operator at one shape, how to verify it and what to time.

The inputs repeat every DISTINCT channels. Channels do not know each other, so the float64 reference is computed for
DISTINCT channels only, and all elements of an implementation's results, at the full shape, are compared with it.
DISTINCT is odd so that a kernel which mixes up the channels of its tiles is caught.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import _timing, compare, registry
from kernels._memory import extra_bytes
from kernels.registry import load, why_not
from kernels.select import select, selectable
from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv import WKV
from kernels.wkv import cases as wkv_cases

DISTINCT = 7


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


class TimeXSubject:
    """TimeX at one shape: `names` are what can be timed, `baseline` the one to compare with."""

    baseline = "conv1d"

    def __init__(self, B: int, C: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.shape = device, dtype, (B, C, T)
        w, k = timex_cases.inputs(B, min(C, DISTINCT), T, dtype, device)
        self.narrow = w, k
        self.w, self.k = _repeated(w, C, 0).requires_grad_(), _repeated(k, C, 1).requires_grad_()
        self.grad_out = torch.randn_like(self.sequence)
        self.reference = compare.timex_results(TimeX("formula"), w.double(), k.double())

    @staticmethod
    def names() -> tuple[str, ...]:
        return registry.names("timex")

    @property
    def sequence(self) -> Tensor:
        """The tensor whose copy is the unit of time."""
        return self.k.detach()

    def why_not(self, name: str) -> str | None:
        """Why `name` cannot be timed here at this shape."""
        reason = why_not("timex", name, self.device)
        T_max = None if reason else TimeX(name).requires.T_max
        return f"{name} takes T up to {T_max}" if T_max is not None and self.shape[2] > T_max else reason

    def foretold(self, name: str) -> Costs:
        """From a few channels."""
        timex, (w, k) = TimeX(name), self.narrow
        costs = _costs(lambda: (timex.forward(w, k), timex.backward(w, k, k)), self.device)
        return costs.times(self.shape[1] / w.shape[0])

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """The err_ratio of each result, and those that are over their tolerance, in words."""
        found = _errors(compare.timex_results(TimeX(name), self.w, self.k), self.reference, dim=-2)
        return found, compare.misses(found, compare.timex_tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """forward and backward as a user calls them; each gradient alone where the file has a function of that name."""
        timex, w, k, grad_out = TimeX(name), self.w, self.k, self.grad_out
        out, small, large, flop = timex(w, k), w.nbytes, k.nbytes, timex_cases.flop(*self.shape)
        whole = [Pass("forward", lambda: timex(w, k), flop, small + 2 * large),
                 Pass("backward", lambda: torch.autograd.grad(out, (w, k), grad_out, retain_graph=True),
                      2 * flop, 2 * small + 3 * large)]
        return whole + self._alone(timex, flop, small + 2 * large)

    def _alone(self, timex: TimeX, flop: int, traffic: int) -> list[Pass]:
        """What an implementation's own grad_w(k, grad_out) and grad_k(w, grad_out) take, where it has them."""
        w, k, grad_out = (timex._pad(tensor, torch.float32) for tensor in (self.w, self.k, self.grad_out))
        inputs, implementation = {"grad_w": (k, grad_out), "grad_k": (w, grad_out)}, load("timex", timex.name)
        return [Pass(gradient, partial(getattr(implementation, gradient), *tensors), flop, traffic)
                for gradient, tensors in inputs.items() if hasattr(implementation, gradient)]


class WKVSubject:
    """WKV at one shape, from an empty state: the same members as TimeXSubject. Parameters and state are float32 always."""

    baseline = "conv1d in one block"

    def __init__(self, B: int, C: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.T = device, dtype, T
        time_decay, time_first, k, v, _ = wkv_cases.inputs(B, T, min(C, DISTINCT), device=device)
        narrow = time_decay, time_first, k.to(dtype), v.to(dtype)
        time_decay, time_first, k, v = (_repeated(tensor, C, -1).requires_grad_() for tensor in narrow)
        self.inputs = time_decay, time_first, k, v
        self.grad_y = torch.randn_like(self.sequence)
        self.reference = compare.wkv_results(WKV("reference"), compare.double((*narrow, None)))

    @staticmethod
    def names() -> tuple[str, ...]:
        """As they are selected; a TimeX stands for the convolution form with it inside."""
        return (WKVSubject.baseline, *selectable())

    @property
    def sequence(self) -> Tensor:
        return self.inputs[2].detach()

    def why_not(self, name: str) -> str | None:
        plain = name.split()[0]
        return why_not("wkv" if plain in registry.names("wkv") else "timex", plain, self.device)

    def foretold(self, name: str) -> Costs:
        """From an eighth of the steps; the work of a single block grows with the square of its length."""
        steps = -(-self.T // 8)
        time_decay, time_first, *sequences = self.inputs
        k, v = (sequence.detach()[:, :steps].clone(memory_format=torch.contiguous_format).requires_grad_()
                for sequence in sequences)
        wkv, leaves, grad_y = self._operator(name, block=steps), (time_decay, time_first, k, v), torch.ones_like(k)
        costs = _costs(lambda: torch.autograd.grad(wkv(*leaves)[0], leaves, grad_y), self.device)
        return costs.times(8, work=64 if name == self.baseline else 8)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        results = compare.wkv_results(self._operator(name, block=self.T), (*self.inputs, None))
        found = _errors(results, self.reference, dim=-1)
        return found, compare.misses(found, compare.wkv_tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """forward, and backward alone on a graph that is kept."""
        wkv, one = self._operator(name, block=self.T), self.sequence.nbytes
        y = wkv(*self.inputs)[0]
        return [Pass("forward", lambda: wkv(*self.inputs), 0, 3 * one),
                Pass("backward", lambda: torch.autograd.grad(y, self.inputs, self.grad_y, retain_graph=True), 0, 5 * one)]

    def _operator(self, name: str, block: int) -> WKV:
        return WKV("timex", timex="conv1d", block=block) if name == self.baseline else select(name, self.device)


Subject = TimeXSubject | WKVSubject
SUBJECTS: dict[str, type[TimeXSubject] | type[WKVSubject]] = {"timex": TimeXSubject, "wkv": WKVSubject}


def _costs(both: Callable[[], Any], device: str) -> Costs:
    extra = extra_bytes(both, device)
    return Costs(_timing.shortest(both, device), extra)


def _repeated(tensor: Tensor, C: int, dim: int) -> Tensor:
    return tensor.index_select(dim, torch.arange(C, device=tensor.device) % tensor.shape[dim])


def _errors(results: Mapping[str, Tensor], reference: Mapping[str, Tensor], dim: int) -> dict[str, float]:
    """One result after the other: a reference at the full shape and in float64 is large."""
    found: dict[str, float] = {}
    for name, exact in reference.items():
        actual = results[name]
        found |= compare.errors({name: actual}, {name: _repeated(exact, actual.shape[dim], dim)})
    return found
