"""Muon: the matrices inside of blocks move by an orthogonal step, and everything else by AdamW: one optimiser, for Lightning.

    momentum <- mu momentum + (1 - mu) grad;  G = (1 - mu) grad + mu momentum;  W <- W - lr sqrt(max(1, rows / columns)) U V^T

with G = U S V^T. U V^T comes from a few Newton-Schulz iterations in bfloat16, X <- a X + (b A + c A^2) X with A = X X^T, which
bring singular values near 1. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(kellerjordan.github.io/posts/muon, 2024). Each iteration has the coefficients that are best for where the one before leaves
the singular values: Amsel et al., "The Polar Express" (arXiv 2505.16932), algorithm 1. torch.optim.Muon has five iterations
with the same ones, one matrix after the other; here those of a shape go through each product together.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

POLAR_EXPRESS = ((8.0132, -22.9258, 16.5994), (3.607, -2.6486, 0.5119), (2.6802, -1.998, 0.4572))   # [0.01, 1] -> 1 +- 0.28
SMALLEST = 1e-7                          # norm of a gradient that counts as none


class Muon(torch.optim.Optimizer):
    """groups: as torch's optimisers take them; those with "orthogonal": True hold matrices, and the rest is AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool,
                 momentum: float = 0.95, iterations: Coefficients = POLAR_EXPRESS) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum})
        self.iterations = iterations
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
        self._stacks: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}       # by shape: whose momenta, and those

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["orthogonal"]]

    def _step_of(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients, momenta = _stacked([matrix.grad for matrix in matrices if matrix.grad is not None]), self._momenta(matrices)
        momenta.lerp_(gradients, 1 - group["momentum"])
        steps = orthogonal(gradients.lerp_(momenta, group["momentum"]), self.iterations).to(momenta.dtype)
        for matrix, step in zip(matrices, steps.unbind(), strict=True):
            if group["weight_decay"]:
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
            rows, columns = matrix.shape
            matrix.add_(_wide(matrix, step), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))

    def _momenta(self, matrices: list[Tensor]) -> Tensor:
        """Those of matrices, stacked; the state of each is a view of its own."""
        shape, whose = tuple(sorted(matrices[0].shape)), list(map(id, matrices))
        if self._stacks.get(shape, (None, None))[0] != whose:
            stack = _stacked([self.state[matrix].get("momentum", torch.zeros_like(matrix)) for matrix in matrices])
            for matrix, momentum in zip(matrices, stack.unbind(), strict=True):
                self.state[matrix]["momentum"] = _wide(matrix, momentum)
            self._stacks[shape] = whose, stack
        return self._stacks[shape][1]


def orthogonal(matrices: Tensor, iterations: Coefficients = POLAR_EXPRESS) -> Tensor:
    """Near U V^T of each of matrices (N,O,I) = U S V^T with O <= I, in bfloat16."""
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for a, b, c in iterations:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def _stacked(matrices: list[Tensor]) -> Tensor:
    """(N,O,I) with O <= I: the transposed where a matrix is taller than wide."""
    return torch.stack([_wide(matrix, matrix) for matrix in matrices])


def _wide(like: Tensor, x: Tensor) -> Tensor:
    """x, transposed where `like` is taller than wide."""
    return x.mT if like.shape[0] > like.shape[1] else x


def _by_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient; a matrix and a transposed one are of a shape."""
    shapes: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            shapes.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    return iter(shapes.values())
