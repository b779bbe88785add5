"""Compares every softmax implementation with the float64 formula, and with torch.softmax on inputs that are not finite.

Every file in kernels/softmax/ is tested automatically. The tests require only torch, pytest and the back ends.
"""

import random

import pytest
import torch
from implementations import cache_results, compiled_in_soak, implementations
from torch import Tensor

from kernels.compare import err_ratio, errors, misses
from kernels.softmax import Softmax, cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORMULA = Softmax("formula")
RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}      # on special rows, where each element is compared


@pytest.fixture(params=compiled_in_soak(implementations("softmax")))
def softmax(request: pytest.FixtureRequest) -> Softmax:
    return Softmax(request.param)


@cache_results
def reference(x: Tensor) -> dict[str, Tensor]:
    return cases.results(FORMULA, x.double())


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_formula_is_one_line_of_pytorch(shape: tuple[int, ...]) -> None:
    x = cases.inputs(*shape, dtype=torch.float64).requires_grad_()
    y = torch.softmax(x, -1)
    expected = {"y": y, "grad_x": torch.autograd.grad(cases.loss(y), x)[0]}
    assert not misses(errors(reference(x), expected), cases.tolerance(torch.float64))


def test_the_longest_row(softmax: Softmax, device: str) -> None:
    """With a quarter of a million terms all errors are within 1e-6, except for kernels that add vectors one after another.

    PyTorch's kernels, compiled or not, add vectors one after another, and so do Taichi's where LLVM adds in a single chain
    (3.5e-6 on a Xeon).
    """
    x = cases.inputs(1, cases.LONGEST, device=device)
    M = cases.LONGEST if softmax.name.startswith(("torch", "taichi")) else 1
    assert not misses(errors(cases.results(softmax, x), reference(x)), cases.tolerance(torch.float32, M))


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("M", [8, 100, 1030])
def test_nonfinite_values_give_the_results_of_torch(softmax: Softmax, M: int, dtype: torch.dtype, device: str) -> None:
    """Rows with -inf, only -inf, +inf, NaN or the largest numbers have the same NaN and the same zeros as in PyTorch."""
    x = cases.special_rows(M, device, dtype).requires_grad_()
    y, expected, grad_y = softmax(x), torch.softmax(x, -1), torch.randn_like(x)
    torch.testing.assert_close(y, expected, rtol=RTOL[dtype], atol=1e-37, equal_nan=True)
    assert not y[x == -torch.inf].nan_to_num().any()
    grads = [torch.autograd.grad(result, x, grad_y)[0] for result in (y, expected)]
    torch.testing.assert_close(*grads, rtol=RTOL[dtype], atol=2 * RTOL[dtype], equal_nan=True)


def test_rows_of_any_shape_and_offset_add_up_to_one(softmax: Softmax, device: str) -> None:
    """Adding a constant to a row changes the result only by the rounding of x."""
    draw = random.Random(0)
    for seed in range(10):
        shape = [draw.randint(1, 9) for _ in range(draw.randint(0, 3))]
        x = cases.inputs(*shape, draw.randint(1, 3000), spread=draw.uniform(0, 30), device=device, seed=seed)
        y, shifted = softmax(x), softmax(x + draw.randint(-99, 99))
        ones = torch.ones(shape, dtype=torch.float64, device=device)
        torch.testing.assert_close(y.double().sum(-1), ones, rtol=0, atol=1e-5)
        assert err_ratio(shifted, y) <= 3e-5, x.shape


def test_the_result_may_be_written_to(softmax: Softmax, device: str) -> None:
    """The result does not share the input's memory, and autograd does not treat it as a view."""
    x = cases.inputs(2, 3, 4, device=device).requires_grad_()
    y = softmax(x)
    y[0] += 1
    assert not y._is_view()
    assert y.data_ptr() != x.data_ptr()
