"""The token shift at one shape: what the benchmark verifies and times."""

from functools import partial

import torch
from torch import Tensor

from kernels import compare, registry
from kernels._subjects import DISTINCT, Costs, Pass, costs, errors_of_repeated, repeated
from kernels.registry import why_not
from kernels.shift import TokenShift, cases


class Subject:
    """Of x (B,T,C) in float32, MIXES mixes in `dtype`; kernels/_subjects.py says what the members are for."""

    AXES = ("B", "T", "C")
    DTYPES = ("float32", "bfloat16", "float16")
    SHAPES, SWEEP = cases.BENCH_SHAPES, cases.SWEEP
    LAUNCHES = True
    baseline = "torch_fused"

    def __init__(self, B: int, T: int, C: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        x, last_x, mus = cases.inputs(B, T, min(C, DISTINCT), device=device)
        self.inputs = [repeated(tensor, C, -1).requires_grad_() for tensor in (x, last_x, mus)]
        grads = cases.upstream(B, T, x.shape[2], dtype=dtype, device=device)
        self.grads = [repeated(grad, C, -1) for grad in grads]
        self.reference = cases.reference(x, last_x, mus, grads)

    @staticmethod
    def names() -> tuple[str, ...]:
        return registry.names("shift")

    @property
    def sequence(self) -> Tensor:
        """The tensor whose copy is the unit of time."""
        return self.inputs[0].detach()

    def why_not(self, name: str) -> str | None:
        """Why `name` cannot be timed here."""
        return why_not("shift", name, self.device)

    def foretold(self, name: str) -> Costs:
        """From a sixteenth of the steps."""
        (x, last_x, mus), T = self.inputs, -(-self.sequence.shape[1] // 16)
        few, grads = x[:, :T], [grad[:, :T] for grad in self.grads]
        return costs(lambda: cases.results(TokenShift(name), few, last_x, mus, grads), self.device).times(x.shape[1] / T)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        """The err_ratio of each result, and those that are over their tolerance, in words."""
        x, last_x, mus = self.inputs
        found = errors_of_repeated(cases.results(TokenShift(name), x, last_x, mus, self.grads), self.reference, dim=-1)
        return found, compare.misses(found, cases.tolerance(self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """forward, and backward alone on a graph that is kept, as a user calls them."""
        (x, last_x, mus), grads, mix = self.inputs, self.grads, partial(TokenShift(name), dtype=self.dtype)
        mixes, inputs = mix(x, last_x, mus), (x, last_x, mus)
        one, written = x.nbytes, sum(grad.nbytes for grad in grads)
        return [Pass("forward", lambda: mix(x, last_x, mus), 0, one + written),
                Pass("backward", lambda: torch.autograd.grad(mixes, inputs, grads, retain_graph=True), 0, 2 * one + written)]
