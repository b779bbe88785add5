"""Executes the CUDA softmax on the CPU under sanitizers (tests/cuda_host), and tests it like every softmax."""

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import test_conformance as conformance
import test_softmax as properties
import torch
from cuda_host import ORDERS, Host, on_the_cpu
from implementations import in_soak

from kernels.registry import names
from kernels.softmax import Softmax, cases

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("poisoned_memory")]
CUDA = [name for name in names("softmax") if name.startswith("cuda_")]
ADAPTER = conformance.ADAPTERS["softmax"]
BLOCKS = ((1, 1024), (2, 1025), (1, 40_003))         # the longest row of a warp; 3 warps; 32 warps in two rounds
SHAPES = (*cases.SHAPES, *BLOCKS)


@pytest.fixture(params=CUDA)
def softmax(request: pytest.FixtureRequest, host: Host) -> Iterator[Softmax]:
    with on_the_cpu(host, "shuffled"):
        yield Softmax(request.param)


@pytest.mark.parametrize(("shape", "order"), [*zip(SHAPES, cycle(ORDERS[:2]), strict=False),
                                              *in_soak(*map(pytest.param, SHAPES, cycle(ORDERS[1::-1])))], ids=str)
@pytest.mark.parametrize("name", CUDA)
def test_output_and_gradient(name: str, shape: tuple[int, ...], order: str, host: Host) -> None:
    """The shapes have rows that start at any multiple of 4 bytes, and more or fewer rows than a block."""
    with on_the_cpu(host, order):
        assert not conformance.wrong(ADAPTER, Softmax(name), ADAPTER.inputs(shape, torch.float32, "cpu"))


@pytest.mark.parametrize("M", [8, 100, 1030])
def test_nonfinite_values_give_the_results_of_torch(softmax: Softmax, M: int) -> None:
    properties.test_nonfinite_values_give_the_results_of_torch(softmax, M, torch.float32, "cpu")


def test_the_result_may_be_written_to(softmax: Softmax) -> None:
    properties.test_the_result_may_be_written_to(softmax, "cpu")


@pytest.mark.parametrize("test", [
    conformance.test_strided_inputs, conformance.test_inputs_are_not_changed_and_are_not_the_outputs,
    conformance.test_an_expanded_gradient, conformance.test_inputs_inside_a_larger_buffer,
    conformance.test_float64_is_exact_or_refused], ids=lambda test: test.__name__)
def test_conforms(softmax: Softmax, test: Callable[[tuple[object, Softmax], str], None]) -> None:
    test((ADAPTER, softmax), "cpu")


def test_half_precision(softmax: Softmax) -> None:
    assert not conformance.wrong(ADAPTER, softmax, ADAPTER.inputs((5, 63), torch.bfloat16, "cpu"), torch.bfloat16)


@pytest.mark.parametrize("M", [100, 5000])
@pytest.mark.parametrize("name", CUDA)
def test_the_same_bits_in_every_order(name: str, host: Host, M: int) -> None:
    results = []
    for order in ORDERS:
        with on_the_cpu(host, order):
            results.append(cases.results(Softmax(name), cases.inputs(3, M)))
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in result)
