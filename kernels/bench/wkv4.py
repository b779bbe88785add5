"""Benchmarks WKV-4 at one shape, from an empty state."""

from typing import ClassVar

import torch
from torch import Tensor

from kernels import compare
from kernels.bench.case import DISTINCT, BenchCase, Costs, Pass, costs, errors_of_repeated, repeat_channels
from kernels.registry import why_not
from kernels.select import folder, select, selectable
from kernels.wkv4 import WKV4, cases


class Case(BenchCase):
    """WKV-4 of k and v (B,T,C). The sizes are given as B,C,T, as for TimeX. Parameters and state are always float32."""

    op = "wkv4"
    AXES = ("B", "C", "T")
    DTYPES = ("float32", "bfloat16")
    SHAPES: ClassVar = {device: tuple((B, C, T) for B, T, C in some) for device, some in cases.BENCH_SHAPES.items()}
    SWEEP = cases.SWEEP
    baseline = "conv1d in one block"

    def __init__(self, B: int, C: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self.T = T
        time_decay, time_first, k, v, _ = cases.inputs(B, T, min(C, DISTINCT), device=device)
        narrow = time_decay, time_first, k.to(dtype), v.to(dtype)
        time_decay, time_first, k, v = (repeat_channels(tensor, C, -1).requires_grad_() for tensor in narrow)
        self.inputs = time_decay, time_first, k, v
        self.grad_y = torch.randn_like(self.sequence)
        self.reference = cases.results(WKV4("reference"), cases.double((*narrow, None)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names that `select` accepts. The name of a TimeX kernel means the convolution with that kernel."""
        return (cls.baseline, *selectable("wkv4"))

    @staticmethod
    def numbers(B: int, C: int, T: int) -> int:
        return 6 * B * C * T

    @classmethod
    def why_not(cls, name: str, device: str, dtype: str) -> str | None:
        file = name.split()[0]           # "conv1d in one block" runs where conv1d runs
        return why_not(folder("wkv4", file), file, device)

    @property
    def sequence(self) -> Tensor:
        return self.inputs[2].detach()

    def estimate(self, name: str) -> Costs:
        """Extrapolates from an eighth of the steps. A convolution in one block takes time quadratic in the number of steps."""
        steps = -(-self.T // 8)
        time_decay, time_first, *sequences = self.inputs
        k, v = (sequence.detach()[:, :steps].clone(memory_format=torch.contiguous_format).requires_grad_()
                for sequence in sequences)
        wkv = self._operator(name, block=steps)
        leaves = (time_decay, time_first, k, v)
        grad_y = torch.ones_like(k)
        sample = costs(lambda: torch.autograd.grad(wkv(*leaves)[0], leaves, grad_y), self.device)
        return sample.times(8, work=64 if name == self.baseline else 8)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        results = cases.results(self._operator(name, block=self.T), (*self.inputs, None))
        result = errors_of_repeated(results, self.reference, dim=-1)
        return result, compare.misses(result, cases.tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """Returns the forward pass, and the backward pass alone on a retained graph."""
        wkv = self._operator(name, block=self.T)
        nbytes = self.sequence.nbytes
        y = wkv(*self.inputs)[0]
        return [Pass("forward", lambda: wkv(*self.inputs), 0, 3 * nbytes),
                Pass("backward", lambda: torch.autograd.grad(y, self.inputs, self.grad_y, retain_graph=True), 0, 5 * nbytes)]

    def _operator(self, name: str, block: int) -> WKV4:
        return WKV4("timex", timex="conv1d", block=block) if name == self.baseline else select("wkv4", name, self.device)
