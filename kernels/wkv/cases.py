"""Shapes, inputs and tolerances of WKV, shared by the tests and the benchmark."""

import torch
from torch import Tensor

from kernels.wkv import WKVState

SHAPES = ((1, 1, 1), (3, 11, 5), (2, 63, 4), (5, 129, 3), (2, 256, 16))              # (B, T, C)
EMPTY_SHAPES = ((0, 4, 3), (2, 0, 3), (2, 4, 0))
BENCH_SHAPES = {"cpu": ((8, 1024, 768), (8, 8192, 768), (12, 64, 128)),
                "cuda": ((32, 768, 768), (8, 1024, 768), (8, 8192, 768))}
SWEEP = {"cpu": (128, 512, 2048), "cuda": (128, 256, 512, 2048, 4096)}                     # T, at the B and C of a shape above
SPREADS = {"+-5": 1.0, "+-23": 5.0}                  # k ~ N(0, spread): what every implementation is exact on
WIDE_SPREADS = {"+-43": 10.0, "+-230": 50.0, "+-1e7": 2e6}
TOLERANCE = {"y": 1e-5, "state": 1e-4, "gradient": 3e-5}                              # float32, on err_ratio


def inputs(B: int, T: int, C: int, spread: float = 1.0, with_state: bool = True, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, WKVState]:
    """time_decay in [-5, 3], time_first = log 0.3 +- 0.5, k ~ N(0, spread), v ~ N(0, 1), a state like that of such k."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    time_decay = -5 + 8 * torch.rand(C, generator=generator, dtype=torch.float64)
    time_first = -1.2 + 0.5 * normal(C)
    k, v = spread * normal(B, T, C), normal(B, T, C)
    state = WKVState(normal(B, C), 0.5 + normal(B, C).abs(), spread * normal(B, C)) if with_state else WKVState.empty(B, C)
    time_decay, time_first, k, v = (tensor.to(device, dtype) for tensor in (time_decay, time_first, k, v))
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return time_decay, time_first, k, v, WKVState(*(part.to(device, state_dtype) for part in state))
