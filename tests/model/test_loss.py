"""Tests that the fused loss has the value and gradient of plain cross-entropy, and that L2Wrap is a part of its gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import small_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv.config import OptimConfig
from rwkv.model import loss
from rwkv.model.loss import IGNORED, head_loss
from rwkv.training.task import LanguageModel


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a chunk to 512 rows of 11 logits, so that small inputs have several chunks, and shortens the argmax's blocks."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 512 * 11)
    monkeypatch.setattr(loss, "ARGMAX_BLOCK", 16)


def problem(N: int, C: int = 6, V: int = 11, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N)
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.randperm(N, generator=generator)[:ignored]] = IGNORED
    return hidden, weight, targets


def exact_loss(hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float,
               confidence_penalty: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss and its gradients as computed by autograd in float64.

    L2Wrap adds the gradient of l2_wrap / 2 times the mean square of the largest logits.
    """
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    is_target = targets != IGNORED
    logits = (hidden @ weight.T)[is_target]
    value = torch.nn.functional.cross_entropy(logits, targets[is_target])
    total = value + l2_wrap / 2 * logits.max(-1).values.square().mean()
    total -= confidence_penalty * torch.distributions.Categorical(logits=logits).entropy().mean()
    return value.detach(), *torch.autograd.grad(total, (hidden, weight))


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float, scale: float = 1.0,
               confidence_penalty: float = 0.0) -> tuple[Tensor, ...]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = head_loss(hidden, weight, targets, l2_wrap, confidence_penalty)
    (value * scale).backward()
    return value.detach(), hidden.grad, weight.grad


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-6) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("confidence_penalty", [0.0, 0.2])
@pytest.mark.parametrize("l2_wrap", [0.0, 0.3])
@pytest.mark.parametrize(("N", "ignored"), [(1, 0), (7, 3), (512, 0), (513, 100), (1500, 1499)])
def test_value_and_gradients_are_those_of_autograd_in_float64(N: int, ignored: int, l2_wrap: float,
                                                              confidence_penalty: float) -> None:
    inputs = problem(N, ignored=ignored)
    assert_close(fused_loss(*inputs, l2_wrap, confidence_penalty=confidence_penalty),
                 exact_loss(*inputs, l2_wrap, confidence_penalty))


@pytest.mark.parametrize("scale", [2.0 ** 16, 2.0 ** -10, -1.0])
def test_loss_scaling_scales_every_gradient(scale: float) -> None:
    inputs = problem(20)
    _, grad_hidden, grad_weight = fused_loss(*inputs, 0.3)
    _, scaled_hidden, scaled_weight = fused_loss(*inputs, 0.3, scale)
    assert torch.equal(scaled_hidden, scale * grad_hidden)
    assert torch.equal(scaled_weight, scale * grad_weight)


def test_the_model_learns_with_the_gradient_of_plain_autograd() -> None:
    """All parameters of a model are compared, the head's included. The penalties change gradients but not the reported loss."""
    model = small_model("conv1d")
    x, y = tokens(model), tokens(model, seed=2)
    value = LanguageModel(model, OptimConfig(l2_wrap=0.3, confidence_penalty=0.3), 1, 1).training_step((x, y), 0)
    value.backward()
    fused_gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    logits = model(x)[0].flatten(0, 1)
    plain_value = torch.nn.functional.cross_entropy(logits, y.flatten())
    penalty = 0.3 * torch.distributions.Categorical(logits=logits).entropy().mean()
    (plain_value + 0.3 / 2 * logits.max(-1).values.square().mean() - penalty).backward()
    torch.testing.assert_close(value, plain_value)
    for gradient, parameter in zip(fused_gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_nothing_to_predict_gives_no_loss_and_no_gradient() -> None:
    for result in fused_loss(*problem(5, ignored=5), 0.3, confidence_penalty=0.2):
        assert not result.any()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = problem(9)
    for result in fused_loss(1e18 * hidden, 1e18 * weight, targets, 0.0):
        assert result.isfinite().all()


class MostRows(TorchDispatchMode):
    """Records the largest number of rows of any tensor (rows, V) that is created."""

    def __init__(self, V: int) -> None:
        super().__init__()
        self.V, self.rows = V, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == self.V:
            self.rows = max(self.rows, len(result))
        return result


def test_the_logits_never_exist_at_once() -> None:
    inputs = problem(3000)
    with MostRows(V=11) as recorder:
        fused_loss(*inputs, 0.3)
    assert 0 < recorder.rows <= 512


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = problem(20)
    loss = head_loss(hidden.requires_grad_(), weight, targets)
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets = problem(20)
    loss = head_loss(hidden, weight.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_vmap_computes_the_gradients_of_several_losses() -> None:
    """Under vmap, backward runs once for all losses, and must not use up the saved gradient of the weight."""
    hidden, weight, targets = problem(20)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def losses() -> Tensor:
        parts = zip(hidden.split(10), targets.split(10), strict=True)
        return torch.stack([head_loss(rows, weight, row_targets, 0.3) for rows, row_targets in parts])

    several = losses()
    together = torch.vmap(lambda grads: torch.autograd.grad(several, leaves, grads))(torch.eye(2))
    for index in range(2):
        assert_close(tuple(grad[index] for grad in together), torch.autograd.grad(losses()[index], leaves))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_frozen_head_in_another_dtype_is_the_same_head(needs_grad: bool) -> None:
    """The head is converted a part at a time."""
    hidden, weight, targets = problem(20, V=loss.NARROW_ROWS + 5)
    narrow = weight.bfloat16()
    value = head_loss(hidden.requires_grad_(needs_grad), narrow, targets)
    expected, grad_hidden, _ = exact_loss(hidden.detach(), narrow.float(), targets, 0.0)
    torch.testing.assert_close(value.detach().double(), expected)
    if needs_grad:
        value.backward()
        torch.testing.assert_close(hidden.grad, grad_hidden.float())


def test_without_gradient_there_is_only_the_value() -> None:
    inputs = problem(20)
    with torch.no_grad():
        value = head_loss(*inputs, 0.3)
    assert not value.requires_grad
    assert_close((value,), exact_loss(*inputs, 0.0)[:1])


@pytest.mark.thorough
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_first_largest_of_each_row_is_found(rows: int, V: int, levels: int, chance: Any) -> None:
    """With few levels most rows have several largest elements."""
    x = torch.tensor([[float(chance.randrange(levels)) for _ in range(V)] for _ in range(rows)])
    assert torch.equal(loss._argmax(x), (x == x.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True))


@pytest.mark.thorough
def test_half_precision_loses_no_gradient_to_underflow() -> None:
    """Each of 32768 rows has a weight of 3e-5 in the mean, and most probabilities times this weight are 0 in float16."""
    hidden, weight, targets = problem(32768, V=300)
    with torch.autocast("cpu", torch.float16):
        actual = fused_loss(hidden, weight, targets, 0.0, scale=2.0 ** 10)
    _, *expected = exact_loss(hidden, weight, targets, 0.0)
    for gradient, exact in zip(actual[1:], expected, strict=True):
        assert (gradient / 2.0 ** 10 - exact).norm() <= 1e-3 * exact.norm()
