"""Implements Muon and NorMuon: matrices get orthogonalised updates, and all other parameters get the updates of AdamW.

    momentum <- mu momentum + (1 - mu) grad;  G = (1 - mu) grad + mu momentum;  W <- W - lr sqrt(max(1, rows / columns)) U V^T

with G = U S V^T. A few Newton-Schulz iterations, X <- a X + (b A + c A^2) X with A = X X^T, bring most singular values near 1
and so approximate U V^T. bfloat16 is precise enough for the iterations. On a CPU without bfloat16 instructions they are
computed in float32, which is 30 times as fast there. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in
neural networks" (kellerjordan.github.io/posts/muon, 2024).

The coefficients of each iteration are optimal for the singular values that the previous iteration leaves. Source: Amsel et al.,
"The Polar Express" (arXiv 2505.16932), algorithm 1. The coefficients require a largest singular value of at most 1 and close to
1. As a bound on the largest singular value, the root of the norm of A is about twice as tight as the norm of X, and the first
iteration computes A anyway. torch.optim.Muon has five iterations with equal coefficients, scales by the norm of X, and loops
over matrices. This module batches the products of all matrices of one shape.

NorMuon then divides each row by the root of a running mean of its squares, so that all neurons move by similar amounts, and
preserves the norm of the whole step. Source: Li et al., "NorMuon" (arXiv 2510.05491).
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import ParamsT

from kernels.machine.cpu import matrix_dtype
from rwkv.errors import UserError
from rwkv.io.json_types import StateDict

# Each iteration has coefficients a, b and c. Singular values above 1/100 of the bound on the largest end within 0.28 of 1.
# Smaller values grow by a factor of 77.
POLAR_EXPRESS = ((8.0132, -22.9258, 16.5994), (3.607, -2.6486, 0.5119), (2.6802, -1.998, 0.4572))
MARGIN = 1.02                            # multiplies the bound, because bfloat16 rounds and the polynomials are steep above 1
SMALLEST_NORM = 1e-14                    # prevents a division by 0, as a lower bound on the norm of A
SMALLEST_SQUARE = 1e-16                  # prevents a division by 0, as a lower bound on the mean square of a row


class Muon(torch.optim.Optimizer):
    """Muon or NorMuon, as an optimiser with the interface of torch's optimisers.

    Args:
        groups: the parameter groups. Matrices in groups with "orthogonal": True get orthogonalised updates, and parameters in
            all other groups get the updates of AdamW.
        row_beta: the decay of the running mean of a row's squares, which is 0 for Muon and above 0 for NorMuon.
        orthogonalize: a function that replaces `orthogonal`.
    """

    def __init__(self, groups: ParamsT, lr: float, betas: tuple[float, float], eps: float, fused: bool,
                 momentum: float = 0.95, row_beta: float = 0.0,
                 orthogonalize: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum})
        self.row_beta = row_beta
        self.orthogonalize = orthogonalize or orthogonal
        self._adamw = torch.optim.AdamW(self._adamw_groups(), lr=lr, betas=betas, eps=eps, fused=fused)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = self._adamw.step(closure)
        for group in self.param_groups:
            if group["orthogonal"]:
                for matrices in _group_by_shape(group["params"]):
                    self._step_matrices(matrices, group)
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state. Raises UserError if the sizes of the state's groups differ from those of this optimiser."""
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise UserError(f"the checkpoint's optimiser has parameter groups of sizes {saved_sizes}, but this run's optimiser "
                            f"has groups of sizes {sizes}: the checkpoint is from a different recipe or version. To keep the "
                            "weights, start a new run with init_from=")
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        # Schedules and checkpoints must see one optimiser, so the inner AdamW has the same groups and state
        self._adamw.param_groups = self._adamw_groups()
        self._adamw.state = self.state
        self._stacks: dict[tuple[str, torch.Size], tuple[Tensor, tuple[Tensor, ...]]] = {}       # each stack and its views

    def _adamw_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["orthogonal"]]

    def _step_matrices(self, matrices: list[Tensor], group: Mapping[str, float]) -> None:
        """Updates matrices that all have gradients and the shape (O,I)."""
        mu = group["momentum"]
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        momenta = self._stacked_state(matrices, "momentum", torch.zeros_like)
        momenta.lerp_(gradients, 1 - mu)
        steps = _apply_to_whole(self.orthogonalize, gradients.lerp_(momenta, mu))
        means = None
        if self.row_beta:
            means = self._stacked_state(matrices, "rows", lambda matrix: matrix.new_zeros(len(matrix), 1))
        _update(matrices, steps, means, self.row_beta, group["lr"], group["weight_decay"])

    def _stacked_state(self, matrices: list[Tensor], name: str, initial: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the state `name` of all matrices as one stacked tensor. The state of each matrix is a view of the stack.

        The stack is rebuilt if a different set of matrices has gradients, or if load_state_dict has replaced the state.
        """
        key = name, matrices[0].shape
        states = [self.state[matrix].get(name) for matrix in matrices]
        stack, views = self._stacks.get(key, (None, ()))
        if stack is None or len(states) != len(views) or any(map(operator.is_not, states, views)):
            stack = torch.stack([initial(matrix) if state is None else state
                                 for matrix, state in zip(matrices, states, strict=True)])
            views = stack.unbind()
            for matrix, view in zip(matrices, views, strict=True):
                self.state[matrix][name] = view
            self._stacks[key] = stack, views
        return stack


def _update(matrices: list[Tensor], steps: Tensor, means: Tensor | None, beta: float, lr: float, decay: float) -> None:
    """Updates N matrices (O,I) by steps (N,O,I). Given means (N,O,1), scales the rows of the steps as in NorMuon."""
    factors = matrices[0].new_ones(len(matrices), 1, 1) if means is None else _normuon_scale(steps, means, beta)
    rows, columns = matrices[0].shape
    factors *= -lr * math.sqrt(max(1, rows / columns))
    for matrix, step, factor in zip(matrices, steps.unbind(), factors.unbind(), strict=True):
        if decay:
            matrix.mul_(1 - lr * decay)
        matrix.addcmul_(step, factor)


def _apply_to_whole(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Returns function(matrices) for matrices (N,O,I), of which each process holds some rows with trainer=fsdp.

    The matrices are redistributed, so that each process applies the function to N / processes whole matrices. Then each process
    receives its rows of the result.
    """
    if not isinstance(matrices, DTensor):
        return function(matrices)
    mesh, by_matrix = matrices.device_mesh, [Shard(0)]
    result = function(matrices.redistribute(placements=by_matrix).to_local())
    sharded = DTensor.from_local(result, mesh, by_matrix, run_check=False, shape=matrices.shape, stride=matrices.stride())
    return sharded.redistribute(placements=matrices.placements)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns approximately U V^T for each of the matrices (N,O,I) = U S V^T.

    The dtype of the result is that of kernels.machine.cpu.matrix_dtype. Singular values far below the largest stay below 1. The
    norm of a matrix may be 1e-7 to 1e9. Outside of this range the result tends to 0.
    """
    x, gram = _bound_norm(matrices.to(matrix_dtype(matrices.device)))
    for number, (a, b, c) in enumerate(POLAR_EXPRESS):
        gram = _gram(x) if number else gram
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((factor, x) if _is_wide(x) else (x, factor)), beta=a)
    return x


def _bound_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales x and its Gram matrix A by the bound sqrt(norm_F(A)), so that the spectral norm of x is at most 1."""
    gram = _gram(x)
    scale = (MARGIN * gram.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)).rsqrt()
    return x * scale, gram * scale.square()


def _gram(x: Tensor) -> Tensor:
    # Of the Gram matrices x x^T and x^T x, the smaller suffices
    return x @ x.mT if _is_wide(x) else x.mT @ x


def _is_wide(x: Tensor) -> bool:
    return x.shape[1] <= x.shape[2]


def _normuon_scale(steps: Tensor, means: Tensor, beta: float) -> Tensor:
    """Returns the factors (N,O,1) of the rows of steps (N,O,I), and updates the running means (N,O,1) of the rows' squares.

    The factor of a row is the inverse root of the row's mean. Another factor for each matrix keeps the norm of the matrix's
    step.
    """
    squares = torch.linalg.vector_norm(steps, dim=2, keepdim=True, dtype=means.dtype).square_() / steps.shape[2]
    means.lerp_(squares, 1 - beta)
    factors = (means + SMALLEST_SQUARE).rsqrt_()
    ratio = squares.sum(1, keepdim=True) / (squares * factors.square()).sum(1, keepdim=True).clamp(min=SMALLEST_SQUARE)
    return factors.mul_(ratio.sqrt())    # `ratio` must not change in place, because it is a partial sum if matrices are sharded


def _group_by_shape(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            shapes.setdefault(matrix.shape, []).append(matrix)
    return iter(shapes.values())
