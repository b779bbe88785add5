"""Every TimeX implementation against the float64 formula, and the formula against the four loops it abbreviates.

A new file in kernels/timex/ is tested by being there. Needs nothing but torch, pytest and the back ends.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from kernels.compare import err_ratio, errors, misses, timex_results, timex_tolerance
from kernels.registry import names, why_not
from kernels.timex import TimeX, cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORMULA = TimeX("formula")
EPS = 0.25


@pytest.fixture(params=names("timex"))
def timex(request: pytest.FixtureRequest, device: str) -> TimeX:
    reason = why_not("timex", request.param, device)
    if reason:
        pytest.skip(reason)
    return TimeX(request.param)


def reference(w: Tensor, k: Tensor, eps: float = 0.0) -> dict[str, Tensor]:
    return timex_results(FORMULA, w.double(), k.double(), eps)


def four_loops(w: Tensor, k: Tensor, eps: float) -> Tensor:
    """The seed's own text of the operator."""
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
    found = errors(timex_results(FORMULA, w, k, EPS), {"out": out, "grad_w": grad_w, "grad_k": grad_k})
    assert not misses(found, timex_tolerance(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_output_and_gradients(timex: TimeX, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    w, k = cases.inputs(*shape, dtype=dtype, device=device)
    results = timex_results(timex, w, k, EPS)
    assert {result.dtype for result in results.values()} == {dtype}
    assert not misses(errors(results, reference(w, k, EPS)), timex_tolerance(dtype))


def test_a_long_row(timex: TimeX, device: str) -> None:
    """Thousands of terms, added one after the other, round more than a few hundred do."""
    w, k = cases.inputs(1, 2, 4099, device=device)
    assert max(errors(timex_results(timex, w, k, EPS), reference(w, k, EPS)).values()) <= 2e-6


@pytest.mark.parametrize("shape", [(3, 5, 11), (5, 3, 129)], ids=str)
def test_float64_is_exact_or_refused(timex: TimeX, shape: tuple[int, int, int], device: str) -> None:
    """Never computed in float32 behind the user's back."""
    w, k = cases.inputs(*shape, dtype=torch.float64, device=device)
    if torch.float64 in timex.requires.dtypes:
        assert not misses(errors(timex_results(timex, w, k, EPS), reference(w, k, EPS)), timex_tolerance(torch.float64))
    else:
        with pytest.raises(ValueError, match=f"{timex.name} does not compute in float64"):
            timex(w, k)


def test_gradcheck(timex: TimeX, device: str) -> None:
    if torch.float64 not in timex.requires.dtypes:
        pytest.skip(f"{timex.name} does not compute in float64")
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(2, 3, 6, dtype=torch.float64, device=device))
    assert torch.autograd.gradcheck(timex, (w, k, EPS))


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_an_empty_size_gives_an_empty_tensor(timex: TimeX, shape: tuple[int, int, int], device: str) -> None:
    w, k = cases.inputs(*shape, device=device)
    results = timex_results(timex, w, k, EPS)
    assert results["out"].shape == results["grad_k"].shape == shape
    assert torch.equal(results["grad_w"], torch.zeros_like(w))


def test_eps_is_added_to_every_element(timex: TimeX, device: str) -> None:
    w, k = cases.inputs(2, 3, 20, device=device)
    assert err_ratio(timex(w, k, 100.0), 100.0 + timex(w, k)) <= 1e-6
    assert torch.equal(timex(torch.zeros_like(w), k, EPS), torch.full_like(k, EPS))


def test_causality(timex: TimeX, device: str) -> None:
    """Neither a later k nor a longer lag reaches an earlier step: not one bit, where the algorithm is a sum over time.

    What declares wkv=False may be off by rounding of the largest product of the two, here 7e3 beside results of about 8.
    """
    w, k = cases.inputs(3, 5, 140, device=device)
    t, later = 70, 1e3 if timex.requires.wkv else 10.0
    other_w, other_k = w.clone(), k.clone()
    other_w[:, :-t], other_k[:, :, t:] = later, later
    leak = (timex(w, k) - timex(other_w, other_k))[:, :, :t].abs().max()
    assert leak <= (0 if timex.requires.wkv else 1e-6 * t * later**2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(timex: TimeX, value: float, device: str) -> None:
    """From its step on, and in no other row."""
    w, k = cases.inputs(2, 3, 140, device=device)
    k[1, 2, 70] = value
    found = timex(w, k).isfinite()
    assert not found[1, 2, 70:].any()
    assert found[0].all()
    assert found[1, :2].all()


def test_the_same_bits_twice(timex: TimeX, device: str) -> None:
    w, k = cases.inputs(8, 16, 256, device=device)
    first, second = timex_results(timex, w, k), timex_results(timex, w, k)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_are_left_as_they_were(timex: TimeX, device: str) -> None:
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(3, 5, 11, device=device))
    before = w.detach().clone(), k.detach().clone()
    cases.loss(timex(w, k)).backward()
    assert torch.equal(w, before[0])
    assert torch.equal(k, before[1])


def test_strided_inputs(timex: TimeX, device: str) -> None:
    w, k = cases.inputs(4, 6, 40, device=device)
    strided_w, strided_k = w.t().contiguous().t(), k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided_w.is_contiguous()
    assert not strided_k.is_contiguous()
    contiguous, strided = timex_results(timex, w, k), timex_results(timex, strided_w, strided_k)
    assert all(torch.equal(contiguous[name], strided[name]) for name in contiguous)


def test_an_expanded_gradient(timex: TimeX, device: str) -> None:
    """out.sum() sends back a single number with strides of 0."""
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(3, 5, 21, device=device))
    grads = torch.autograd.grad(timex(w, k).sum(), (w, k))
    expected = torch.autograd.grad(FORMULA(w.double(), k.double()).sum(), (w, k))
    assert all(err_ratio(grad, right) <= 1e-6 for grad, right in zip(grads, expected, strict=True))


@pytest.mark.parametrize("offset", [1, 64])
def test_inputs_inside_a_larger_buffer(timex: TimeX, offset: int, device: str) -> None:
    """Nothing beside the inputs is read (it is NaN), and an address that no vector load takes is no trouble."""
    w, k = (surrounded_by_nan(tensor, offset) for tensor in cases.inputs(3, 32, 63, device=device))
    assert not misses(errors(timex_results(timex, w, k), reference(w, k)), timex_tolerance(torch.float32))


def surrounded_by_nan(tensor: Tensor, offset: int) -> Tensor:
    buffer = tensor.new_full((tensor.numel() + 2 * offset,), float("nan"))
    inside = buffer[offset:offset + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def test_opcheck(timex: TimeX, device: str) -> None:
    """Schema, fake and autograd registration are what torch.compile will rely on."""
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(2, 3, 9, device=device))
    timex(w, k)
    torch.library.opcheck(getattr(torch.ops.timemix, f"timex_{timex.name}").default, (w, k, EPS))


def test_compiles_without_a_graph_break(timex: TimeX, device: str) -> None:
    torch.compiler.reset()               # it compiles one function a limited number of times, and here comes each kernel
    w, k = (tensor.requires_grad_() for tensor in cases.inputs(2, 3, 9, device=device))
    compiled = torch.compile(lambda w, k: timex(w, 2 * k) + 1, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(cases.loss(function(w, k)), (w, k))
             for function in (compiled, lambda w, k: timex(w, 2 * k) + 1)]
    assert all(torch.equal(compiled_grad, grad) for compiled_grad, grad in zip(*grads, strict=True))


def test_one_compilation_serves_every_size(device: str) -> None:
    """Also a size of 1, and sizes that are equal, for which torch.compile would make another."""
    if reason := why_not("timex", "torch_compile", device):
        pytest.skip(reason)
    timex_results(TimeX("torch_compile"), *cases.inputs(3, 5, 11, device=device))
    before = counters["stats"]["unique_graphs"]
    for shape in ((1, 1, 1), (1, 4, 9), (5, 5, 5), (2, 1, 64)):
        timex_results(TimeX("torch_compile"), *cases.inputs(*shape, device=device))
    assert counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.parametrize(("w", "k", "sentence"), [
    (torch.ones(3, 4), torch.ones(3, 4), r"expects w \(C,T\) and k \(B,C,T\), got w \(3, 4\) and k \(3, 4\)"),
    (torch.ones(3, 4), torch.ones(2, 3, 5), r"got w \(3, 4\) and k \(2, 3, 5\)"),
    (torch.ones(4, 3), torch.ones(2, 3, 4), r"got w \(4, 3\)"),
    (torch.ones(3, 4), torch.ones(2, 3, 4, dtype=torch.int64), "expects floating-point w and k, got .*int64"),
    (torch.ones(3, 4, device="meta"), torch.ones(2, 3, 4), "on one device, got meta and cpu"),
])
def test_wrong_inputs_are_refused_with_a_sentence(w: Tensor, k: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FORMULA(w, k)
