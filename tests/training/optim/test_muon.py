"""Tests that Muon updates matrices like torch's Muon and the rest like torch's AdamW, and continues bit for bit."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from rwkv.errors import UserError
from rwkv.training.optim.muon import Muon, orthogonal

SHAPES = ((8, 8), (8, 8), (16, 8), (8, 16), (16, 8))
TORCH_OPTIONS = (3.4445, -4.7750, 2.0315), 5, 1e-7       # coefficients, iterations, smallest norm


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape) / 4) for shape in SHAPES]


def vectors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.ones(5, 3))]


def groups(hidden: list[nn.Parameter], others: list[nn.Parameter], decay: float) -> list[dict[str, object]]:
    return [{"params": hidden, "lr": 0.02, "weight_decay": decay, "orthogonal": True},
            {"params": others, "lr": 0.003, "weight_decay": 0.0}]


def muon(hidden: list[nn.Parameter], others: list[nn.Parameter], row_beta: float = 0.0, decay: float = 0.1,
         orthogonalize: Callable[[Tensor], Tensor] = orthogonal) -> Muon:
    return Muon(groups(hidden, others, decay), lr=0.003, betas=(0.9, 0.99), eps=1e-8, fused=True,
                row_beta=row_beta, orthogonalize=orthogonalize)


def train(parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: int,
          start: int = 0) -> list[Tensor]:
    for step in range(start, start + steps):
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_matrices_are_updated_as_by_torchs_muon_and_the_rest_as_by_adamw() -> None:
    def newton_schulz(matrices: Tensor) -> Tensor:
        return torch.stack([_zeropower_via_newtonschulz(matrix, *TORCH_OPTIONS) for matrix in matrices])

    hidden, others = matrices(), vectors()
    actual = train([*hidden, *others], [muon(hidden, others, orthogonalize=newton_schulz)], steps=4)
    hidden, others = matrices(), vectors()
    apart = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1), torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.99),
                                                                                  weight_decay=0.0, fused=True)]
    expected = train([*hidden, *others], apart, steps=4)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert not torch.equal(one, [*matrices(), *vectors()][number])
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if number < len(SHAPES) else 0)


@pytest.mark.parametrize("row_beta", [0.0, 0.9])
def test_training_continues_from_a_saved_state_bit_for_bit(row_beta: float) -> None:
    hidden, others = matrices(), vectors()
    optimizer = muon(hidden, others, row_beta)
    train([*hidden, *others], [optimizer], steps=3)
    state, (copied, rest) = copy.deepcopy(optimizer.state_dict()), copy.deepcopy((hidden, others))
    expected = train([*hidden, *others], [optimizer], steps=3, start=3)
    again = muon(copied, rest, row_beta)
    again.load_state_dict(state)
    for one, other in zip(train([*copied, *rest], [again], steps=3, start=3), expected, strict=True):
        assert torch.equal(one, other)


def test_a_schedule_applies_to_both_kinds_of_groups() -> None:
    hidden, others = matrices(), vectors()
    optimizer = muon(hidden, others)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 1))
    parameters = [*hidden, *others]
    states = [train(parameters, [], 0)]
    for step in range(2):
        states.append(train(parameters, [optimizer], 1, start=step))
        schedule.step()
    moved = [[not torch.equal(*pair) for pair in zip(before, after, strict=True)] for before, after in pairwise(states)]
    assert moved == [[True] * len(parameters), [False] * len(parameters)]


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 4, 12), (2, 12, 4)])
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e6])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int, int], size: float) -> None:
    """Singular values of at least 0.03 times the largest come near one. Smaller ones grow, and no new direction appears."""
    torch.manual_seed(1)
    U, _, Vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.tensor([1.0, 0.7, 0.3, 0.1, 0.03, 0.005])[:min(shape[1:])]
    inside = U.mT @ orthogonal(size * U @ torch.diag(values) @ Vh).float() @ Vh.mT
    near_one = torch.linalg.diagonal(inside)[:, :5]
    assert (near_one - 1).abs().max() < 0.35
    assert (torch.linalg.diagonal(inside)[:, 5:] > 60 * 0.005 / 1.5).all()
    assert (inside - torch.diag_embed(torch.linalg.diagonal(inside))).abs().max() < 0.15


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_no_singular_value_outgrows_the_others(rank: int) -> None:
    """The bound also holds for a single direction, which meets the bound exactly before bfloat16 rounds beyond it."""
    torch.manual_seed(4)
    many = torch.randn(50, 8, rank) @ torch.linalg.qr(torch.randn(50, 24, rank))[0].mT
    assert torch.linalg.svdvals(orthogonal(many).float()).max() < 1.65


def test_a_zero_gradient_gives_a_zero_direction() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


def test_each_matrix_keeps_its_state_when_some_matrices_have_no_gradient() -> None:
    """The states of all matrices of one shape are in one stack."""
    together, alone = matrices(), matrices()
    optimizer, apart = muon(together, [], row_beta=0.9), [muon([matrix], [], row_beta=0.9) for matrix in alone]
    for step, moved in enumerate(({0, 1, 2, 3, 4}, {0, 3}, {1, 2, 4}, {0, 1, 2, 3, 4})):
        for number, pair in enumerate(zip(together, alone, strict=True)):
            gradient = torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * step + number))
            for matrix in pair:
                matrix.grad = gradient.clone() if number in moved else None
        for one in (optimizer, *apart):
            one.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)       # directions are computed in bfloat16


def test_rows_that_change_much_are_damped_and_the_step_keeps_its_length() -> None:
    """Three steps follow NorMuon's formula."""
    torch.manual_seed(2)
    matrix, mean = nn.Parameter(torch.zeros(6, 9)), torch.zeros(6, 1)
    optimizer = muon([matrix], [], row_beta=0.9)
    plain = muon([nn.Parameter(torch.zeros(6, 9))], [])
    for _ in range(3):
        before, gradient = matrix.detach().clone(), torch.randn(6, 9) * torch.linspace(0.1, 3, 6)[:, None]
        for one in (optimizer, plain):
            one.param_groups[0]["weight_decay"] = 0.0
            one.param_groups[0]["params"][0].grad = gradient.clone()
        start = plain.param_groups[0]["params"][0].detach().clone()
        optimizer.step()
        plain.step()
        step, muons = before - matrix.detach(), start - plain.param_groups[0]["params"][0].detach()
        mean = 0.9 * mean + 0.1 * muons.square().mean(1, keepdim=True)
        expected = muons / mean.sqrt()
        torch.testing.assert_close(step, expected * muons.norm() / expected.norm(), rtol=1e-4, atol=1e-7)


def test_the_next_step_starts_from_the_current_state() -> None:
    """Replacing or clearing the state takes effect. Lightning replaces the state to move it to another device."""
    torch.manual_seed(3)
    gradients = [torch.randn(4, 6) for _ in range(2)]

    def train_with(change: Callable[[Muon], None]) -> tuple[Tensor, Muon]:
        matrix = nn.Parameter(torch.zeros(4, 6))
        optimizer = muon([matrix], [], row_beta=0.9)
        for gradient in gradients:
            matrix.grad = gradient.clone()
            optimizer.step()
            change(optimizer)
        return matrix.detach(), optimizer

    def copy_state(optimizer: Muon) -> None:
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}

    expected, _ = train_with(lambda optimizer: None)
    assert torch.equal(train_with(copy_state)[0], expected)
    without_state, optimizer = train_with(lambda optimizer: optimizer.state.clear())
    assert not torch.equal(without_state, expected)
    optimizer.step()
    assert set(next(iter(optimizer.state.values()))) == {"momentum", "rows"}


def test_the_state_of_other_groups_is_refused_in_one_sentence() -> None:
    hidden, others = matrices(), vectors()
    state = muon(hidden, others).state_dict()
    with pytest.raises(UserError):
        muon(hidden[1:], [*others, hidden[0]]).load_state_dict(state)
