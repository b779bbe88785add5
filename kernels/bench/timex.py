"""TimeX at one shape: what the benchmark verifies and times."""

from functools import partial

import torch
from torch import Tensor

from kernels import compare, registry
from kernels.bench.case import DISTINCT, Costs, Pass, costs, errors_of_repeated, repeated
from kernels.registry import load, why_not
from kernels.timex import TimeX, cases


class Case:
    """w (C,T) and k (B,C,T); the members are those of BenchCase (case.py)."""

    AXES = ("B", "C", "T")
    DTYPES = ("float32", "bfloat16")
    SHAPES, SWEEP = cases.BENCH_SHAPES, cases.SWEEP
    LAUNCHES = False
    baseline = "conv1d"

    def __init__(self, B: int, C: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.shape = device, dtype, (B, C, T)
        w, k = cases.inputs(B, min(C, DISTINCT), T, dtype, device)
        self.narrow = w, k
        self.w, self.k = repeated(w, C, 0).requires_grad_(), repeated(k, C, 1).requires_grad_()
        self.grad_out = torch.randn_like(self.sequence)
        self.reference = cases.results(TimeX("formula"), w.double(), k.double())

    @staticmethod
    def names() -> tuple[str, ...]:
        return registry.names("timex")

    @staticmethod
    def numbers(B: int, C: int, T: int) -> int:
        return 4 * B * C * T + 2 * C * T

    @property
    def sequence(self) -> Tensor:
        return self.k.detach()

    def why_not(self, name: str) -> str | None:
        reason = why_not("timex", name, self.device)
        T_max = None if reason else TimeX(name).requires.T_max
        return f"{name} takes T up to {T_max}" if T_max is not None and self.shape[2] > T_max else reason

    def estimate(self, name: str) -> Costs:
        """From DISTINCT channels."""
        timex, (w, k) = TimeX(name), self.narrow
        few = costs(lambda: (timex.forward(w, k), timex.backward(w, k, k)), self.device)
        return few.times(self.shape[1] / w.shape[0])

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        found = errors_of_repeated(cases.results(TimeX(name), self.w, self.k), self.reference, dim=-2)
        return found, compare.misses(found, cases.tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """forward and backward as a user calls them; grad_w and grad_k alone if the implementation has these functions."""
        timex, w, k, grad_out = TimeX(name), self.w, self.k, self.grad_out
        out = timex(w, k)
        flop = cases.flop(*self.shape)
        return [Pass("forward", lambda: timex(w, k), flop, w.nbytes + 2 * k.nbytes),
                Pass("backward", lambda: torch.autograd.grad(out, (w, k), grad_out, retain_graph=True),
                     2 * flop, 2 * w.nbytes + 3 * k.nbytes),
                *self._gradients(timex, flop, w.nbytes + 2 * k.nbytes)]

    def _gradients(self, timex: TimeX, flop: int, traffic: int) -> list[Pass]:
        """The implementation's own grad_w(k, grad_out) and grad_k(w, grad_out), if it has them."""
        w, k, grad_out = (timex._pad(tensor, torch.float32) for tensor in (self.w, self.k, self.grad_out))
        inputs = {"grad_w": (k, grad_out), "grad_k": (w, grad_out)}
        implementation = load("timex", timex.name)
        return [Pass(gradient, partial(getattr(implementation, gradient), *tensors), flop, traffic)
                for gradient, tensors in inputs.items() if hasattr(implementation, gradient)]
