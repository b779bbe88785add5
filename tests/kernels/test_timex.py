"""Compares every TimeX implementation with the float64 formula, and the formula with the four loops that define the operator.

Every file in kernels/timex/ is tested automatically. The tests require only torch, pytest and the back ends.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from implementations import cache_results, compiled_in_soak, implementations
from torch import Tensor

from kernels.compare import err_ratio, errors, misses
from kernels.timex import TimeX, cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORMULA = TimeX("formula")
EPS = 0.25


@pytest.fixture(params=compiled_in_soak(implementations("timex")))
def timex(request: pytest.FixtureRequest) -> TimeX:
    return TimeX(request.param)


@cache_results
def reference(w: Tensor, k: Tensor, eps: float = 0.0) -> dict[str, Tensor]:
    return cases.results(FORMULA, w.double(), k.double(), eps)


def four_loops(w: Tensor, k: Tensor, eps: float) -> Tensor:
    """Computes the operator by its original definition."""
    B, C, T = k.shape
    out = torch.empty_like(k)
    for b in range(B):
        for c in range(C):
            for t in range(T):
                s = eps
                for u in range(t + 1):
                    s += float(w[c][(T - 1) - (t - u)] * k[b][c][u])
                out[b][c][t] = s
    return out


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (3, 2, 16)])
def test_formula_is_the_four_loops(shape: tuple[int, int, int]) -> None:
    w, k = cases.inputs(*shape, dtype=torch.float64)
    assert err_ratio(FORMULA(w, k, EPS), four_loops(w, k, EPS)) <= 1e-15


def test_formula_is_one_line_of_pytorch() -> None:
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(3, 4, 33, dtype=torch.float64))
    out = EPS + F.conv1d(F.pad(k, (k.shape[-1] - 1, 0)), w.unsqueeze(1), groups=k.shape[1])
    grad_w, grad_k = torch.autograd.grad(cases.loss(out), (w, k))
    actual = errors(cases.results(FORMULA, w, k, EPS), {"out": out, "grad_w": grad_w, "grad_k": grad_k})
    assert not misses(actual, cases.tolerance(torch.float64))


@pytest.mark.thorough
def test_a_long_row(timex: TimeX, device: str) -> None:
    """A sum of thousands of terms, added one after another, has larger rounding errors than one of a few hundred."""
    w, k = cases.inputs(1, 2, 4099, device=device)
    assert max(errors(cases.results(timex, w, k, EPS), reference(w, k, EPS)).values()) <= 2e-6


def test_eps_is_added_to_every_element(timex: TimeX, device: str) -> None:
    w, k = cases.inputs(2, 3, 20, device=device)
    assert err_ratio(timex(w, k, 100.0), 100.0 + timex(w, k)) <= 1e-6
    assert torch.equal(timex(torch.zeros_like(w), k, EPS), torch.full_like(k, EPS))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_values_are_not_hidden(timex: TimeX, value: float, device: str) -> None:
    """The output is not finite from that step on, and finite in all other rows."""
    w, k = cases.inputs(2, 3, 140, device=device)
    k[1, 2, 70] = value
    actual = timex(w, k).isfinite()
    assert not actual[1, 2, 70:].any()
    assert actual[0].all()
    assert actual[1, :2].all()


def test_conv1d_works_with_torchs_newer_setting_of_tf32() -> None:
    """A process that has used the newer setting may not read the older setting any more."""
    convolutions = torch.backends.cudnn.conv     # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            convolutions.fp32_precision = setting
            TimeX("conv1d")(*cases.inputs(2, 3, 4))
            assert convolutions.fp32_precision == setting
    finally:
        convolutions.fp32_precision = before
