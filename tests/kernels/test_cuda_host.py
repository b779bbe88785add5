"""Executes every CUDA implementation of TimeX on the CPU under sanitizers (tests/cuda_host), with its own Python and .cu files.

The tests are those of the conformance suite, with the threads of a block in several orders.
"""

from collections.abc import Callable, Iterator
from itertools import cycle

import cuda_host
import pytest
import test_conformance as conformance
import test_timex as properties
import torch
from cuda_host import ORDERS, Host, LaunchError, on_the_cpu
from implementations import in_soak

from kernels.backends.cuda import Source
from kernels.registry import names
from kernels.timex import TimeX, cases

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("poisoned_memory")]
CUDA = [name for name in names("timex") if name.startswith("cuda_")]
# (B, C, T): whole tiles, more than a block's batches, more than a block's steps
SHAPES = (*cases.SHAPES[:-1], (3, 2, 256), (33, 1, 300), (1, 2, 1030))
QUICK_SHAPE = SHAPES[1]                          # make test runs this one for all versions but the last
BROKEN = Source(cuda_host.__file__, "broken.cu")
N = 32
ADAPTER = conformance.ADAPTERS["timex"]


@pytest.fixture(params=[*in_soak(*map(pytest.param, CUDA[:-1])), CUDA[-1]])         # make test runs only the last version
def timex(request: pytest.FixtureRequest, host: Host) -> Iterator[TimeX]:
    with on_the_cpu(host, "shuffled"):
        yield TimeX(request.param)


@pytest.mark.parametrize(("name", "shape", "order"), [
    pytest.param(name, shape, order, id=f"{name}-{shape}",
                 marks=[] if name == CUDA[-1] or shape == QUICK_SHAPE else pytest.mark.soak)
    for name in CUDA for shape, order in zip(SHAPES, cycle(ORDERS[:2]), strict=False)])
def test_output_and_gradients(name: str, shape: tuple[int, int, int], order: str, host: Host) -> None:
    with on_the_cpu(host, order):
        assert not conformance.wrong(ADAPTER, TimeX(name), ADAPTER.inputs(shape, torch.float32, "cpu"))


@pytest.mark.parametrize("test", [
    conformance.test_causality, conformance.test_strided_inputs,
    conformance.test_inputs_are_not_changed_and_are_not_the_outputs,
    conformance.test_inputs_inside_a_larger_buffer, conformance.test_an_expanded_gradient], ids=lambda test: test.__name__)
def test_conforms(timex: TimeX, test: Callable[[tuple[object, TimeX], str], None]) -> None:
    test((ADAPTER, timex), "cpu")


def test_eps_is_added_to_every_element(timex: TimeX) -> None:
    properties.test_eps_is_added_to_every_element(timex, "cpu")


@pytest.mark.parametrize("name", CUDA)
def test_the_same_bits_in_every_order(name: str, host: Host) -> None:
    results = []
    for order in ORDERS:
        with on_the_cpu(host, order):
            results.append(cases.results(TimeX(name), *cases.inputs(5, 3, 129)))
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in result)


def test_half_precision(timex: TimeX) -> None:
    assert not conformance.wrong(ADAPTER, timex, ADAPTER.inputs((3, 5, 11), torch.bfloat16, "cpu"), torch.bfloat16)


def run_broken(host: Host, kernel: str, order: str = "ascending", *args: object) -> torch.Tensor:
    """Runs a kernel of broken.cu on 0, 1, ..., 31, or on `args`, and returns its output."""
    x, y = torch.arange(float(N)), torch.empty(N)
    with on_the_cpu(host, order):
        BROKEN.launch(kernel, 1, N, *(args or (x, y, N)), shared=4 * N)  # type: ignore[arg-type]
    return y


@pytest.mark.parametrize(("kernel", "report"), [
    ("reads_past_the_end", "AddressSanitizer: heap-buffer-overflow .*READ of size 4"),
    ("reads_before_the_start", "AddressSanitizer: heap-buffer-overflow .*READ of size 4"),
    ("writes_past_the_end", "AddressSanitizer: heap-buffer-overflow .*WRITE of size 4"),
    ("reads_past_shared_memory", "AddressSanitizer: global-buffer-overflow|insufficient space for an object"),
    ("reads_past_dynamic_shared_memory", "AddressSanitizer: heap-buffer-overflow .*READ of size 4"),
    ("loads_a_misaligned_float4", "runtime error: .* misaligned address .* requires 16 byte alignment"),
    ("overflows", "runtime error: signed integer overflow"),
    ("waits_in_a_branch", r"thread \(1, 0, 0\): waits at a block's barrier that others never reach"),
    ("shuffles_with_a_lane_that_left", r"thread \(0, 0, 0\): waits at a warp's barrier that others never reach"),
])
def test_a_mistake_is_reported(host: Host, kernel: str, report: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s){kernel}.*{report}"):
        run_broken(host, kernel)


@pytest.mark.parametrize(("args", "report"), [
    ((torch.zeros(N), N), "takes arguments of the types ppi .*, was given pi"),
    ((torch.zeros(N), torch.zeros(N), 0.5), "takes arguments of the types ppi .*, was given ppf"),
    ((torch.zeros(N), torch.zeros(N, dtype=torch.float64), N), "a pointer to 4 bytes was given a tensor of 8"),
])
def test_wrong_arguments_are_reported(host: Host, args: tuple[object, ...], report: str) -> None:
    with pytest.raises(LaunchError, match=report):
        run_broken(host, "reverses", "ascending", *args)


def test_a_missing_barrier_gives_wrong_results_in_one_order(host: Host) -> None:
    right = torch.arange(N).div(2, rounding_mode="floor")
    assert [torch.equal(run_broken(host, "lacks_a_barrier", order), right) for order in ORDERS] == [True, False, False]


def test_shared_memory_starts_as_nan(host: Host) -> None:
    assert run_broken(host, "never_writes_shared_memory").isnan().all()


@pytest.mark.parametrize("order", ORDERS)
def test_barriers_and_shuffles(host: Host, order: str) -> None:
    assert torch.equal(run_broken(host, "reverses", order), torch.arange(float(N)).flip(0))
    assert torch.equal(run_broken(host, "sums", order), torch.full((N,), N * (N - 1) / 2))
