"""Every token shift against the float64 formula, and the choice that a model makes among them.

A new file in kernels/shift/ is tested by being there. Needs nothing but torch, pytest, hypothesis and the back ends.
"""

import itertools
import math
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import select
from kernels._results import committed, read
from kernels.compare import errors, misses
from kernels.registry import KernelUnavailable, load, names, why_not
from kernels.shift import TokenShift, cases
from rwkv import fused

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORMULA = TokenShift("formula")
HALVES = torch.bfloat16, torch.float16
NAN = float("nan")


@pytest.fixture(scope="module", params=names("shift"))
def shift(request: pytest.FixtureRequest, device: str) -> TokenShift:
    reason = why_not("shift", request.param, device)
    if reason:
        pytest.skip(reason)
    return TokenShift(request.param)


def wrong(shift: TokenShift, *shape: int, n: int = cases.MIXES, dtype: torch.dtype = torch.float32, seed: int = 0,
          device: str = "cpu") -> dict[str, str]:
    """What is off, of the results and every gradient: nothing should be."""
    inputs, grads = cases.inputs(*shape, n, device=device, seed=seed), cases.upstream(*shape, n, dtype, device)
    return misses(errors(cases.results(shift, *inputs, grads), cases.reference(*inputs, grads)), cases.tolerance(dtype))


def one_line(x: Tensor, last_x: Tensor, mus: Tensor) -> tuple[Tensor, ...]:
    before = torch.cat((last_x[:, None], x[:, :-1]), 1)
    return tuple(mu * x + (1 - mu) * before for mu in mus)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_formula_is_two_lines_of_pytorch(shape: tuple[int, int, int]) -> None:
    leaves = [tensor.requires_grad_() for tensor in cases.inputs(*shape, dtype=torch.float64)]
    mixes, grads = one_line(*leaves), cases.upstream(*shape, dtype=torch.float64)
    found = torch.autograd.grad(mixes, leaves, grads)
    expected = {"mixes": torch.stack(mixes), **dict(zip(cases.GRADIENTS, found, strict=True))}
    assert not misses(errors(cases.reference(*leaves, grads), expected), cases.tolerance(torch.float64, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_mixes_and_gradients(shift: TokenShift, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    inputs = cases.inputs(*shape, device=device)
    results = cases.results(shift, *inputs, cases.upstream(*shape, dtype=dtype, device=device))
    assert [(result.dtype, result.shape) for result in results.values()] == [
        (dtype, (cases.MIXES, *shape)), *((tensor.dtype, tensor.shape) for tensor in inputs)]
    assert not wrong(shift, *shape, dtype=dtype, device=device)


@settings(max_examples=20, derandomize=True, database=None)
@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 140), st.integers(1, 70)), n=st.integers(1, 3),
       dtype=st.sampled_from((torch.float32, torch.bfloat16)), seed=st.integers(0, 99))
def test_any_shape(shift: TokenShift, shape: tuple[int, int, int], n: int, dtype: torch.dtype, seed: int, device: str) -> None:
    assert not wrong(shift, *shape, n=n, dtype=dtype, seed=seed, device=device)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_any_number_of_mixes(shift: TokenShift, n: int, device: str) -> None:
    assert not wrong(shift, 2, 66, 20, n=n, device=device)


def test_a_shape_that_takes_all_threads(shift: TokenShift, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made small by lowering the bound: right, and the same bits as from one thread."""
    inputs, grads = cases.inputs(3, 200, 48, device=device), cases.upstream(3, 200, 48, dtype=torch.bfloat16, device=device)
    alone = cases.results(shift, *inputs, grads)
    monkeypatch.setattr(load("shift", shift.name), "SERIAL", 0, raising=False)
    assert not wrong(shift, 3, 200, 48, dtype=torch.bfloat16, device=device)
    together = cases.results(shift, *inputs, grads)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_once(shift: TokenShift, dtype: torch.dtype, device: str) -> None:
    """To the bit what rounding the float32 result gives: what lies in the middle, the largest, what is below the smallest."""
    x, last_x, mus = cases.inputs(2, 70, 32, device=device)
    x *= torch.logspace(-44, 38, 32, device=device)
    x[:, ::3] = torch.arange(-2**15, 2**15, 2**15 / 24 / 32, device=device)[:2 * 24 * 32].view(2, 24, 32)
    mus[0], last_x[:] = 1, x[:, 0]
    for rounded, exact in zip(shift(x, last_x, mus, dtype), shift(x, last_x, mus), strict=True):
        assert torch.equal(rounded, exact.to(dtype))


def test_every_kind_of_nan_and_infinity_stays_one(shift: TokenShift, device: str) -> None:
    """A NaN whose bits are all ones, or whose only bits are the low ones that bfloat16 has not, is a NaN there too."""
    bits = torch.tensor([0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF, 0x7F7FFFFF, 0x7F800000, -0x800000])
    special = bits.to(torch.int32).view(torch.float32).to(device)
    x, last_x, mus = torch.zeros(9, 1, 40, device=device), torch.zeros(9, 40, device=device), torch.ones(2, 40, device=device)
    x[:] = special[:, None, None]
    for dtype in (torch.float32, *HALVES):
        for mix in shift(x, last_x, mus, dtype):
            torch.testing.assert_close(mix, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_in_its_steps_and_its_channel(shift: TokenShift, dtype: torch.dtype, device: str) -> None:
    """Also from a gradient, which reaches its step, the one before, and the sum of its mix and channel."""
    x, last_x, mus = (tensor.requires_grad_() for tensor in cases.inputs(2, 70, 33, device=device))
    grads = [torch.randn(2, 70, 33, device=device, dtype=dtype) for _ in mus]

    def results() -> tuple[Tensor, ...]:
        out = shift(x, last_x, mus, dtype)
        return *out, *torch.autograd.grad(out, (x, last_x, mus), grads)

    before = results()
    with torch.no_grad():
        x[1, 63, 20], grads[2][0, 64, 7] = NAN, NAN
    after, spoilt = results(), [torch.zeros_like(tensor, dtype=torch.bool) for tensor in before]
    for mix in spoilt[:3]:
        mix[1, 63:65, 20] = True
    spoilt[3][0, 63:65, 7] = True
    spoilt[5][:, 20] = spoilt[5][2, 7] = True
    for was, found, expected in zip(before, after, spoilt, strict=True):
        assert torch.equal(found.isnan(), expected)
        assert torch.equal(found[~expected], was[~expected])


def test_float64_is_exact_or_refused(shift: TokenShift, device: str) -> None:
    """Never computed in float32 behind the user's back; rounded once where float64 goes into half-precision products."""
    inputs = cases.inputs(3, 5, 17, dtype=torch.float64, device=device)
    grads = cases.upstream(3, 5, 17, dtype=torch.float64, device=device)
    if torch.float64 in shift.requires.dtypes:
        found = errors(cases.results(shift, *inputs, grads), cases.reference(*inputs, grads))
        assert not misses(found, cases.tolerance(torch.float64, torch.float64))
        assert shift(*inputs, torch.bfloat16)[0].dtype == torch.bfloat16
    else:
        with pytest.raises(ValueError, match=f"{shift.name} does not compute in float64"):
            shift(*inputs)


def test_gradcheck(shift: TokenShift, device: str) -> None:
    if torch.float64 not in shift.requires.dtypes:
        pytest.skip(f"{shift.name} does not compute in float64")
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 3, 5, dtype=torch.float64, device=device)]
    assert torch.autograd.gradcheck(shift, inputs)


@pytest.mark.parametrize("dtypes", [*itertools.product((torch.bfloat16, torch.float32), repeat=3)], ids=str)
def test_inputs_of_several_dtypes(shift: TokenShift, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """The mixes come in x's dtype unless asked, and each gradient in that of its input."""
    inputs = [tensor.to(dtype) for tensor, dtype in zip(cases.inputs(2, 9, 5, device=device), dtypes, strict=True)]
    assert {mix.dtype for mix in shift(*inputs)} == {dtypes[0]}
    grads = cases.upstream(2, 9, 5, dtype=torch.bfloat16, device=device)
    results = cases.results(shift, *inputs, grads)
    assert [result.dtype for result in results.values()] == [torch.bfloat16, *dtypes]
    assert not misses(errors(results, cases.reference(*inputs, grads)), cases.tolerance(torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
def test_an_empty_size_gives_empty_tensors(shift: TokenShift, shape: tuple[int, int, int], device: str) -> None:
    grads = cases.upstream(*shape, dtype=torch.bfloat16, device=device)
    results = cases.results(shift, *cases.inputs(*shape, device=device), grads)
    assert results["mixes"].shape == (cases.MIXES, *shape)
    assert not any(results[name].any() for name in cases.GRADIENTS)


def test_the_same_bits_twice(shift: TokenShift, device: str) -> None:
    inputs, grads = cases.inputs(3, 200, 40, device=device), cases.upstream(3, 200, 40, dtype=torch.bfloat16, device=device)
    first, second = (cases.results(shift, *inputs, grads) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_and_gradients_are_left_as_they_were(shift: TokenShift, device: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 5, 16, device=device)]
    out = shift(*inputs)
    grads = [torch.randn_like(mix) for mix in out]
    before = [tensor.detach().clone() for tensor in (*inputs, *grads)]
    torch.autograd.grad(out, inputs, grads)
    assert all(map(torch.equal, before, (*inputs, *grads)))


def test_results_may_be_written_to(shift: TokenShift, device: str) -> None:
    """Each has memory of its own, and none is a view for autograd."""
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 5, 16, device=device)]
    out = shift(*inputs)
    expected = [mix.detach().clone() for mix in out]
    out[0].zero_()
    assert all(map(torch.equal, out[1:], expected[1:]))
    assert len({mix.data_ptr() for mix in (*out, *inputs)}) == len(out) + len(inputs)


def test_a_mix_that_nobody_reads_counts_as_zero(shift: TokenShift, device: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 9, 16, device=device)]
    found, expected = (torch.autograd.grad(function(*inputs)[1].square().sum(), inputs) for function in (shift, one_line))
    for actual, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)


def test_strided_inputs_and_gradients(shift: TokenShift, device: str) -> None:
    """y.sum() sends back a single number with strides of 0."""
    plain = cases.inputs(4, 6, 32, device=device)
    strided = [tensor.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for tensor in plain]
    plain = [tensor.requires_grad_() for tensor in plain]
    for found, expected in zip(shift(*strided), shift(*plain), strict=True):
        assert torch.equal(found, expected)
    both = (torch.autograd.grad(sum(map(torch.sum, shift(*inputs))), inputs) for inputs in (strided, plain))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("C", [31, 32])
@pytest.mark.parametrize("offset", [1, 8])
def test_inputs_inside_larger_buffers(shift: TokenShift, offset: int, C: int, dtype: torch.dtype, device: str) -> None:
    """Nothing beside them is read (it is NaN), and an address that no vector load takes is no trouble."""
    def inside(tensor: Tensor) -> Tensor:
        buffer = torch.full((tensor.numel() + 2 * offset,), NAN, device=device, dtype=tensor.dtype)
        return buffer[offset:-offset].view(tensor.shape).copy_(tensor)

    inputs = cases.inputs(3, 5, C, device=device)
    grads = [torch.randn(3, 5, C, device=device).to(dtype) for _ in range(cases.MIXES)]
    results = []
    for place in (Tensor.clone, inside):
        leaves = [place(tensor).requires_grad_() for tensor in inputs]
        out = shift(*leaves, dtype)
        results.append((*out, *torch.autograd.grad(out, leaves, [*map(place, grads)])))
    assert all(map(torch.equal, *results))


def test_opcheck(shift: TokenShift, device: str) -> None:
    """Schema, fake and autograd registration are what torch.compile will rely on."""
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 3, 9, device=device)]
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(getattr(torch.ops.timemix, f"shift_{shift.name}").default, (*inputs, dtype))


def test_compiles_without_a_graph_break(shift: TokenShift, device: str) -> None:
    torch.compiler.reset()               # it compiles one function a limited number of times, and here comes each kernel
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 3, 9, device=device)]

    def function(x: Tensor, last_x: Tensor, mus: Tensor) -> Tensor:
        halves, two = shift(2 * x, last_x, mus, torch.bfloat16), shift(x, last_x, mus[:2])
        return torch.stack(halves).float().square().sum() + torch.stack(two).tanh().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, *(torch.autograd.grad(each(*inputs), inputs) for each in (compiled, function))))


@pytest.fixture
def chosen_anew() -> Iterator[None]:
    """The choice holds as long as a process does, but for these tests."""
    select._token_shift.cache_clear()
    yield
    select._token_shift.cache_clear()


@pytest.mark.parametrize("device_type", select.SHIFT)
def test_what_a_model_uses_is_what_the_committed_results_say(device_type: str) -> None:
    """Both passes together, at lengths that go through the operator, what the rule names is within 10 % of the fastest."""
    rule = select.SHIFT[device_type]
    reports = [report for report in read(committed()) if (report["op"], report["device"]) == ("shift", device_type)]
    assert rule.measured == bool(reports)
    shapes = [measured for report in reports for measured in report["shapes"]]
    long = [measured for measured in shapes if math.prod(measured["shape"].values()) in fused.LONG]
    assert bool(long) == bool(reports)
    for measured in long:
        ms: dict[str, float] = {}
        for result in measured["results"]:
            ms[result["name"]] = ms.get(result["name"], 0.0) + result["ms"]
        assert all(ms[name] <= 1.1 * min(ms.values()) for name in rule.order[:1]), measured["shape"]


def test_a_model_has_taichi_for_float32_alone(with_taichi: None) -> None:
    assert select.token_shift("cpu", torch.float64) is select.token_shift("cpu", torch.bfloat16) is None
    assert select.token_shift("cpu") is select.token_shift(torch.device("cpu"), torch.float32)


@pytest.fixture
def with_taichi(chosen_anew: None) -> None:
    """On a machine where Taichi is the choice."""
    if select.token_shift() is None:
        pytest.skip(why_not("shift", "taichi_v0") or "there is a GPU here, or Taichi runs on something else")
    select._token_shift.cache_clear()


def test_in_a_forked_child_a_model_does_without_taichi(with_taichi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launch would hang, since Taichi's threads did not come along; the parent goes on with it."""
    before, process = select.token_shift(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert select.token_shift() is None
    monkeypatch.undo()
    assert select.token_shift() is before


def test_where_taichi_does_not_start_a_model_does_without(with_taichi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise KernelUnavailable("Taichi has one arch per process")

    monkeypatch.setattr(load("shift", "taichi_v0"), "launch", refuses)
    assert select.token_shift() is None


def test_where_a_gpu_is_taichi_is_left_to_it(with_taichi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not", lambda op, name, device: None)
    assert select.token_shift() is None


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda x, last_x, mus: (x[0], last_x, mus), r"got \(3, 4\), \(2, 4\), \(3, 4\)"),
    (lambda x, last_x, mus: (x, last_x[:1], mus), r"expects x \(B,T,C\), last_x \(B,C\) and mus \(n,C\) .* got .*\(1, 4\)"),
    (lambda x, last_x, mus: (x, last_x, mus[:, :3]), r"got .* \(3, 3\)"),
    (lambda x, last_x, mus: (x, last_x, mus[0]), r"got .* \(4,\)"),
    (lambda x, last_x, mus: (x, last_x, mus[:0]), r"n at least 1, got .* \(0, 4\)"),
    (lambda x, last_x, mus: (x.long(), last_x, mus), r"floating-point tensors, got torch.int64, torch.float32, torch.float32"),
    (lambda x, last_x, mus: (x, last_x, mus, torch.float64), r"gives torch.float32, .* of such an x, not torch.float64"),
    (lambda x, last_x, mus: (x.to(torch.float8_e4m3fn), last_x, mus), r"not torch.float8_e4m3fn"),
    (lambda x, last_x, mus: (x, last_x, mus, torch.int64), r"not torch.int64"),
])
def test_wrong_inputs_are_refused_with_a_sentence(change, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FORMULA(*change(*cases.inputs(2, 3, 4)))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^unknown shift implementation 'nonsense'; there are: formula, "):
        TokenShift("nonsense")


def test_it_is_written_with_what_holds_it() -> None:
    assert repr(pickle.loads(pickle.dumps(FORMULA))) == "TokenShift('formula')"


@pytest.mark.parametrize("name", ["formula", "torch_fused"])
def test_gradients_by_hand_are_autograds_and_seen_by_who_watches(name: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in cases.inputs(2, 3, 4)]
    shift, grads = TokenShift(name), tuple(torch.ones(2, 3, 4) for _ in range(len(inputs[2])))
    expected = torch.autograd.grad(shift(*inputs), inputs, grads)
    with torch.no_grad(), torch.profiler.profile() as profiler:
        found = shift.gradients(*inputs, grads)
    assert f"timemix::shift_{name}_backward" in {event.key for event in profiler.key_averages()}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
