"""Tests properties of WKV-7 alone, for each implementation: the ends of its range, pieces of a sequence, and NaN.

test_conformance.py tests what all operators have in common.
"""

from typing import Any

import pytest
import torch
from implementations import cache_results, implementations
from torch import Tensor

from kernels.compare import err_ratio, errors, misses
from kernels.wkv7 import WKV7, cases, empty_state

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=implementations("wkv7"))
def wkv7(request: pytest.FixtureRequest) -> WKV7:
    return WKV7(request.param)


def wrong(wkv7: WKV7, inputs: cases.WKV7Inputs, slow_decay: bool = False) -> dict[str, str]:
    """Returns the errors above the tolerance.

    With `slow_decay` each step multiplies by a factor near 1, which CUDA's exp may round to the second nearest number. CUDA is
    therefore allowed twice the error.
    """
    times = 2 if slow_decay and inputs[0].is_cuda else 1
    allowed = {name: times * error for name, error in cases.tolerance().items()}
    return misses(errors(cases.results(wkv7, inputs), reference(inputs)), allowed)


@cache_results
def reference(inputs: cases.WKV7Inputs) -> dict[str, Tensor]:
    return cases.results(WKV7("reference"), cases.double(inputs))


def replace(inputs: cases.WKV7Inputs, **new: Tensor) -> cases.WKV7Inputs:
    return tuple(new.get(name, tensor) for name, tensor in zip(cases.NAMES, inputs, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("log_w", [cases.FASTEST, cases.SLOWEST, 0.0])
def test_the_ends_of_the_range_of_decay(wkv7: WKV7, log_w: float, device: str) -> None:
    """The sequence has several chunks in every implementation."""
    assert not wrong(wkv7, cases.inputs(1, 150, 2, 64, log_w=log_w, device=device), slow_decay=log_w == cases.SLOWEST)


@pytest.mark.thorough
def test_k_of_0_and_a_direction_of_norm_0(wkv7: WKV7, device: str) -> None:
    inputs = cases.inputs(2, 70, 1, 64, device=device)
    zero = torch.zeros_like(inputs[0])
    for new in ({"k": zero}, {"a": zero, "b": zero}, {"r": zero}, {"v": zero}, {"state": torch.zeros_like(inputs[6])}):
        assert not wrong(wkv7, replace(inputs, **new)), list(new)


def test_the_same_direction_at_every_step(wkv7: WKV7, device: str) -> None:
    """A text that repeats one token has such inputs; at the full rate and nearly without decay, sums of powers lose digits."""
    inputs = cases.inputs(1, 150, 2, 64, log_w=cases.SLOWEST, device=device)
    same = inputs[4][:, :1].expand_as(inputs[4]).contiguous()
    assert not wrong(wkv7, replace(inputs, a=same, b=-same), slow_decay=True)


def test_heads_of_another_width(wkv7: WKV7, device: str) -> None:
    assert not wrong(wkv7, cases.inputs(1, 40, 2, 128, device=device))


def test_no_state_is_the_empty_state(device: str) -> None:
    wkv7, sequences = WKV7("reference"), cases.inputs(2, 20, 2, 64, device=device)[:6]
    actual = wkv7(*sequences)
    expected = wkv7(*sequences, empty_state(2, 2, 64, device))
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_pieces_of_a_sequence_give_the_results_of_the_whole(wkv7: WKV7, device: str) -> None:
    """The gradients flow through the states between the pieces."""
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 75, 2, 64, device=device)]

    def in_pieces(lengths: tuple[int, ...]) -> list[Tensor]:
        *sequences, state = inputs
        ys = []
        for pieces in zip(*(sequence.split(lengths, 1) for sequence in sequences), strict=True):
            y, state = wkv7(*pieces, state)
            ys.append(y)
        y = torch.cat(ys, 1)
        return [y, state, *torch.autograd.grad((y.square().sum() + state.sin().sum()), inputs)]

    assert all(err_ratio(*pair) < 5e-6 for pair in zip(in_pieces((1, 10, 64)), in_pieces((75,)), strict=True))


def test_a_step_is_a_sequence_of_one(wkv7: WKV7, device: str) -> None:
    *sequences, state = cases.inputs(3, 1, 2, 64, device=device)
    y, after = wkv7(*sequences, state)
    y_step, after_step = WKV7.step(*(sequence[:, 0] for sequence in sequences), state)
    assert err_ratio(y[:, 0], y_step) < 1e-6
    assert err_ratio(after, after_step) < 1e-6


def test_state_gradient_alone(wkv7: WKV7, device: str) -> None:
    """The loss depends on the outgoing state but not on y."""
    def gradients(operator: WKV7, inputs: Any) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(operator(*leaves)[1].square().sum(), leaves, materialize_grads=True)

    inputs = cases.inputs(1, 66, 2, 64, device=device)
    actual, exact = gradients(wkv7, inputs), gradients(WKV7("reference"), cases.double(inputs))
    assert all(err_ratio(*pair) < 1e-5 for pair in zip(actual, exact, strict=True))


def test_gradients_are_0_after_the_last_read_and_before_the_first_input(wkv7: WKV7, device: str) -> None:
    """After the last step that the loss reads, all gradients are 0.

    As long as the state and all v so far are 0, the gradients of r, log_w and a are 0.
    """
    first_v, read, inputs = 21, 45, cases.inputs(1, 70, 2, 64, device=device)
    v, state = inputs[3].clone(), torch.zeros_like(inputs[6])
    v[:, :first_v] = 0
    v[:, first_v + 5:] *= 1e6
    leaves = [tensor.detach().requires_grad_() for tensor in replace(inputs, v=v, state=state)]
    y, _ = wkv7(*leaves)
    grads = dict(zip(cases.NAMES, torch.autograd.grad(y[:, :read].square().sum(), leaves), strict=True))
    for name in cases.NAMES[:6]:
        assert not grads[name][:, read:].any(), name
    for name, last in (("r", first_v - 1), ("log_w", first_v), ("a", first_v)):
        assert not grads[name][:, :last + 1].any(), name


def test_nan_stays_in_its_head_and_reaches_no_earlier_step(wkv7: WKV7, device: str) -> None:
    """One number of each input is NaN in turn; in r it affects only its own step."""
    t, inputs = 20, cases.inputs(2, 40, 2, 64, device=device)
    expected, _ = wkv7(*inputs)
    for name in cases.NAMES[:6]:
        bad = inputs[cases.NAMES.index(name)].clone()
        bad[1, t, 0, 5] = float("nan")
        y, _ = wkv7(*replace(inputs, **{name: bad}))
        assert torch.equal(y[0], expected[0]), name
        assert torch.equal(y[1, :, 1], expected[1, :, 1]), name
        assert torch.equal(y[1, :t, 0], expected[1, :t, 0]), name
        assert not y[1, t, 0].isfinite().all() or name == "v", name
        assert y[1, t:, 0].isnan().any(), name
        if name == "v":
            assert torch.equal(y[..., 6:], expected[..., 6:]), "other rows of the state"
        if name == "r":
            assert torch.equal(y[1, t + 1:], expected[1, t + 1:]), "other steps"
