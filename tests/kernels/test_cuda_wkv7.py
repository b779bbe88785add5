"""Executes every CUDA version of WKV-7 on the CPU under sanitizers (tests/cuda_host), with its own Python and .cu files.

The tests are those of every implementation, with the threads of a block in two orders.
"""

from collections.abc import Callable, Iterator

import pytest
import test_conformance as conformance
import test_wkv7 as properties
import torch
from cuda_host import ORDERS, Host, on_the_cpu
from implementations import in_soak

from kernels.compare import errors, misses
from kernels.registry import KernelUnavailable, load, names
from kernels.wkv7 import WKV7, cases

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("poisoned_memory")]
CUDA = [name for name in names("wkv7") if name.startswith("cuda_")]
SHAPES = [(1, 11, 1, 64), (2, 1, 3, 64), (1, 129, 2, 64), (1, 63, 1, 64), (1, 16, 1, 64), (1, 64, 1, 64)]      # (B, T, H, N)
QUICK_CASES = {(CUDA[0], SHAPES[0]), *((CUDA[-1], shape) for shape in SHAPES[:3])}     # make soak runs the other cases
STEPS = dict.fromkeys(CUDA, 70) | {"cuda_v0": 20, "cuda_v1": 20, "cuda_v2": 20}       # one full chunk and a partial one


class WKV7Adapter(conformance.WKV7Adapter):
    """Uses N = 64 only, because each N requires a compilation."""

    medium, long = (1, 19, 2, 64), (1, 192, 1, 64)


ADAPTER = WKV7Adapter()


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits cuda_v3 to so few blocks that a block computes several chunks, of more than one head."""
    monkeypatch.setattr(load("wkv7", "cuda_v3"), "BLOCKS", 4)


@pytest.fixture(params=[*in_soak(*map(pytest.param, CUDA[:-1])), CUDA[-1]])         # make test runs only the last version
def wkv7(request: pytest.FixtureRequest, host: Host) -> Iterator[WKV7]:
    with on_the_cpu(host, "shuffled"):
        yield WKV7(request.param)


@pytest.mark.parametrize(("name", "shape"), [
    pytest.param(name, shape, id=f"{name}-{shape}", marks=[] if (name, shape) in QUICK_CASES else pytest.mark.soak)
    for name in CUDA for shape in SHAPES])
def test_output_state_and_gradients(name: str, shape: tuple[int, ...], host: Host) -> None:
    """Results are correct, and the order of the threads changes no bit."""
    inputs, results = ADAPTER.inputs(shape, torch.float32, "cpu"), []
    for order in ORDERS[:2]:
        with on_the_cpu(host, order):
            results.append(ADAPTER.results(WKV7(name), inputs))
    assert not misses(errors(results[0], ADAPTER.expected(inputs)), ADAPTER.tolerance(torch.float32))
    assert conformance.same_bits(*results)


def test_the_ends_of_the_range_of_decay_and_zeros(wkv7: WKV7) -> None:
    """Each head has the decay at one end of its range, or one kind of zeros."""
    inputs = cases.inputs(1, STEPS[wkv7.name], 5, 64)
    _, log_w, k, _, a, b, _ = inputs
    for head, end in enumerate((cases.FASTEST, cases.SLOWEST, 0.0)):
        log_w[:, :, head] = end
    k[:, :, 3] = 0
    for tensor in (a, b):
        tensor[:, :, 4] = 0
    actual, exact = cases.results(wkv7, inputs), ADAPTER.expected(inputs)
    for head in range(5):
        axis = {name: 1 if "state" in name else 2 for name in actual}
        of_head = [{name: tensor.select(axis[name], head) for name, tensor in results.items()} for results in (actual, exact)]
        assert not misses(errors(*of_head), cases.tolerance()), head


@pytest.mark.soak
def test_bfloat16_in_heads_that_are_padded(wkv7: WKV7) -> None:
    inputs = ADAPTER.inputs((1, STEPS[wkv7.name], 2, 20), torch.bfloat16, "cpu")
    results = cases.results(wkv7, inputs)
    assert {name: result.dtype for name, result in results.items() if result.dtype == torch.float32}.keys() == {
        "state", "grad log_w", "grad state"}
    assert not conformance.wrong(ADAPTER, wkv7, inputs, torch.bfloat16)


def test_forward_alone_gives_the_same_bits(wkv7: WKV7) -> None:
    """The forward pass without gradients is a separate kernel that saves nothing."""
    inputs = cases.inputs(1, STEPS[wkv7.name], 1, 64)
    results = cases.results(wkv7, inputs)
    y, state = wkv7(*inputs)
    assert torch.equal(y, results["y"])
    assert torch.equal(state, results["state"])


@pytest.mark.parametrize("test", [
    properties.test_state_gradient_alone, properties.test_gradients_are_0_after_the_last_read_and_before_the_first_input,
    properties.test_nan_stays_in_its_head_and_reaches_no_earlier_step], ids=lambda test: test.__name__)
def test_the_operator_has_its_properties(wkv7: WKV7, test: Callable[[WKV7, str], None]) -> None:
    test(wkv7, "cpu")


@pytest.mark.parametrize("test", [
    conformance.test_causality, conformance.test_strided_inputs,
    conformance.test_inputs_are_not_changed_and_are_not_the_outputs,
    conformance.test_inputs_inside_a_larger_buffer, conformance.test_an_expanded_gradient], ids=lambda test: test.__name__)
def test_conforms(wkv7: WKV7, test: Callable[[tuple[object, WKV7], str], None]) -> None:
    test((ADAPTER, wkv7), "cpu")


def test_a_scale_that_changes_along_time(wkv7: WKV7) -> None:
    T = STEPS[wkv7.name]
    inputs, profiles = ADAPTER.inputs((1, T, 1, 64), torch.float32, "cpu"), conformance.profiles(T)
    for name in ("value: quiet, loud", "loss: loud, quiet", "two parts are read"):
        assert not conformance.wrong_steps(ADAPTER, wkv7, inputs, *profiles[name]), name


@pytest.mark.parametrize("name", CUDA[1:])
def test_a_head_too_large_for_a_block_is_refused(name: str, host: Host) -> None:
    with on_the_cpu(host), pytest.raises(KernelUnavailable, match=f"{name}.*1056.*cuda_v0"):
        WKV7(name)(*cases.inputs(1, 1, 1, 1025))
