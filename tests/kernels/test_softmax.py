"""Every softmax implementation against the float64 formula and, on what is not finite, against torch.softmax.

A new file in kernels/softmax/ is tested by being there. Needs nothing but torch, pytest and the back ends.
"""

import pickle
import random

import pytest
import torch
from torch import Tensor

from kernels import select
from kernels.bench.results import committed, read
from kernels.compare import err_ratio, errors, misses
from kernels.registry import KernelUnavailable, load, names, why_not
from kernels.softmax import Softmax, cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORMULA = Softmax("formula")
RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}      # on special rows, whose every element counts


@pytest.fixture(params=names("softmax"))
def softmax(request: pytest.FixtureRequest, device: str) -> Softmax:
    reason = why_not("softmax", request.param, device)
    if reason:
        pytest.skip(reason)
    return Softmax(request.param)


def reference(x: Tensor) -> dict[str, Tensor]:
    return cases.results(FORMULA, x.double())


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_formula_is_one_line_of_pytorch(shape: tuple[int, ...]) -> None:
    x = cases.inputs(*shape, dtype=torch.float64).requires_grad_()
    y = torch.softmax(x, -1)
    expected = {"y": y, "grad_x": torch.autograd.grad(cases.loss(y), x)[0]}
    assert not misses(errors(reference(x), expected), cases.tolerance(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_output_and_gradient(softmax: Softmax, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = cases.inputs(*shape, dtype=dtype, device=device)
    results = cases.results(softmax, x)
    assert {(result.dtype, tuple(result.shape)) for result in results.values()} == {(dtype, shape)}
    assert not misses(errors(results, reference(x)), cases.tolerance(dtype))


def test_the_longest_row(softmax: Softmax, device: str) -> None:
    """A quarter of a million terms: all within 1e-6, but for PyTorch, compiled or not, which adds up vector after vector."""
    x = cases.inputs(1, cases.LONGEST, device=device)
    M = cases.LONGEST if softmax.name.startswith("torch") else 1
    assert not misses(errors(cases.results(softmax, x), reference(x)), cases.tolerance(torch.float32, M))


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("M", [8, 100, 1030])
def test_what_is_not_finite_is_as_in_torch(softmax: Softmax, M: int, dtype: torch.dtype, device: str) -> None:
    """-inf, nothing but -inf, +inf, NaN, the largest numbers there are: the same NaN, the same zeros."""
    x = cases.special_rows(M, device, dtype).requires_grad_()
    y, expected, grad_y = softmax(x), torch.softmax(x, -1), torch.randn_like(x)
    torch.testing.assert_close(y, expected, rtol=RTOL[dtype], atol=1e-37, equal_nan=True)
    assert not y[x == -torch.inf].nan_to_num().any()
    grads = [torch.autograd.grad(result, x, grad_y)[0] for result in (y, expected)]
    torch.testing.assert_close(*grads, rtol=RTOL[dtype], atol=2 * RTOL[dtype], equal_nan=True)


def test_a_nan_stays_in_its_row(softmax: Softmax, device: str) -> None:
    x = cases.inputs(5, 300, device=device)
    expected = softmax(x)
    x[2, 299] = torch.nan
    y = softmax(x)
    assert y[2].isnan().all()
    y[2] = expected[2]
    assert torch.equal(y, expected)


def test_float64_is_exact_or_refused(softmax: Softmax, device: str) -> None:
    """Never computed in float32 behind the user's back."""
    x = cases.inputs(3, 129, dtype=torch.float64, device=device)
    if torch.float64 in softmax.requires.dtypes:
        assert not misses(errors(cases.results(softmax, x), reference(x)), cases.tolerance(torch.float64))
    else:
        with pytest.raises(ValueError, match=f"{softmax.name} does not compute in float64"):
            softmax(x)


def test_gradcheck(softmax: Softmax, device: str) -> None:
    if torch.float64 not in softmax.requires.dtypes:
        pytest.skip(f"{softmax.name} does not compute in float64")
    assert torch.autograd.gradcheck(softmax, cases.inputs(2, 3, 6, dtype=torch.float64, device=device).requires_grad_())


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_an_empty_size_gives_an_empty_tensor(softmax: Softmax, shape: tuple[int, ...], device: str) -> None:
    results = cases.results(softmax, cases.inputs(*shape, device=device))
    assert results["y"].shape == results["grad_x"].shape == shape


def test_any_shape_adds_up_to_one_wherever_it_lies(softmax: Softmax, device: str) -> None:
    """A constant added to a row changes nothing but roundings of x."""
    draw = random.Random(0)
    for seed in range(10):
        shape = [draw.randint(1, 9) for _ in range(draw.randint(0, 3))]
        x = cases.inputs(*shape, draw.randint(1, 3000), spread=draw.uniform(0, 30), device=device, seed=seed)
        y, shifted = softmax(x), softmax(x + draw.randint(-99, 99))
        ones = torch.ones(shape, dtype=torch.float64, device=device)
        torch.testing.assert_close(y.double().sum(-1), ones, rtol=0, atol=1e-5)
        assert err_ratio(shifted, y) <= 3e-5, x.shape


def test_the_same_bits_twice(softmax: Softmax, device: str) -> None:
    x = cases.inputs(33, 1000, device=device)
    first, second = cases.results(softmax, x), cases.results(softmax, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_input_is_left_as_it_was(softmax: Softmax, device: str) -> None:
    x = cases.inputs(3, 64, device=device).requires_grad_()
    before = x.detach().clone()
    cases.loss(softmax(x)).backward()
    assert torch.equal(x, before)


def test_the_result_may_be_written_to(softmax: Softmax, device: str) -> None:
    """It is neither the input nor, for autograd, a view of anything."""
    x = cases.inputs(2, 3, 4, device=device).requires_grad_()
    y = softmax(x)
    y[0] += 1
    assert not y._is_view()
    assert y.data_ptr() != x.data_ptr()


def test_a_strided_input(softmax: Softmax, device: str) -> None:
    x = cases.inputs(4, 6, 40, device=device)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous()
    contiguous, found = cases.results(softmax, x), cases.results(softmax, strided)
    assert all(torch.equal(contiguous[name], found[name]) for name in contiguous)


def test_an_expanded_gradient(softmax: Softmax, device: str) -> None:
    """y.sum() sends back a single number with strides of 0; every row's sum is 1, whatever x is."""
    x = cases.inputs(3, 21, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(softmax(x).sum(), x)
    assert grad.abs().max() <= 1e-6


@pytest.mark.parametrize("M", [63, 64, 1030])
@pytest.mark.parametrize("offset", [1, 16])
def test_an_input_inside_a_larger_buffer(softmax: Softmax, offset: int, M: int, device: str) -> None:
    """Nothing beside the input is read (it is NaN), and an address that no vector load takes is no trouble."""
    buffer = torch.full((5 * M + 2 * offset,), torch.nan, device=device)
    x = buffer[offset:offset + 5 * M].view(5, M).copy_(cases.inputs(5, M))
    assert not misses(errors(cases.results(softmax, x), reference(x)), cases.tolerance(torch.float32))


def test_opcheck(softmax: Softmax, device: str) -> None:
    """Schema, fake and autograd registration are what torch.compile will rely on."""
    x = cases.inputs(2, 3, 9, device=device).requires_grad_()
    torch.library.opcheck(getattr(torch.ops.timemix, f"softmax_{softmax.name}").default, (x,))


def test_compiles_without_a_graph_break(softmax: Softmax, device: str) -> None:
    torch.compiler.reset()               # it compiles one function a limited number of times, and here comes each kernel
    x = cases.inputs(2, 3, 9, device=device).requires_grad_()
    compiled = torch.compile(lambda x: softmax(2 * x) + 1, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(cases.loss(function(x)), x)[0] for function in (compiled, lambda x: softmax(2 * x) + 1)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("device_type", select.SOFTMAX)
def test_what_a_sampler_uses_is_what_the_committed_results_say(device_type: str) -> None:
    """Of one row: the first of the rule is the fastest, or within 10 % of it. Its last resort needs nothing but torch."""
    rule = select.SOFTMAX[device_type]
    assert load("softmax", rule.order[-1]).REQUIRES.packages == ()
    assert select.softmax(device_type).name in rule.order
    reports = [report for report in read(committed())
               if (report["op"], report["device"], report["dtype"]) == ("softmax", device_type, "float32")]
    rows = [measured for report in reports for measured in report["shapes"] if measured["shape"]["rows"] == 1]
    assert rule.measured == bool(rows)
    for measured in rows:
        ms = {result["name"]: result["ms"] for result in measured["results"] if result["pass"] == "forward"}
        assert ms[rule.order[0]] <= 1.1 * min(ms.values()), measured["shape"]


def test_what_a_sampler_uses_draws_the_same_tokens() -> None:
    """To the bit, in the order of either option; without autograd, and without a copy where rows are rows."""
    sampling = pytest.importorskip("rwkv.sampling")
    logits, uniform = cases.inputs(5, 1000), torch.rand(5, generator=torch.Generator().manual_seed(0))
    for order in sampling.ORDERS:
        options = sampling.Sampling(order=order, top_p=0.9)
        drawn = [sampling.distribution(logits, options, *softmax)[1] for softmax in ((), (select.softmax().forward,))]
        assert torch.equal(*drawn)
        handed = sampling.next_tokens(logits, uniform, options, None, select.softmax().forward)
        assert torch.equal(sampling.next_tokens(logits, uniform, options), handed)


@pytest.mark.parametrize(("x", "sentence"), [
    (torch.tensor(1.0), r"expects a floating-point x \(\.\.\., M\), got torch.float32 of shape \(\)"),
    (torch.ones(2, 3, dtype=torch.int64), r"got torch.int64 of shape \(2, 3\)"),
])
def test_wrong_inputs_are_refused_with_a_sentence(x: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FORMULA(x)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^unknown softmax implementation 'nonsense'; there are: cuda_v0, formula, "):
        Softmax("nonsense")


def test_a_kernel_that_cannot_run_says_what_does() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(KernelUnavailable, match=r"^cuda_v0 runs on cuda, not on cpu; on cpu there are: formula, "):
        Softmax("cuda_v0")(torch.ones(3))


def test_it_is_written_with_what_holds_it() -> None:
    assert repr(pickle.loads(pickle.dumps(FORMULA))) == "Softmax('formula')"
