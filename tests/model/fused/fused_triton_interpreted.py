"""Tests the Triton forms on a CPU under Triton's interpreter: test_fused_triton.py runs this file with TRITON_INTERPRET=1.

Values and gradients of each function, and of models of every generation, are compared with the formulas in float64.
"""

from collections.abc import Sequence

import pytest
import test_fused_c
import test_loss
import torch
from fused_backends import CASES, check_training
from implementations import in_soak
from models import each_generation, small_model, tokens
from torch import Tensor
from triton_interpreter import speed_up_interpreter

from rwkv.model.fused import backend as fused_backend
from rwkv.model.fused import loss_triton
from rwkv.model.fused import triton as fused_triton
from rwkv.model.loss import IGNORED, head_loss
from rwkv.model.rwkv7 import fused_triton as rwkv7_triton

SHAPES = (1, 1, 1, 8), (2, 5, 3, 8), (3, 4, 1, 64), (1, 3, 2, 128)               # (B, T, H, N)
speed_up_interpreter()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks so small that there are several, full and partial."""
    monkeypatch.setitem(fused_backend.SUFFIXES, "cpu", "triton")
    for name, size in (("ROWS", 8), ("ROWS_BACK", 4), ("BLOCK", 16), ("ELEMENTS", 64)):
        monkeypatch.setattr(fused_triton, name, size)
    monkeypatch.setattr(rwkv7_triton, "ROWS", 8)
    monkeypatch.setattr(loss_triton, "MAX_BLOCK", 8)


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.float32) for shape in SHAPES), (SHAPES[1], torch.bfloat16),
    *in_soak(*(pytest.param(shape, torch.bfloat16) for shape in SHAPES if shape != SHAPES[1]))], ids=str)
def test_each_function_computes_the_formulas(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    for name, (function, inputs) in test_fused_c.cases(dtype, *shape).items():
        test_fused_c.check(dtype, function(*inputs), test_fused_c.in_float64(function, inputs), name)


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {name: float((actual[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)) for name in expected}


@pytest.mark.parametrize(("case", "half"), [*((case, False) for case in CASES), (CASES[1], True),
                                            *in_soak(pytest.param(CASES[0], True))], ids=str)
@each_generation
def test_whole_models_compute_the_formulas(generation: str, case: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the interpreter truncates where a GPU rounds."""
    check_training(generation, "triton", case, half, monkeypatch, factor=8 if half else 3)


@each_generation
def test_packed_texts_equal_each_text_alone(generation: str) -> None:
    """The hidden states of whole models and the sums of the gradients are compared."""
    model = small_model("c_v0", generation=generation, n_layer=2)
    ids = tokens(model, 1, 12)
    lengths = [5, 1, 6]
    starts = torch.zeros(ids.shape, dtype=torch.bool).index_fill_(1, torch.tensor([0, 5, 6]), True)
    weights = torch.randn(1, 12, model.config.n_embd, generator=torch.Generator().manual_seed(0))

    def results(texts: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> dict[str, Tensor]:
        model.zero_grad()
        hidden = [model.forward_features(text, begins) for text, begins, _ in texts]
        sum((each * part).sum() for each, (*_, part) in zip(hidden, texts, strict=True)).backward()          # type: ignore
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"hidden": torch.cat(hidden, 1).detach()} | grads

    packed = results([(ids, starts, weights)])
    texts = zip(ids.split(lengths, 1), weights.split(lengths, 1), strict=True)
    separate = results([(text, None, part) for text, part in texts])
    errors = relative_errors(packed, separate)
    assert max(errors.values()) < 2e-5, errors


def test_no_rows_launch_nothing() -> None:
    empty = torch.empty(0, 4, 16)
    assert fused_triton.squared_relu(empty).shape == empty.shape
    vectors = torch.ones(2, 8), torch.ones(16), torch.ones(16)
    _, grads = rwkv7_triton.gated_backward(empty.view(0, 4, 2, 8), *[empty] * 4, 8, vectors, empty)
    assert [tuple(grad.shape) for grad in grads] == [(16,)] * 3


def test_rows_with_gaps_are_read_in_place() -> None:
    """Tensors such as x[:, -1] have gaps between their rows, which a kernel must not read as rows."""
    torch.manual_seed(0)
    for name, (function, inputs) in test_fused_c.cases(torch.float32, 2, 5, 3, 8).items():
        spread = [torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1)[..., 0] for tensor in inputs]
        for one, other in zip(function(*inputs), function(*spread), strict=True):
            assert (one is None) == (other is None), name
            assert one is None or torch.equal(one, other), name     # type: ignore[arg-type]


def test_heads_whose_size_is_not_a_power_of_two_use_the_formulas() -> None:
    k = torch.randn(1, 2, 12)
    assert fused_backend.backend_for(k, N=6) is None
    assert fused_backend.backend_for(k, N=4) is fused_triton
    assert fused_backend.backend_for(k.double(), N=4) is None


# The loss is computed as on a GPU, except that a CPU has no products with a wider result


@pytest.mark.parametrize(("l2_wrap", "penalty"), [
    (0.0, 0.0), (0.3, 0.2), *in_soak(pytest.param(0.3, 0.0), pytest.param(0.0, 0.2))])
@pytest.mark.parametrize(("N", "ignored", "V"), [(1, 0, 11), (7, 3, 11), (5, 4, 8), (3, 0, 3), (4, 1, 1)])
def test_the_loss_and_its_gradients(N: int, ignored: int, V: int, l2_wrap: float, penalty: float) -> None:
    generator = torch.Generator().manual_seed(N)
    hidden, weight = torch.randn(N, 6, generator=generator), torch.randn(V, 6, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[:ignored] = IGNORED
    actual = test_loss.fused_loss(hidden, weight, targets, l2_wrap, confidence_penalty=penalty)
    expected = test_loss.exact_loss(hidden, weight, targets, l2_wrap, penalty)
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).abs().max()) <= 2e-6 * float(other.abs().max().clamp(min=1))
    with torch.no_grad():
        assert float((head_loss(hidden, weight, targets) - expected[0]).abs()) < 2e-6


def test_the_loss_in_bfloat16_is_the_float32_loss_of_its_rounded_logits() -> None:
    torch.manual_seed(0)
    logits, targets = (4 * torch.randn(6, 37)).bfloat16(), torch.tensor([0, 36, IGNORED, 5, 17, 8])
    expected = logits.float().requires_grad_()
    loss = torch.nn.functional.cross_entropy(expected, targets, reduction="sum")
    loss.backward()
    nll = loss_triton.replace_by_gradient(logits, targets, 0.0, 0.0, IGNORED)
    torch.testing.assert_close(nll, loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.float(), expected.grad, rtol=2 ** -7, atol=1e-6)       # the interpreter truncates


def test_extreme_logits_stay_exact_and_nan_shows() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, -3e38, -3e38], [float("nan"), 0.0, 1.0]])
    targets = torch.tensor([1, 0, 2])
    nll = torch.stack([loss_triton.negative_log_likelihood(row[None], target[None], IGNORED)
                       for row, target in zip(logits, targets, strict=True)])
    torch.testing.assert_close(nll[:2], torch.tensor([2e4, 1.0986123]))
    assert nll[2].isnan()
