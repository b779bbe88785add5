"""Implements AdamW with both moments in 8 bits. The moments take a quarter of the memory that float32 moments take.

The update is torch's AdamW in float32. A moment is quantised in blocks of BLOCK numbers. Each number is an 8-bit code for one
of 256 levels, times the largest magnitude of the block. The levels are dense near 0: each decade from 1 down to 1e-7 is divided
into equal steps, and has twice as many steps as the next lower decade. Source: Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (arXiv 2110.02861), section 2.

A second moment above 0 is never rounded to 0, because the next small gradient would then cause a large step. Source: Li et al.,
"Memory Efficient Optimizers with 4-bit States" (arXiv 2309.01507), section 4.

Parameters of fewer than LEAST numbers, such as a block's vectors, have float32 moments. So do parameters whose size is not a
multiple of BLOCK. The state consists of plain tensors, so that checkpoints can be read without another library.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from rwkv.io.json_types import StateDict

BLOCK = 256                              # a block has this many numbers, which share a scale
LEAST = 4096                             # smaller parameters have no 8-bit moments
CHUNK = 2 ** 23                          # numbers updated at a time, which bounds the float32 copies; a multiple of BLOCK
WORK = 5                                 # float32 copies of a chunk: two moments, and temporaries for rounding
SMALLEST_SCALE = torch.finfo(torch.float32).tiny         # prevents a division by 0
DECADES = 7                              # the levels span the decades from 1 down to 1e-7
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}         # maps torch's names to True if the moment has a sign
SCALE = "_scale"                         # a moment's name with this suffix names the scales


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments. The arguments are as for torch.optim.AdamW, and the parameters must be contiguous."""

    def __init__(self, groups: ParamsT, lr: float, betas: tuple[float, float], eps: float,
                 fused: bool = True) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state without conversion. torch's own method would convert the codes to the parameters' dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {name: value.to(device, copy=True) for name, value in state.items()}

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter))
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)      # type: ignore[union-attr]
        for moments, chunk in _moments_in_chunks(state, parameter.numel()):
            adamw([weights[chunk]], [gradients[chunk]], [moments["exp_avg"]], [moments["exp_avg_sq"]], [],
                  [state["step"].clone()],       # torch increments its argument, and each chunk needs the same step
                  fused=group["fused"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                  weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
        state["step"] += 1


def has_8bit_moments(numbers: int) -> bool:
    """Returns True if a parameter with this many numbers has 8-bit moments."""
    return numbers >= LEAST and numbers % BLOCK == 0


def moment_bytes(numbers: int) -> float:
    """Returns the bytes of both moments of a parameter with this many numbers."""
    return len(MOMENTS) * numbers * (1 + 4 / BLOCK if has_8bit_moments(numbers) else 4)


def _initial_state(parameter: Tensor) -> dict[str, Tensor]:
    numbers, device = parameter.numel(), parameter.device
    state = {"step": torch.zeros((), device=device)}
    for name, signed in MOMENTS.items():
        if has_8bit_moments(numbers):
            zero = int((_levels(signed, device) == 0).nonzero())
            state[name] = torch.full((numbers,), zero, dtype=torch.uint8, device=device)
            state[name + SCALE] = torch.zeros(numbers // BLOCK, device=device)
        else:
            state[name] = torch.zeros(numbers, device=device)
    return state


def _moments_in_chunks(state: dict[str, Tensor], numbers: int) -> Iterator[tuple[dict[str, Tensor], slice]]:
    """Yields each chunk's float32 moments and slice, then stores the moments, which the caller has updated in place."""
    if not has_8bit_moments(numbers):
        yield {name: state[name] for name in MOMENTS}, slice(0, numbers)
        return
    for start in range(0, numbers, CHUNK):
        chunk, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        moments = {name: dequantise(state[name][chunk], state[name + SCALE][blocks], signed)
                   for name, signed in MOMENTS.items()}
        yield moments, chunk
        for name, signed in MOMENTS.items():
            state[name][chunk], state[name + SCALE][blocks] = quantise(moments[name], signed)


def quantise(numbers: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantises numbers (n,) float32. Returns the codes (n,) uint8 of the nearest levels, and the scales (n / BLOCK,)."""
    blocks = numbers.view(-1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, 1)
    normal = blocks / scales.clamp(min=SMALLEST_SCALE).unsqueeze(1)
    return torch.bucketize(normal, _upper_limits(signed, numbers.device), out_int32=True).to(torch.uint8).view(-1), scales


def dequantise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Inverts `quantise`. Returns the numbers (n,) float32 for codes (n,) uint8 and scales (n / BLOCK,)."""
    levels = _levels(signed, codes.device)
    return (levels[codes.int()].view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    # The 256 levels are 0, 1 and the midpoints of the steps
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (DECADES - signed - decade) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** -decade
        levels += [middles, -middles] if signed else [middles]
    return torch.cat(levels).sort().values.to(device)


@cache
def _upper_limits(signed: bool, device: torch.device) -> Tensor:
    # The upper limit of a level is the midpoint to the next level; the last level has none
    levels = _levels(signed, device)
    limits = (levels[1:] + levels[:-1]) / 2
    if not signed:                       # only 0 itself is rounded to 0
        limits[0] = 0
    return limits
