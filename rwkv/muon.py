"""Muon and NorMuon: matrices move by an orthogonal step, and everything else by AdamW: one optimiser.

    momentum <- mu momentum + (1 - mu) grad;  G = (1 - mu) grad + mu momentum;  W <- W - lr sqrt(max(1, rows / columns)) U V^T

with G = U S V^T. U V^T comes from a few Newton-Schulz iterations in bfloat16, X <- a X + (b A + c A^2) X with A = X X^T, which
bring most singular values near 1. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(kellerjordan.github.io/posts/muon, 2024). Each iteration has the coefficients that are best for where the one before leaves
the singular values: Amsel et al., "The Polar Express" (arXiv 2505.16932), algorithm 1. torch.optim.Muon has five iterations
with the same ones, one matrix after the other; here those of a shape go through each product together.

NorMuon then divides each row by the root of a running mean of its squares, so that no neuron outruns the others, and keeps the
length of the whole step. Source: Li et al., "NorMuon" (arXiv 2510.05491).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

# For singular values from a hundredth of the norm on, which come within 0.28 of 1; those below grow 77 times.
POLAR_EXPRESS = ((8.0132, -22.9258, 16.5994), (3.607, -2.6486, 0.5119), (2.6802, -1.998, 0.4572))
SMALLEST = 1e-7                          # norm of a gradient that counts as none
NO_SQUARE = 1e-16                        # of a row's mean square


class Muon(torch.optim.Optimizer):
    """groups: as torch's optimisers take them; those with "orthogonal": True hold matrices, and the rest is AdamW's.

    row_beta: of the running mean of a row's squares, 0 for Muon and above it for NorMuon.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool,
                 momentum: float = 0.95, iterations: Coefficients = POLAR_EXPRESS, row_beta: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum})
        self.iterations, self.row_beta = iterations, row_beta
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
        """Raises ValueError where it is of other groups: of a run whose matrices were divided otherwise."""
        sizes = [[len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the optimiser's state is of {sizes[0]} parameters in groups, and this one has {sizes[1]}: it is "
                             "of another recipe, or another version of this program; begin anew from its weights, init_from=")
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Groups and state are one thing, for schedules and checkpoints; AdamW works on its part of them."""
        self._adamw.param_groups, self._adamw.state = self._others(), self.state
        self._stacks: dict[tuple[str, torch.Size], tuple[Tensor, tuple[Tensor, ...]]] = {}       # and its views

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["orthogonal"]]

    def _step_of(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """All of one shape, (O,I)."""
        gradients, mu = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None]), group["momentum"]
        momenta = self._state_of(matrices, "momentum", torch.zeros_like)
        momenta.lerp_(gradients, 1 - mu)
        steps = orthogonal(gradients.lerp_(momenta, mu), self.iterations).to(momenta.dtype)
        if self.row_beta:
            _even_out(steps, self._state_of(matrices, "rows", _zero_of_each_row), self.row_beta)
        rows, columns = matrices[0].shape
        if group["weight_decay"]:
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, list(steps.unbind()), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))

    def _state_of(self, matrices: list[Tensor], name: str, first: Callable[[Tensor], Tensor]) -> Tensor:
        """What the state of each of matrices has under `name`, stacked; that is, and stays, views of it."""
        place, held = (name, matrices[0].shape), [self.state[matrix].get(name) for matrix in matrices]
        stack, views = self._stacks.get(place, (None, ()))
        if stack is None or len(held) != len(views) or any(one is not other for one, other in zip(held, views, strict=True)):
            stack = torch.stack([first(matrix) if one is None else one for matrix, one in zip(matrices, held, strict=True)])
            views = stack.unbind()
            for matrix, view in zip(matrices, views, strict=True):
                self.state[matrix][name] = view
            self._stacks[place] = stack, views
        return stack


def orthogonal(matrices: Tensor, iterations: Coefficients = POLAR_EXPRESS) -> Tensor:
    """Near U V^T, where S is not small, of each of matrices (N,O,I) = U S V^T, in bfloat16."""
    flat = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if flat else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    if x.shape[2] >= 2 * x.shape[1] and len(iterations) > 1:
        x, iterations = _twice(x, *iterations[:2]), iterations[2:]
    for a, b, c in iterations:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if flat else x.mT


def _twice(x: Tensor, first: tuple[float, float, float], second: tuple[float, float, float]) -> Tensor:
    """Two iterations, x <- Q P x, made of A = x x^T and P A P, which are smaller than x; more than two lose digits of A."""
    square = x @ x.mT
    P = _factor(square, *first)
    return _factor(P @ (square @ P), *second) @ P @ x


def _factor(square: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b A + c A^2"""
    factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


def _even_out(steps: Tensor, means: Tensor, beta: float) -> None:
    """Divides the rows of steps (N,O,I) by the roots of their means (N,O,1), of squares over time; the length of each stays."""
    squares = steps.square().mean(2, keepdim=True)
    means.lerp_(squares, 1 - beta)
    factors = (means + NO_SQUARE).rsqrt_()
    kept = squares.sum(1, keepdim=True) / (squares * factors.square()).sum(1, keepdim=True).clamp(min=NO_SQUARE)
    steps.mul_(factors.mul_(kept.sqrt_()))


def _zero_of_each_row(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(len(matrix), 1)


def _by_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            shapes.setdefault(matrix.shape, []).append(matrix)
    return iter(shapes.values())
