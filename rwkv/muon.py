"""Muon: the matrices inside of blocks move by an orthogonal step, and everything else by AdamW: one optimiser, for Lightning.

    momentum <- mu momentum + (1 - mu) grad;  G = (1 - mu) grad + mu momentum;  W <- W - lr sqrt(max(1, rows / columns)) U V^T

with G = U S V^T. U V^T comes from a few Newton-Schulz iterations in bfloat16, X <- a X + (b A + c A^2) X with A = X X^T, which
bring every singular value near 1. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(kellerjordan.github.io/posts/muon, 2024). torch.optim.Muon does the same one matrix after the other; here those of a shape go
through each product together, which for narrow models on a CPU is four times faster.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315   # of the iteration: steepest at 0
SMALLEST = 1e-7                          # norm of a gradient that counts as none


class Muon(torch.optim.Optimizer):
    """groups: as torch's optimisers take them; those with "orthogonal": True hold matrices, and the rest is AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool,
                 momentum: float = 0.95, iterations: int = 5) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum,
                                  "iterations": iterations})
        self._adamw = torch.optim.AdamW(self._others(), lr=lr, betas=betas, eps=eps, fused=fused)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As torch's optimisers do."""
        loss = self._adamw.step(closure)
        for group in self.param_groups:
            if group["orthogonal"]:
                for alike in _by_shape(group["params"]):
                    self._step_of(alike, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Groups and state are one thing, for schedules and checkpoints; AdamW works on its part of them."""
        self._adamw.param_groups, self._adamw.state = self._others(), self.state

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["orthogonal"]]

    def _step_of(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients, mu = [matrix.grad for matrix in matrices if matrix.grad is not None], group["momentum"]
        momenta = [self._momentum(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - mu)
        torch._foreach_lerp_(gradients, momenta, mu)         # the gradient is used up
        steps = orthogonal(torch.stack(gradients), group["iterations"])
        rows, columns = matrices[0].shape
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, list(steps.to(matrices[0].dtype)), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        return state["momentum"]


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Near U V^T of each of matrices (N,O,I) = U S V^T, in bfloat16: singular values within some 30 % of 1."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for _ in range(iterations):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def _by_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            shapes.setdefault(matrix.shape, []).append(matrix)
    return iter(shapes.values())
