"""What the benchmark measures: every implementation of an operator at one shape, how to verify it and what to time.

The inputs repeat every DISTINCT channels. Channels do not know each other, so the float64 reference is computed for
DISTINCT channels only, and all elements of an implementation's results, at the full shape, are compared with it.
DISTINCT is odd so that a kernel which mixes up the channels of its tiles is caught.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import _timing, compare, registry
from kernels.registry import load, why_not
from kernels.select import select, selectable
from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv import WKV
from kernels.wkv import cases as wkv_cases

DISTINCT = 7
FLOAT_BYTES = 4
LONGEST_S = 3


@dataclass(frozen=True)
class Pass:
    """One thing to time: its floating-point operations (0: not counted) and the least bytes that it must move."""

    name: str
    run: Callable[[], Any]
    flop: int
    bytes: int


class TimeXSubject:
    """TimeX at one shape: `names` are what can be timed, `baseline` the one to compare with."""

    baseline = "conv1d"

    def __init__(self, B: int, C: int, T: int, device: str) -> None:
        self.device, self.shape = device, (B, C, T)
        w, k = timex_cases.inputs(B, min(C, DISTINCT), T, device=device)
        self.narrow, self.w, self.k = (w, k), _repeated(w, C, 0), _repeated(k, C, 1)
        exact = compare.timex_results(TimeX("formula"), w.double(), k.double())
        self.reference = {name: _repeated(result, C, -2) for name, result in exact.items()}

    @staticmethod
    def names() -> tuple[str, ...]:
        return registry.names("timex")

    def why_not(self, name: str) -> str | None:
        """Why `name` cannot be timed here at this shape."""
        reason = why_not("timex", name, self.device)
        T_max = None if reason else TimeX(name).requires.T_max
        return f"{name} takes T up to {T_max}" if T_max is not None and self.shape[2] > T_max else reason

    def too_slow(self, name: str) -> str | None:
        """Whether a forward pass will take longer than anyone wants to wait, foretold from a few channels."""
        forward = partial(TimeX(name).forward, *self.narrow)
        forward()
        foretold = _timing.seconds(forward, self.device) * self.shape[1] / self.narrow[0].shape[0]
        slow = foretold > LONGEST_S and name != self.baseline
        return f"{name} takes over {LONGEST_S} s a pass at this shape; --only {name} measures it" if slow else None

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """The err_ratio of each result, and those that are over their tolerance, in words."""
        found = compare.errors(compare.timex_results(TimeX(name), self.w, self.k), self.reference)
        return found, compare.misses(found, compare.timex_tolerance(torch.float32))

    def passes(self, name: str) -> list[Pass]:
        """forward and backward as a user calls them; each gradient alone where the file has a function of that name."""
        timex, w, k = TimeX(name), self.w.clone().requires_grad_(), self.k.clone().requires_grad_()
        out, grad_out = timex(w, k), torch.randn_like(k)
        small, large, flop = FLOAT_BYTES * w.numel(), FLOAT_BYTES * k.numel(), timex_cases.flop(*self.shape)
        whole = [Pass("forward", lambda: timex(w, k), flop, small + 2 * large),
                 Pass("backward", lambda: torch.autograd.grad(out, (w, k), grad_out, retain_graph=True),
                      2 * flop, 2 * small + 3 * large)]
        return whole + self._alone(timex, grad_out, flop, small + 2 * large)

    def _alone(self, timex: TimeX, grad_out: Tensor, flop: int, traffic: int) -> list[Pass]:
        """What an implementation's own grad_w(k, grad_out) and grad_k(w, grad_out) take, where it has them."""
        w, k, grad_out = (timex._pad(tensor, torch.float32) for tensor in (self.w, self.k, grad_out))
        inputs, implementation = {"grad_w": (k, grad_out), "grad_k": (w, grad_out)}, load("timex", timex.name)
        return [Pass(gradient, partial(getattr(implementation, gradient), *tensors), flop, traffic)
                for gradient, tensors in inputs.items() if hasattr(implementation, gradient)]


class WKVSubject:
    """WKV at one shape, from an empty state: the same members as TimeXSubject."""

    baseline = "conv1d in one block"

    def __init__(self, B: int, C: int, T: int, device: str) -> None:
        self.device, self.T = device, T
        inputs = (*wkv_cases.inputs(B, T, min(C, DISTINCT), device=device)[:4], None)
        time_decay, time_first, k, v = (_repeated(tensor, C, -1) for tensor in inputs[:4])
        self.inputs = time_decay, time_first, k, v
        exact = compare.wkv_results(WKV("reference"), compare.double(inputs))
        self.reference = {name: _repeated(result, C, -1) for name, result in exact.items()}

    @staticmethod
    def names() -> tuple[str, ...]:
        """As they are selected; a TimeX stands for the convolution form with it inside."""
        return (WKVSubject.baseline, *selectable())

    def why_not(self, name: str) -> str | None:
        op = "wkv" if name in registry.names("wkv") else "timex"
        plain = name.split()[0]
        unsound = op == "timex" and why_not(op, plain, self.device) is None and not load(op, plain).REQUIRES.wkv
        return why_not(op, plain, self.device) or (f"{name} cannot be used inside WKV" if unsound else None)

    def too_slow(self, name: str) -> str | None:
        return None

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        found = compare.errors(compare.wkv_results(self._operator(name), (*self.inputs, None)), self.reference)
        return found, compare.misses(found, compare.wkv_tolerance())

    def passes(self, name: str) -> list[Pass]:
        wkv, leaves = self._operator(name), [tensor.clone().requires_grad_() for tensor in self.inputs]
        time_decay, time_first, k, v = leaves
        grad_y, sequence = torch.randn_like(k), FLOAT_BYTES * k.numel()

        def forward() -> Tensor:
            return wkv(time_decay, time_first, k, v)[0]

        return [Pass("forward", forward, 0, 3 * sequence),
                Pass("forward + backward", lambda: torch.autograd.grad(forward(), leaves, grad_y), 0, 8 * sequence)]

    def _operator(self, name: str) -> WKV:
        return WKV("timex", timex="conv1d", block=self.T) if name == self.baseline else select(name, self.device)


Subject = TimeXSubject | WKVSubject
SUBJECTS: dict[str, type[TimeXSubject] | type[WKVSubject]] = {"timex": TimeXSubject, "wkv": WKVSubject}


def _repeated(tensor: Tensor, C: int, dim: int) -> Tensor:
    return tensor.index_select(dim, torch.arange(C, device=tensor.device) % tensor.shape[dim])
