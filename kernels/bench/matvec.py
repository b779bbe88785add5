"""Benchmarks the product of R rows and a packed matrix at one shape."""

from functools import partial

import torch
from torch import Tensor

from kernels import compare
from kernels.bench.case import BenchCase, Costs, Pass, costs
from kernels.matvec import FORMATS, Int8, MatVec, cases


class Case(BenchCase):
    """The product of R rows x and W (N,K), packed in the format that --dtype names."""

    op = "matvec"
    AXES = ("N", "K", "R")
    DTYPES = tuple(FORMATS)
    SHAPES = cases.BENCH_SHAPES
    baseline = "torch_linear"

    def __init__(self, N: int, K: int, R: int, device: str, dtype: torch.dtype | str = torch.float32) -> None:
        self.device = device
        self.format = str(dtype).removeprefix("torch.")
        if self.format == Int8.format:
            self.baseline = "fbgemm"
        self.x, self.packed = cases.inputs(R, N, K, self.format, device=device)
        self.reference = cases.expected(self.x, self.packed)

    @staticmethod
    def numbers(N: int, K: int, R: int) -> int:
        return N * K + R * (N + K)

    @classmethod
    def why_not(cls, name: str, device: str, dtype: str) -> str | None:
        reason = super().why_not(name, device, dtype)
        if reason is None and dtype not in MatVec(name).requires.formats:
            reason = f"{name} does not support the format {dtype}"
        return reason

    @property
    def sequence(self) -> Tensor:
        return self.packed.weight

    def estimate(self, name: str) -> Costs:
        return costs(partial(MatVec(name), self.x, self.packed), self.device)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        result = compare.errors({"y": MatVec(name)(self.x, self.packed)}, {"y": self.reference})
        return result, compare.misses(result, cases.tolerance(name, self.format))

    def passes(self, name: str) -> list[Pass]:
        """Returns the product as a decoder calls it, prepared in advance. The least traffic is one read of the weights."""
        product = MatVec(name).bind(self.packed)
        x = self.x.unsqueeze(0)
        return [Pass("forward", lambda: product(x), 0, self.packed.nbytes(), reads=True)]
