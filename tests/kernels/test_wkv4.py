"""Compares every implementation of WKV-4 with the float64 scan, and the scan with the sum that defines the operator.

The implementations include the convolution form with every TimeX kernel. Every file in kernels/wkv4/ and kernels/timex/ is
tested automatically. The tests require only torch, pytest and the back ends.
"""

import itertools
import math

import pytest
import torch
from implementations import cache_results, compiled_in_soak, implementation, kernels
from torch import Tensor
from torch._dynamo.utils import counters

from kernels.compare import errors, misses
from kernels.registry import load, names
from kernels.wkv4 import WKV4, WKVState, cases
from kernels.wkv4.cases import WKVInputs, double

pytestmark = pytest.mark.usefixtures("poisoned_memory")

REFERENCE = WKV4("reference")


@pytest.fixture(params=compiled_in_soak(kernels("wkv4")))
def wkv(request: pytest.FixtureRequest) -> WKV4:
    name = request.param
    return WKV4(name) if name in names("wkv4") else WKV4("timex", timex=name)


@pytest.fixture(params=compiled_in_soak([implementation("wkv4", name) for name in names("wkv4") if name != "timex"]))
def scan(request: pytest.FixtureRequest) -> WKV4:
    """Returns an implementation that is correct for any k."""
    return WKV4(request.param)


@cache_results
def reference(inputs: WKVInputs, of: str = "y and state") -> dict[str, Tensor]:
    return cases.results(REFERENCE, double(inputs), of)


def against_reference(wkv: WKV4, inputs: WKVInputs, of: str = "y and state") -> dict[str, str]:
    return misses(errors(cases.results(wkv, inputs, of), reference(inputs, of)), cases.tolerance())


def the_sum(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    """Computes WKV without a recurrence from the weights (B,T,T,C) of all pairs of steps; autograd differentiates it."""
    _B, T, _C = k.shape
    w, steps = -torch.exp(time_decay), torch.arange(T, dtype=k.dtype)
    lag = steps[:, None] - steps                                                           # (T,T): t - u
    exponent = k[:, None] + torch.where(lag[..., None] == 0, time_first, (lag[..., None] - 1) * w)
    weight = torch.where(lag[..., None] >= 0, exponent.exp(), 0.0)
    before = torch.exp(state.p[:, None] + steps[:, None] * w)                              # (B,T,C)
    num, den = before * state.a[:, None] + (weight * v[:, None]).sum(2), before * state.b[:, None] + weight.sum(2)
    decayed, added = torch.exp(state.p + T * w), torch.exp(k + (T - 1 - steps)[:, None] * w)
    a, b = decayed * state.a + (added * v).sum(1), decayed * state.b + added.sum(1)
    return num / den, WKVState(a, b, torch.zeros_like(b))


@pytest.mark.parametrize("spread", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("of", ["y", "state"])
def test_the_reference_equals_the_sum(spread: float, of: str) -> None:
    inputs = cases.inputs(2, 12, 3, spread, dtype=torch.float64)
    actual = errors(cases.results(REFERENCE, inputs, of), cases.results(the_sum, inputs, of))
    assert max(actual.values()) <= 1e-12, actual


@pytest.mark.thorough
@pytest.mark.parametrize("wkv", compiled_in_soak(kernels("wkv4"), "taichi_v", "taichi_scan"), indirect=True)
def test_output_state_and_gradients_at_a_wide_spread(wkv: WKV4, device: str) -> None:
    """Each shape is computed with and without a state. test_conformance.py tests the usual spread."""
    for shape in cases.SHAPES:
        inputs = cases.inputs(*shape, cases.SPREADS["+-23"], device=device)
        assert not against_reference(wkv, inputs), shape
        assert not against_reference(wkv, (*inputs[:4], None)), shape


@pytest.mark.thorough
@pytest.mark.parametrize("of", ["y", "state"])
def test_gradients_of_each_output_alone(wkv: WKV4, of: str, device: str) -> None:
    assert not against_reference(wkv, cases.inputs(3, 100, 4, device=device), of)


@pytest.mark.parametrize("block", [1, 7, 200])
def test_every_block_length_is_the_same_operator(block: int, device: str) -> None:
    assert not against_reference(WKV4("timex", timex="conv1d", block=block), cases.inputs(3, 70, 4, device=device))


@pytest.mark.parametrize("in_cache", [1, 300])
def test_torch_scan_in_many_segments_is_the_same_operator(in_cache: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("wkv4", "torch_scan"), "IN_CACHE", in_cache)
    assert not against_reference(WKV4("torch_scan"), cases.inputs(3, 270, 4, 5.0, device=device))


@pytest.mark.implementation("wkv4", "taichi_scan")
@pytest.mark.parametrize("shape", [
    (3, 100, 4), *(pytest.param(shape, marks=pytest.mark.soak) for shape in ((2, 33, 48), (5, 64, 32), (1, 1, 1)))], ids=str)
def test_taichi_scan_on_all_threads_gives_the_bits_of_one(shape: tuple[int, int, int], device: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """By default one thread computes small tensors, because it finishes before other threads wake up."""
    scan, inputs = WKV4("taichi_scan"), cases.inputs(*shape, device=device)
    on_one_thread = cases.results(scan, inputs)
    monkeypatch.setattr(load("wkv4", "taichi_scan"), "SERIAL", 0)
    on_all_threads = cases.results(scan, inputs)
    assert not against_reference(scan, inputs)
    assert all(torch.equal(on_one_thread[name], on_all_threads[name]) for name in on_one_thread)


@pytest.mark.thorough
def test_range_of_the_convolution_form(wkv: WKV4, device: str) -> None:
    """The convolution form is exact if all k and p are within 60 of each other, whatever the order of the extremes."""
    edge = 30.0
    time_decay, time_first, k, v, state = cases.inputs(4, 200, 8, device=device)
    distant = WKVState(state.a, state.b, edge * state.p.sign())
    assert not against_reference(wkv, (time_decay, time_first, edge * k.sign(), v, distant))
    rising = torch.linspace(-edge, edge, 200, device=device)[:, None].expand_as(k)
    assert not against_reference(wkv, (time_decay, time_first, rising, v, None))
    steps = torch.where(torch.arange(200, device=device)[:, None] % 64 < 32, -edge, edge).expand_as(k)
    assert not against_reference(wkv, (time_decay, time_first, steps, v, None))


@pytest.mark.thorough
@pytest.mark.parametrize(("spread", "y", "gradient"), [("+-5", 1e-6, 3e-5), ("+-23", 1e-6, 3e-5), ("+-43", 1e-5, 3e-5),
                                                       ("+-230", 1e-4, 3e-4)])
def test_the_scans_are_correct_at_any_spread(scan: WKV4, spread: str, y: float, gradient: float, device: str) -> None:
    """The scans store exponents as integers.

    The reference stores them in float32, which rounds a number near 230 by up to 1.5e-5 at each step, so its bounds are larger.
    """
    inputs = cases.inputs(2, 1024, 16, (cases.SPREADS | cases.WIDE_SPREADS)[spread], device=device)
    actual = errors(cases.results(scan, inputs), reference(inputs))
    allowed = {name: 1e-4 if name in ("a/b", "p + log b") else y if name == "y" else gradient for name in actual}
    if scan.name == "reference":
        allowed = dict.fromkeys(actual, 1e-3)
    assert not misses(actual, allowed)


@pytest.mark.parametrize("spread", cases.WIDE_SPREADS)
def test_finite_at_any_spread(wkv: WKV4, spread: str, device: str) -> None:
    results = cases.results(wkv, cases.inputs(3, 130, 16, cases.WIDE_SPREADS[spread], device=device), of="y")
    assert all(results[name].isfinite().all() for name in results if name not in ("a/b", "p + log b")), results


def test_finite_at_extreme_parameters(wkv: WKV4, device: str) -> None:
    """time_decay and time_first are -100, 0 and 100 in every combination, with rows of narrow, huge and zero k."""
    corners = torch.tensor(list(itertools.product((-100.0, 0.0, 100.0), repeat=2)), device=device)
    _, _, k, v, state = cases.inputs(4, 70, len(corners), device=device)
    k = k * torch.tensor([1.0, 50.0, 1e7, 0.0], device=device)[:, None, None]
    for incoming in (None, state):
        results = cases.results(wkv, (corners[:, 0], corners[:, 1], k, v, incoming), of="y")
        assert all(results[name].isfinite().all() for name in results if name not in ("a/b", "p + log b")), results


def test_y_lies_between_the_smallest_and_the_largest_v(wkv: WKV4, device: str) -> None:
    """A weighted average cannot leave the range of its inputs, at any spread."""
    time_decay, time_first, k, v, _ = cases.inputs(3, 130, 16, 50.0, device=device)
    y, _ = wkv(time_decay, time_first, k, v)
    low, high = v.cummin(1).values, v.cummax(1).values
    assert ((y >= low - 1e-5) & (y <= high + 1e-5)).all()


@pytest.mark.parametrize("first", [0.0, -200.0])
def test_the_first_output_is_its_own_v(wkv: WKV4, first: float, device: str) -> None:
    """The first step averages only its own v, so value and gradient survive however small the weight is."""
    time_decay, time_first, k, v, _ = cases.inputs(3, 20, 4, device=device)
    k[:, 0] = first
    y, _ = wkv(time_decay, time_first, k, v.requires_grad_())
    torch.testing.assert_close(y[:, 0], v[:, 0])
    grad, = torch.autograd.grad(y[:, 0].sum(), v)
    torch.testing.assert_close(grad[:, 0], torch.ones_like(grad[:, 0]))
    assert not grad[:, 1:].any()


def test_the_whole_sequence_equals_chunks_and_steps(wkv: WKV4, device: str) -> None:
    check_whole_is_pieces(wkv, cases.inputs(3, 131, 5, device=device), (50, 1, 16, 64))


def check_whole_is_pieces(wkv: WKV4, inputs: WKVInputs, lengths: tuple[int, ...]) -> None:
    time_decay, time_first, k, v, state = inputs
    whole = wkv(*inputs)
    chunks = in_pieces(lambda k, v, state: wkv(time_decay, time_first, k, v, state), k, v, state, lengths)
    steps = in_pieces(lambda k, v, state: step(time_decay, time_first, k, v, state), k, v, state, [1] * k.shape[1])
    for pieces in (chunks, steps):
        actual = errors(outputs(*pieces), outputs(*whole))
        assert not misses(actual, cases.tolerance())


def in_pieces(operator, k: Tensor, v: Tensor, state: WKVState, lengths) -> tuple[Tensor, WKVState]:
    ys = []
    for k_piece, v_piece in zip(k.split(lengths, 1), v.split(lengths, 1), strict=True):
        y, state = operator(k_piece, v_piece, state)
        ys.append(y)
    return torch.cat(ys, 1), state


def step(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    y, state = WKV4.step(time_decay, time_first, k[:, 0], v[:, 0], state)
    return y[:, None], state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_in_half_precision_keeps_the_state_in_float32(dtype: torch.dtype, device: str) -> None:
    time_decay, time_first, k, v, state = cases.inputs(3, 1, 4, device=device)
    k, v = k.to(dtype), v.to(dtype)
    y, new = step(time_decay, time_first, k, v, state)
    exact = outputs(*step(time_decay, time_first, k.float(), v.float(), state))
    assert y.dtype == dtype
    assert {part.dtype for part in new} == {torch.float32}
    assert torch.equal(y, exact["y"].to(dtype))
    assert torch.equal(new.a / new.b, exact["a/b"])


def outputs(y: Tensor, state: WKVState) -> dict[str, Tensor]:
    return {"y": y, "a/b": state.a / state.b, "p + log b": state.p + state.b.log()}


@cache_results
def reference_outputs(inputs: WKVInputs) -> dict[str, Tensor]:
    return outputs(*REFERENCE(*double(inputs)))


def test_one_state_has_many_representations(wkv: WKV4, device: str) -> None:
    time_decay, time_first, k, v, (a, b, p) = cases.inputs(3, 70, 4, device=device)
    here, there = (wkv(time_decay, time_first, k, v, state)
                   for state in (WKVState(a, b, p), WKVState(a * 2**10, b * 2**10, p - torch.tensor(2.0**10).log())))
    assert not misses(errors(outputs(*here), outputs(*there)), cases.tolerance())


@pytest.mark.parametrize(("where", "value"), [("k", math.nan), ("k", math.inf), ("v", math.nan), ("v", math.inf)])
def test_a_nonfinite_value_shows_from_its_step_on(wkv: WKV4, where: str, value: float, device: str) -> None:
    check_what_is_not_finite(wkv, where, value, 150, device)


def check_what_is_not_finite(wkv: WKV4, where: str, value: float, T: int, device: str) -> None:
    """Checks that one number that is not finite shows in later outputs of its row, in the state and in the gradients.

    Earlier steps and other rows must stay unchanged.
    """
    time_decay, time_first, k, v, state = cases.inputs(2, T, 5, device=device)
    expected, after = wkv(time_decay, time_first, k, v, state)
    b, t, c = 1, 3 * T // 5, 2
    (k if where == "k" else v)[b, t, c] = value
    y, new = wkv(time_decay, time_first, k.requires_grad_(), v, state)
    assert not y[b, t:, c].isfinite().any()
    assert not new.a[b, c].isfinite()
    grad, = torch.autograd.grad(y.sum(), k)
    assert not grad[b, :, c].isfinite().all()
    hit = torch.zeros_like(y, dtype=torch.bool)
    hit[b, t:, c] = True
    torch.testing.assert_close(y.detach()[~hit], expected[~hit], rtol=1e-4, atol=1e-5)
    assert grad[~hit[:, -1:].expand_as(grad)].isfinite().all()
    torch.testing.assert_close((new.a / new.b)[~hit[:, -1]], (after.a / after.b)[~hit[:, -1]], rtol=1e-4, atol=1e-5)


def test_a_step_with_k_minus_infinity_has_no_weight(wkv: WKV4, device: str) -> None:
    """The same holds in blocks where every k is minus infinity."""
    time_decay, time_first, k, v, state = cases.inputs(2, 200, 5, device=device)
    k[:, 50:140] = -math.inf
    inputs = time_decay.clamp(max=-5), time_first, k, v, state
    y, new = wkv(*inputs)
    actual = errors(outputs(y, new), reference_outputs(inputs))
    assert not misses(actual, cases.tolerance())


def test_a_nan_in_a_parameter_or_the_state_is_not_hidden(wkv: WKV4, device: str) -> None:
    others = [0, 1, 3, 4]
    for parameter in ("time_decay", "time_first", "a", "b", "p"):
        time_decay, time_first, k, v, state = cases.inputs(2, 150, 5, device=device)
        {"time_decay": time_decay, "time_first": time_first, **state._asdict()}[parameter][..., 2] = math.nan
        y, new = wkv(time_decay, time_first, k, v, state)
        assert not y[:, 1:, 2].isfinite().any(), parameter
        assert parameter == "time_first" or not new.a[:, 2].isfinite().any() or not new.b[:, 2].isfinite().any(), parameter
        assert y[..., others].isfinite().all(), parameter
        assert new.a[:, others].isfinite().all(), parameter


@pytest.mark.implementation("wkv4", "torch_compile_scan")
@pytest.mark.soak
def test_one_compilation_serves_every_size(device: str) -> None:
    """One compilation serves any B, C and T; remaining steps run without compilation."""
    scan = WKV4("torch_compile_scan")
    cases.results(scan, cases.inputs(2, 19, 3, device=device))
    before = counters["stats"]["unique_graphs"]
    for shape in ((1, 8, 1), (1, 33, 4), (3, 16, 3), (2, 5, 2)):
        assert not against_reference(scan, cases.inputs(*shape, device=device))
    assert counters["stats"]["unique_graphs"] == before > 0


def test_a_block_has_at_least_one_step() -> None:
    with pytest.raises(ValueError):                              # noqa: PT011
        WKV4("timex", timex="conv1d", block=0)
