"""Muon and NorMuon: matrices move by an orthogonal step, and everything else by AdamW: one optimiser.

    momentum <- mu momentum + (1 - mu) grad;  G = (1 - mu) grad + mu momentum;  W <- W - lr sqrt(max(1, rows / columns)) U V^T

with G = U S V^T. U V^T comes from a few Newton-Schulz iterations in bfloat16, X <- a X + (b A + c A^2) X with A = X X^T, which
bring most singular values near 1. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(kellerjordan.github.io/posts/muon, 2024). Each iteration has the coefficients that are best for where the one before leaves
the singular values: Amsel et al., "The Polar Express" (arXiv 2505.16932), algorithm 1. They need a start of at most 1, and as
near to it as may be: the first A is there before X has to be divided, and the root of its norm is a closer bound of the largest
singular value than the norm of X, by two in practice. torch.optim.Muon has five iterations with the same coefficients, from
the norm of X, one matrix after the other; here those of a shape go through each product together.

NorMuon then divides each row by the root of a running mean of its squares, so that no neuron outruns the others, and keeps the
length of the whole step. Source: Li et al., "NorMuon" (arXiv 2510.05491).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rwkv.errors import UserError

# Coefficients a, b, c of each iteration: singular values from 1/100 of the bound on come within 0.28 of 1; those below grow
# 77 times.
POLAR_EXPRESS = ((8.0132, -22.9258, 16.5994), (3.607, -2.6486, 0.5119), (2.6802, -1.998, 0.4572))
MARGIN = 1.02                            # of the bound, for what bfloat16 rounds: just above 1 the polynomials are steep
SMALLEST = 1e-14                         # norm of A that counts as none
NO_SQUARE = 1e-16                        # of a row's mean square


class Muon(torch.optim.Optimizer):
    """groups: as torch's optimisers take them; those with "orthogonal": True hold matrices, and the rest is AdamW's.

    row_beta: decay of the running mean of a row's squares; 0 for Muon, above 0 for NorMuon. direction: the function that makes
    matrices (N,O,I) orthogonal.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool,
                 momentum: float = 0.95, row_beta: float = 0.0, direction: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum})
        self.row_beta, self.direction = row_beta, direction or orthogonal
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
        saved, own = state_dict["param_groups"], self.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
        if sizes[0] != sizes[1]:
            raise UserError(f"the optimiser's state is of {sizes[0]} parameters in groups, and this one has {sizes[1]}: it is "
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
        """Moves matrices that all have the shape (O,I)."""
        gradients, mu = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None]), group["momentum"]
        momenta = self._state_of(matrices, "momentum", torch.zeros_like)
        momenta.lerp_(gradients, 1 - mu)
        steps = self.direction(gradients.lerp_(momenta, mu))
        means = self._state_of(matrices, "rows", _zero_of_each_row) if self.row_beta else None
        _move(matrices, steps, means, self.row_beta, group["lr"], group["weight_decay"])

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


def _move(matrices: list[Tensor], steps: Tensor, means: Tensor | None, beta: float, lr: float, decay: float) -> None:
    """matrices, all (O,I), by steps (N,O,I), whose rows are evened out by means (N,O,1) where there are such."""
    factors = matrices[0].new_ones(len(matrices), 1, 1) if means is None else _evening(steps, means, beta)
    rows, columns = matrices[0].shape
    factors *= -lr * math.sqrt(max(1, rows / columns))
    for matrix, step, factor in zip(matrices, steps.unbind(), factors.unbind(), strict=True):
        if decay:
            matrix.mul_(1 - lr * decay)
        matrix.addcmul_(step, factor)


def orthogonal(matrices: Tensor) -> Tensor:
    """Near U V^T, where S is not small, of each of matrices (N,O,I) = U S V^T, in bfloat16.

    Of a matrix of norm 1e-7 to 1e9; outside of that it tends to 0.
    """
    x, square = _bounded(matrices.bfloat16())
    for number, (a, b, c) in enumerate(POLAR_EXPRESS):
        square = _square(x) if number else square
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, *((factor, x) if _flat(x) else (x, factor)), beta=a)
    return x


def _bounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x and A, with no singular value of x over 1: the root of the norm of A bounds them."""
    square = _square(x)
    scale = (MARGIN * square.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)).rsqrt()
    return x * scale, square * scale.square()


def _square(x: Tensor) -> Tensor:
    """A of each of x (N,O,I): x x^T or x^T x, the smaller one."""
    return x @ x.mT if _flat(x) else x.mT @ x


def _flat(x: Tensor) -> bool:
    return x.shape[1] <= x.shape[2]


def _evening(steps: Tensor, means: Tensor, beta: float) -> Tensor:
    """What rows of steps (N,O,I) are multiplied by, (N,O,1): the inverse roots of their means, of squares over time; and what
    leaves each step its length.
    """
    squares = torch.linalg.vector_norm(steps, dim=2, keepdim=True, dtype=means.dtype).square_() / steps.shape[2]
    means.lerp_(squares, 1 - beta)
    factors = (means + NO_SQUARE).rsqrt_()
    kept = squares.sum(1, keepdim=True) / (squares * factors.square()).sum(1, keepdim=True).clamp(min=NO_SQUARE)
    return factors.mul_(kept.sqrt_())


def _zero_of_each_row(matrix: Tensor) -> Tensor:
    return matrix.new_zeros(len(matrix), 1)


def _by_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            shapes.setdefault(matrix.shape, []).append(matrix)
    return iter(shapes.values())
