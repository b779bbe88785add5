"""Benchmarks softmax at one shape."""

import torch
from torch import Tensor

from kernels import compare
from kernels.bench.case import DISTINCT, BenchCase, Costs, Pass, costs, errors_of_repeated, repeat_channels
from kernels.softmax import Softmax, cases

FEW_COLUMNS = 64                         # with fewer columns one y may be almost 1, and grad_x a difference of close numbers


class Case(BenchCase):
    """The softmax of each row of x (rows, columns)."""

    op = "softmax"
    AXES = ("rows", "columns")
    DTYPES = ("float32", "bfloat16", "float16")
    SHAPES = cases.BENCH_SHAPES
    SWEEP = cases.SWEEP
    baseline = "torch_native"

    def __init__(self, rows: int, columns: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self.rows = rows
        spread = 3.0 if columns >= FEW_COLUMNS else 1.0
        distinct = cases.inputs(min(rows, DISTINCT), columns, dtype=dtype, device=device, spread=spread)
        self.x = repeat_channels(distinct, rows, 0).requires_grad_()
        self.grad_y = torch.randn_like(self.sequence)
        self.reference = cases.results(Softmax("formula"), distinct.double())

    @staticmethod
    def numbers(rows: int, columns: int) -> int:
        return 4 * rows * columns

    @property
    def sequence(self) -> Tensor:
        return self.x.detach()

    def estimate(self, name: str) -> Costs:
        """Extrapolates from a sixteenth of the rows."""
        softmax = Softmax(name)
        few = self.sequence[::16]
        return costs(lambda: softmax.backward(softmax.forward(few), few), self.device).times(self.rows / len(few))

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        result = errors_of_repeated(cases.results(Softmax(name), self.x), self.reference, dim=0)
        return result, compare.misses(result, cases.tolerance(self.dtype, self.x.shape[1]))

    def passes(self, name: str) -> list[Pass]:
        """Returns the forward pass, and the backward pass alone on a retained graph."""
        softmax = Softmax(name)
        x = self.x
        y = softmax(x)
        return [Pass("forward", lambda: softmax(x), 0, 2 * x.nbytes),
                Pass("backward", lambda: torch.autograd.grad(y, x, self.grad_y, retain_graph=True), 0, 3 * x.nbytes)]
