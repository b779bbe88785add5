"""Executes the CUDA scans on the CPU under sanitizers (tests/cuda_host), and tests them like every scan."""

import math
from collections.abc import Callable, Iterator

import pytest
import test_conformance as conformance
import test_wkv4 as properties
import torch
from cuda_host import COMPILER, ORDERS, Host, on_the_cpu
from implementations import in_soak

from kernels.compare import errors
from kernels.registry import names
from kernels.wkv4 import WKV4, cases

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(not COMPILER, reason="needs g++ with its sanitizers"),
              pytest.mark.usefixtures("poisoned_memory")]
CUDA = [name for name in names("wkv4") if name.startswith("cuda_")]
SEGMENTS = ((2, 300, 3), (1, 131, 33), (1, 128, 64))   # (B, T, C): full and partial chunks of 128 steps, blocks of 32
ALLOWED = {"+-5": 1e-5, "+-230": 3e-5}


@pytest.fixture(params=CUDA)
def scan(request: pytest.FixtureRequest, host: Host) -> Iterator[WKV4]:
    with on_the_cpu(host, "shuffled"):
        yield WKV4(request.param)


@pytest.mark.parametrize(("spread", "with_state", "order"), [
    ("+-5", False, ORDERS[0]), ("+-230", True, ORDERS[1]),
    *in_soak(pytest.param("+-5", False, ORDERS[1]), pytest.param("+-230", True, ORDERS[0]))])
@pytest.mark.parametrize("shape", [*cases.SHAPES[:3], *SEGMENTS], ids=str)
@pytest.mark.parametrize("name", CUDA)
def test_output_state_and_gradients(name: str, shape: tuple[int, int, int], spread: str, with_state: bool, order: str,
                                    host: Host) -> None:
    k_spread = (cases.SPREADS | cases.WIDE_SPREADS)[spread]
    time_decay, time_first, k, v, state = cases.inputs(*shape, k_spread, with_state)
    inputs = time_decay, time_first, k, v, state if with_state else None
    with on_the_cpu(host, order):
        actual = errors(cases.results(WKV4(name), inputs), properties.reference(inputs))
    assert max(actual.values()) <= ALLOWED[spread], actual


@pytest.mark.parametrize(("test", "arguments"), [
    (properties.test_finite_at_extreme_parameters, ()), (properties.test_y_lies_between_the_smallest_and_the_largest_v, ()),
    (properties.test_range_of_the_convolution_form, ()), (properties.test_the_whole_sequence_equals_chunks_and_steps, ()),
    (properties.test_a_step_with_k_minus_infinity_has_no_weight, ()), (properties.test_one_state_has_many_representations, ()),
    (properties.test_finite_at_any_spread, ("+-1e7",)),
    *((properties.test_gradients_of_each_output_alone, (output,)) for output in ("y", "state")),
    *((properties.test_the_first_output_is_its_own_v, (first,)) for first in (0.0, -200.0)),
    *((properties.test_a_nonfinite_value_shows_from_its_step_on, (where, value)) for where in "kv"
      for value in (math.nan, math.inf)),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_operator_has_its_properties(scan: WKV4, test: Callable[..., None], arguments: tuple[object, ...]) -> None:
    test(scan, *arguments, "cpu")


@pytest.mark.parametrize("test", [
    conformance.test_causality, conformance.test_the_same_bits_twice, conformance.test_strided_inputs,
    conformance.test_dtypes_are_those_of_the_inputs], ids=lambda test: test.__name__)
def test_conforms(scan: WKV4, test: Callable[[tuple[object, WKV4], str], None]) -> None:
    test((conformance.ADAPTERS["wkv4"], scan), "cpu")


def test_half_precision(scan: WKV4) -> None:
    adapter = conformance.ADAPTERS["wkv4"]
    assert not conformance.wrong(adapter, scan, adapter.inputs((3, 63, 4), torch.bfloat16, "cpu"), torch.bfloat16)


def test_a_slow_decay_over_many_chunks(scan: WKV4) -> None:
    """The decay of one step, rounded to float32 and raised to the 3000th power, would be off by 1e-4."""
    _, time_first, k, v, state = cases.inputs(1, 3000, 2)
    inputs = torch.full((2,), -9.0), time_first, k, v, state
    actual = errors(cases.results(scan, inputs), properties.reference(inputs))
    assert max(actual.values()) <= 5e-6, actual
