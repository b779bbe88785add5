"""Contains the shapes, inputs and tolerances of WKV-7 for the tests and the benchmark."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.compare import ROUNDING, loss

SHAPES = ((3, 1, 4, 64), (2, 11, 3, 64), (1, 16, 2, 8), (2, 63, 1, 64), (1, 64, 2, 20), (1, 129, 1, 64))    # (B, T, H, N)
CHECKED = (3, 129, 6, 64)                        # many blocks and chunks, for rwkv/training/kernel_check.py
EMPTY_SHAPES = ((0, 4, 3, 8), (2, 0, 3, 8), (2, 4, 0, 8), (2, 4, 3, 0))
BENCH_SHAPES = {"cpu": ((8, 1024, 12, 64), (8, 8192, 12, 64), (4, 512, 6, 64)),
                "cuda": ((8, 1024, 12, 64), (8, 8192, 12, 64), (8, 4096, 32, 64))}
SWEEP = {"cpu": (128, 512, 2048), "cuda": (128, 512, 2048, 4096)}                # T; B, H and N are those of a benchmark shape
FASTEST, SLOWEST = -0.6065, -1e-6                # limits of log_w in RWKV-7: -e^-0.5, 0
TOLERANCE = {"y": 5e-6, "state": 5e-6, "gradient": 1e-5}                         # largest err_ratio in float32
NAMES = ("r", "log_w", "k", "v", "a", "b", "state")
WKV7Inputs = tuple[Tensor, ...]


def inputs(B: int, T: int, H: int, N: int, log_w: float | None = None, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> WKV7Inputs:
    """Returns random inputs as in RWKV-7, and a state.

    log_w is -e^-0.5 sigmoid(z), or as given. a is -kk, and b is kk * rate, with |kk| = 1. r and k have a length of about 1, so
    that y and the gradients do not overflow in float16.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r = normal(B, T, H, N) / max(N, 1) ** 0.5
    k = normal(B, T, H, N) / max(N, 1) ** 0.5
    v = normal(B, T, H, N)
    decay = FASTEST * torch.sigmoid(2 * normal(B, T, H, N) - 2)
    kk = normalize(normal(B, T, H, N), dim=-1)
    rate = torch.sigmoid(normal(B, T, H, N))
    decay = decay if log_w is None else torch.full_like(decay, log_w)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = [tensor.to(device, wide if tensor is decay else dtype) for tensor in (r, decay, k, v, -kk, kk * rate)]
    return *sequences, normal(B, H, N, N).to(device, wide)


def results(operator: Callable[..., tuple[Tensor, Tensor]], inputs: WKV7Inputs) -> dict[str, Tensor]:
    """Returns y, the new state, and the gradients of a loss that depends on both, by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y, state = operator(*leaves)
    total = loss(y) + state.sin().sum()
    grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    by_name = {"y": y, "state": state} | {f"grad {name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in by_name.items()}


def tolerance(dtype: torch.dtype = torch.float32, rounded: bool = False) -> dict[str, float]:
    """Returns the tolerances for r, k, v, a and b of `dtype`.

    Half precision rounds y, grad_y and the gradients, but not the state. `rounded` means that the implementation also rounds
    the factors of products and the states between chunks (Requires.rounded).
    """
    if dtype == torch.float64:
        return dict.fromkeys(("y", "state", *(f"grad {name}" for name in NAMES)), 1e-12)
    rounding = 3 * ROUNDING.get(dtype, 0.0)
    state = max(TOLERANCE["state"], rounding if rounded else 0.0)
    gradients = {f"grad {name}": max(TOLERANCE["gradient"], rounding) for name in NAMES}
    return {"y": max(TOLERANCE["y"], rounding), "state": state, **gradients}


def double(inputs: WKV7Inputs) -> WKV7Inputs:
    return tuple(tensor.double() for tensor in inputs)
