"""Benchmarks TimeX at one shape."""

from functools import partial

import torch
from torch import Tensor

from kernels import compare
from kernels.bench.case import DISTINCT, BenchCase, Costs, Pass, costs, errors_of_repeated, repeat_channels
from kernels.registry import load
from kernels.timex import TimeX, cases


class Case(BenchCase):
    """TimeX of w (C,T) and k (B,C,T)."""

    op = "timex"
    AXES = ("B", "C", "T")
    DTYPES = ("float32", "bfloat16")
    SHAPES = cases.BENCH_SHAPES
    SWEEP = cases.SWEEP
    baseline = "conv1d"

    def __init__(self, B: int, C: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self.shape = (B, C, T)
        w, k = cases.inputs(B, min(C, DISTINCT), T, dtype, device)
        self.narrow = w, k
        self.w = repeat_channels(w, C, 0).requires_grad_()
        self.k = repeat_channels(k, C, 1).requires_grad_()
        self.grad_out = torch.randn_like(self.sequence)
        self.reference = cases.results(TimeX("formula"), w.double(), k.double())

    @staticmethod
    def numbers(B: int, C: int, T: int) -> int:
        return 4 * B * C * T + 2 * C * T

    @property
    def sequence(self) -> Tensor:
        return self.k.detach()

    def estimate(self, name: str) -> Costs:
        """Extrapolates from DISTINCT channels."""
        timex = TimeX(name)
        w, k = self.narrow
        sample = costs(lambda: (timex.forward(w, k), timex.backward(w, k, k)), self.device)
        return sample.times(self.shape[1] / w.shape[0])

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        result = errors_of_repeated(cases.results(TimeX(name), self.w, self.k), self.reference, dim=-2)
        return result, compare.misses(result, cases.tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """Returns the forward and backward passes as a user calls them, and the implementation's grad_w and grad_k."""
        timex = TimeX(name)
        w = self.w
        k = self.k
        grad_out = self.grad_out
        out = timex(w, k)
        flop = cases.flop(*self.shape)
        return [Pass("forward", lambda: timex(w, k), flop, w.nbytes + 2 * k.nbytes),
                Pass("backward", lambda: torch.autograd.grad(out, (w, k), grad_out, retain_graph=True),
                     2 * flop, 2 * w.nbytes + 3 * k.nbytes),
                *self._gradients(timex, flop, w.nbytes + 2 * k.nbytes)]

    def _gradients(self, timex: TimeX, flop: int, traffic: int) -> list[Pass]:
        """Returns the passes grad_w(k, grad_out) and grad_k(w, grad_out), if the implementation has these functions."""
        w, k, grad_out = (timex._pad(tensor, torch.float32) for tensor in (self.w, self.k, self.grad_out))
        inputs = {"grad_w": (k, grad_out), "grad_k": (w, grad_out)}
        implementation = load("timex", timex.name)
        return [Pass(gradient, partial(getattr(implementation, gradient), *tensors), flop, traffic)
                for gradient, tensors in inputs.items() if hasattr(implementation, gradient)]
