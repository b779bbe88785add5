"""Contains the shapes, inputs and tolerances of WKV for the tests and the benchmark."""

import torch
from torch import Tensor

from kernels.compare import LOG_SIZE, ROUNDING, loss
from kernels.wkv4 import WKV4, WKVState

SHAPES = ((1, 1, 1), (3, 11, 5), (2, 63, 4), (5, 129, 3), (2, 256, 16))              # (B, T, C)
CHECKED = (8, 260, 200)                              # many blocks of odd sizes, for rwkv/training/kernel_check.py
EMPTY_SHAPES = ((0, 4, 3), (2, 0, 3), (2, 4, 0))
BENCH_SHAPES = {"cpu": ((8, 1024, 768), (8, 8192, 768), (12, 64, 128)),
                "cuda": ((32, 768, 768), (8, 1024, 768), (8, 8192, 768))}
SWEEP = {"cpu": (128, 512, 2048), "cuda": (128, 256, 512, 2048, 4096)}     # T, with B and C of a benchmark shape
SPREADS = {"+-5": 1.0, "+-23": 5.0}                  # spreads, k ~ N(0, spread), for which every implementation is exact
WIDE_SPREADS = {"+-43": 10.0, "+-230": 50.0, "+-1e7": 2e6}
TOLERANCE = {"y": 1e-5, "state": 1e-4, "gradient": 3e-5}                              # largest err_ratio in float32


def inputs(B: int, T: int, C: int, spread: float = 1.0, with_state: bool = True, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, WKVState]:
    """Returns random inputs and a typical or an empty state.

    time_decay is in [-5, 3], time_first is log 0.3 +- 0.5, k ~ N(0, spread), and v ~ N(0, 1).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    time_decay = -5 + 8 * torch.rand(C, generator=generator, dtype=torch.float64)
    time_first = -1.2 + 0.5 * normal(C)
    k = spread * normal(B, T, C)
    v = normal(B, T, C)
    state = WKVState(normal(B, C), 0.5 + normal(B, C).abs(), spread * normal(B, C)) if with_state else WKVState.empty(B, C)
    time_decay, time_first, k, v = (tensor.to(device, dtype) for tensor in (time_decay, time_first, k, v))
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return time_decay, time_first, k, v, WKVState(*(part.to(device, state_dtype) for part in state))


WKVInputs = tuple[Tensor, Tensor, Tensor, Tensor, WKVState | None]


def results(wkv: WKV4, inputs: WKVInputs, of: str = "y and state") -> dict[str, Tensor]:
    """Returns y, the new state as a/b and p + log b, and the gradients of a loss, by name.

    `of` selects whether the loss depends on y, on the state, or on both. The gradients are those of time_decay, time_first, k
    and v, and of the state's a and b if `inputs` contains a state.
    """
    *tensors, state = inputs
    leaves = {name: tensor.detach().requires_grad_()
              for name, tensor in zip(WKV4.gradients, (*tensors, *([] if state is None else state[:2])), strict=False)}
    if state is not None:
        state = WKVState(leaves["a"], leaves["b"], state.p)
    y, outgoing = wkv(leaves["time_decay"], leaves["time_first"], leaves["k"], leaves["v"], state)
    ratio = outgoing.a / outgoing.b
    size = outgoing.p + outgoing.b.log()
    on_y = loss(y)
    on_state = ratio.tanh().sum() + size.sin().sum()
    total = {"y": on_y, "state": on_state, "y and state": on_y + on_state}[of]
    grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    by_name = {"y": y, "a/b": ratio, LOG_SIZE: size}
    by_name |= {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in by_name.items()}


def tolerance(dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Returns the tolerances for k and v of `dtype`. Half precision rounds y, grad_y and the gradients, but not the state."""
    allowed = TOLERANCE
    rounding = 3 * ROUNDING.get(dtype, 0.0)
    gradients = [f"grad {name}" for name in WKV4.gradients]
    return {"y": max(allowed["y"], rounding), "a/b": allowed["state"], LOG_SIZE: allowed["state"],
            **dict.fromkeys(gradients, max(allowed["gradient"], rounding))}


def double(inputs: WKVInputs) -> WKVInputs:
    time_decay, time_first, k, v, state = inputs
    wide = None if state is None else WKVState(*(part.double() for part in state))
    return time_decay.double(), time_first.double(), k.double(), v.double(), wide
