"""Benchmarks WKV-7 at one shape. Implementations are verified from a random state, and timed from the empty state."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kernels import compare
from kernels.bench.case import DISTINCT, BenchCase, Costs, Pass, costs, errors_of_repeated, repeat_channels
from kernels.select import select
from kernels.wkv7 import WKV7, cases

ESTIMATED_STEPS = 64
PIECE = 512                  # steps that the float64 reference computes at a time, because it stores a state per step
FORWARD, BACKWARD = 10, 32   # operations per step and element of the state: 5 multiply-adds; backward 16


class Case(BenchCase):
    """WKV-7 of inputs (B,T,H,N). log_w and state are always float32.

    The sizes are given as B,H,N,T, because a sweep varies the last size. Heads are independent, so DISTINCT different heads are
    repeated to fill all B H.
    """

    op = "wkv7"
    AXES = ("B", "H", "N", "T")
    DTYPES = ("float32", "bfloat16")
    SHAPES: ClassVar = {device: tuple((B, H, N, T) for B, T, H, N in some) for device, some in cases.BENCH_SHAPES.items()}
    SWEEP = cases.SWEEP
    baseline = "reference"

    def __init__(self, B: int, H: int, N: int, T: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self.T = T
        *sequences, state = cases.inputs(1, T, min(B * H, DISTINCT), N, dtype=dtype, device=device)
        all_heads = [repeat_channels(sequence[0], B * H, 1).view(T, B, H, N).transpose(0, 1).contiguous()
                     for sequence in sequences]
        all_heads.append(repeat_channels(state[0], B * H, 0).view(B, H, N, N))
        self.inputs = tuple(tensor.requires_grad_() for tensor in all_heads)
        self.grad_y = torch.randn_like(self.sequence)
        self.reference = _by_head(cases.results(_reference_in_pieces, cases.double((*sequences, state))))

    @staticmethod
    def numbers(B: int, H: int, N: int, T: int) -> int:
        return 14 * B * H * N * T + 4 * B * H * N * N

    @property
    def sequence(self) -> Tensor:
        return self.inputs[3].detach()

    def estimate(self, name: str) -> Costs:
        """Extrapolates from a few steps. Time and memory are proportional to T, even if all states are stored."""
        steps = min(self.T, ESTIMATED_STEPS)
        leaves = [sequence.detach()[:, :steps].clone(memory_format=torch.contiguous_format).requires_grad_()
                  for sequence in self.inputs[:6]]
        wkv = select("wkv7", name, self.device)
        grad_y = torch.ones_like(leaves[3])
        sample = costs(lambda: torch.autograd.grad(wkv(*leaves)[0], leaves, grad_y), self.device)
        return sample.times(self.T / steps)

    def errors(self, name: str) -> tuple[dict[str, float], dict[str, str]]:
        wkv = select("wkv7", name, self.device)
        result = errors_of_repeated(_by_head(cases.results(wkv, self.inputs)), self.reference, dim=0)
        return result, compare.misses(result, compare.tolerance(wkv, self.dtype))

    def passes(self, name: str) -> list[Pass]:
        """Returns the forward pass, and the backward pass alone on a retained graph."""
        wkv = select("wkv7", name, self.device)
        sequences = self.inputs[:6]
        y, state = wkv(*sequences)
        read = sum(sequence.nbytes for sequence in sequences)
        work = self.T * state.numel()
        return [Pass("forward", lambda: wkv(*sequences), FORWARD * work, read + y.nbytes + state.nbytes),
                Pass("backward", lambda: torch.autograd.grad(y, sequences, self.grad_y, retain_graph=True),
                     BACKWARD * work, 2 * read + y.nbytes)]


def _by_head(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merges B and H in each tensor: (B,T,H,N) becomes (B*H,T,N), and (B,H,N,N) becomes (B*H,N,N)."""
    return {name: (result if name.endswith("state") else result.transpose(1, 2)).flatten(0, 1)
            for name, result in results.items()}


def _reference_in_pieces(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    *sequences, state = inputs
    reference = WKV7("reference")
    ys = []
    for r, log_w, k, v, a, b in zip(*(sequence.split(PIECE, 1) for sequence in sequences), strict=True):
        y, state = reference(r, log_w, k, v, a, b, state)
        ys.append(y)
    return torch.cat(ys, 1), state
