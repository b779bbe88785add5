"""Tests the Triton kernels on a CPU under Triton's interpreter: test_triton.py runs this file with TRITON_INTERPRET=1.

The tests call TimeX, WKV4, WKV7 and Softmax as a user does, but skip the check that the kernels have a GPU.
"""

import itertools
import math

import numpy as np
import pytest
import test_conformance
import test_wkv4 as conformance
import test_wkv7 as properties
import torch
from triton_interpreter import speed_up_interpreter

from benchmarks._gpu_parts.right import compare_results
from kernels import registry
from kernels.compare import err_ratio, errors, misses
from kernels.softmax import Softmax
from kernels.softmax import cases as softmax_cases
from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv4 import WKV4
from kernels.wkv4 import cases as wkv_cases
from kernels.wkv7 import WKV7
from kernels.wkv7 import cases as wkv7_cases

speed_up_interpreter()
pytestmark = pytest.mark.usefixtures("poisoned_memory")
KERNELS = [(op, name) for op in registry.operators() for name in registry.names(op) if name.startswith("triton_")]
SMALL = {"timex": ((2, 3, 19),), "wkv4": ((1, 11, 5),), "wkv7": ((1, 9, 2, 5), (1, 17, 1, 16)), "softmax": ((3, 35),),
         "pad": test_conformance.ADAPTERS["pad"].shapes[:1], "matvec": ((3, 20, 63),)}


def wrong(op: str, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    adapter = test_conformance.ADAPTERS[op]
    operator, inputs = adapter.kind(name), adapter.inputs(shape, dtype, "cpu")
    actual = adapter.results(operator, inputs)
    assert next(iter(actual.values())).dtype == dtype
    return misses(errors(actual, test_conformance.expected(adapter, inputs)), adapter.allowed_errors(operator, dtype))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks and chunks small and programs few, because the interpreter is slow.

    C = 5 still has several blocks, T = 20 has several chunks, and a program computes several of them.
    """
    monkeypatch.setattr("kernels.operator.check", lambda *args: None)
    for module, sizes in ((registry.load("wkv4", "triton_scan"), {"CHANNELS": 4, "STEPS": 4}),
                          (registry.load("wkv7", "triton_v0"), {"CHUNK": 4, "SHARE": 8, "PROGRAMS": 2})):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize(("op", "name"), KERNELS, ids=["-".join(kernel) for kernel in KERNELS])
def test_every_kernel(op: str, name: str) -> None:
    """Results and gradients are compared at small shapes in each dtype of the kernel; new files are tested automatically."""
    adapter = test_conformance.ADAPTERS[op]
    for dtype in registry.load(op, name).REQUIRES.dtypes:
        for shape in SMALL[op]:
            actual = wrong(op, name, shape, dtype)
            assert not actual, f"{name} at {shape} in {dtype}: {actual}"
    assert adapter.kind(name).requires.devices == ("cuda",)


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.float32) for shape in ((1, 1, 1), (3, 5, 11), (5, 2, 129), (1, 1, 300), (17, 2, 70), (70, 2, 65))),
    ((3, 2, 70), torch.bfloat16)], ids=str)
def test_timex(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The shapes have one and several blocks of 16, 64 and 128 rows, full and partial."""
    assert not wrong("timex", "triton_v0", shape, dtype)


def test_timex_causality_and_the_same_bits_twice() -> None:
    w, k = timex_cases.inputs(2, 2, 140)
    other_w, other_k = w.clone(), k.clone()
    other_w[:, :-70], other_k[:, :, 70:] = 1e3, 1e3
    out, again, other = (TimeX("triton_v0")(*inputs) for inputs in ((w, k), (w, k), (other_w, other_k)))
    assert torch.equal(out, again)
    assert torch.equal(out[:, :, :70], other[:, :, :70])


def wkv_errors(inputs, loss_of: str = "y and state") -> dict[str, float]:
    return errors(wkv_cases.results(WKV4("triton_scan"), inputs, loss_of), conformance.reference(inputs, loss_of))


@pytest.mark.parametrize(("shape", "spread"), [((1, 1, 1), 1.0), ((2, 11, 5), 1.0), ((1, 35, 4), 5.0)], ids=str)
def test_wkv(shape: tuple[int, int, int], spread: float) -> None:
    """The shapes have one and several tiles, full and partial, and two blocks of channels; some widths are compiled in."""
    assert not misses(wkv_errors(wkv_cases.inputs(*shape, spread)), wkv_cases.tolerance())


@pytest.mark.parametrize("loss_of", ["y", "state"])
def test_wkv_gradients_of_each_output_alone(loss_of: str) -> None:
    assert not misses(wkv_errors(wkv_cases.inputs(1, 18, 3), loss_of), wkv_cases.tolerance())


def test_wkv_from_the_empty_state() -> None:
    assert not misses(wkv_errors((*wkv_cases.inputs(1, 16, 3)[:4], None)), wkv_cases.tolerance())


@pytest.mark.parametrize(("spread", "y", "gradient"), [("+-43", 1e-5, 3e-5), ("+-230", 1e-4, 3e-4)])
def test_wkv_at_any_spread(spread: str, y: float, gradient: float) -> None:
    actual = wkv_errors(wkv_cases.inputs(1, 20, 4, wkv_cases.WIDE_SPREADS[spread]))
    assert max(actual[name] for name in ("y", "a/b", "p + log b")) <= y, actual
    assert max(actual[name] for name in actual if name.startswith("grad")) <= gradient, actual


def test_wkv_is_finite_at_the_limits() -> None:
    """time_decay and time_first are -100, 0 and 100 in every combination, with steps of huge, zero and ordinary k."""
    corners = torch.tensor(list(itertools.product((-100.0, 0.0, 100.0), repeat=2)))
    _, _, k, v, state = wkv_cases.inputs(1, 20, len(corners))
    k[:, ::3], k[:, 1::3] = 1e7 * k[:, ::3], 0.0
    results = wkv_cases.results(WKV4("triton_scan"), (corners[:, 0], corners[:, 1], k, v, state), of="y")
    assert all(results[name].isfinite().all() for name in results if name not in ("a/b", "p + log b")), results


@pytest.mark.parametrize(("where", "value"), [("k", math.nan), ("v", math.inf)])
def test_a_nonfinite_value_shows_from_its_step_on(where: str, value: float) -> None:
    with np.errstate(all="ignore"):
        conformance.check_what_is_not_finite(WKV4("triton_scan"), where, value, 20, "cpu")


def test_wkv_of_the_whole_equals_wkv_of_pieces() -> None:
    conformance.check_whole_is_pieces(WKV4("triton_scan"), wkv_cases.inputs(1, 23, 3), (17, 1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wkv_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads and writes k, v, y and their gradients in half precision, and the state in float32."""
    scan, dtypes = registry.load("wkv4", "triton_scan"), []
    backward = scan.backward

    def recording_backward(*tensors: torch.Tensor) -> object:
        dtypes.append({tensor.dtype for tensor in tensors if tensor.dim() == 3})
        return backward(*tensors)

    monkeypatch.setattr(scan, "backward", recording_backward)
    time_decay, time_first, k, v, state = wkv_cases.inputs(1, 20, 3)
    inputs = time_decay, time_first, k.to(dtype), v.to(dtype), state
    results = wkv_cases.results(WKV4("triton_scan"), inputs)
    assert results["y"].dtype == results["grad k"].dtype == dtype
    assert results["a/b"].dtype == torch.float32
    assert dtypes == [{dtype}]
    assert not misses(errors(results, conformance.reference(inputs)), wkv_cases.tolerance(dtype))


@pytest.fixture(params=[name for name in registry.names("wkv7") if name.startswith("triton_")])
def wkv7(request: pytest.FixtureRequest) -> WKV7:
    return WKV7(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2, 20), (1, 9, 2, 5), (2, 35, 1, 17), (1, 18, 1, 64)], ids=str)
def test_wkv7(wkv7: WKV7, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The shapes have one and several chunks and blocks, full and partial, and heads that are padded."""
    assert not wrong("wkv7", wkv7.name, shape, dtype)


@pytest.mark.parametrize("log_w", [wkv7_cases.FASTEST, wkv7_cases.SLOWEST, 0.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wkv7_at_the_ends_of_the_range_of_decay(wkv7: WKV7, log_w: float, dtype: torch.dtype) -> None:
    adapter, inputs = test_conformance.ADAPTERS["wkv7"], wkv7_cases.inputs(1, 40, 2, 16, log_w=log_w, dtype=dtype)
    assert not test_conformance.wrong(adapter, wkv7, inputs, dtype)


def test_wkv7_in_bfloat16_over_many_chunks_without_decay() -> None:
    """Rounding errors do not add up from chunk to chunk."""
    adapter, inputs = test_conformance.ADAPTERS["wkv7"], wkv7_cases.inputs(1, 300, 1, 16, wkv7_cases.SLOWEST, torch.bfloat16)
    assert not test_conformance.wrong(adapter, WKV7("triton_v1"), inputs, torch.bfloat16)


@pytest.mark.parametrize("zeros", [("k",), ("a", "b"), ("r",), ("v",), ("state",)], ids=str)
def test_wkv7_with_zeros(wkv7: WKV7, zeros: tuple[str, ...]) -> None:
    inputs = tuple(torch.zeros_like(tensor) if name in zeros else tensor
                   for name, tensor in zip(wkv7_cases.NAMES, wkv7_cases.inputs(1, 18, 1, 4), strict=True))
    assert not properties.wrong(wkv7, inputs)


@pytest.mark.parametrize("profile", ["value: quiet, loud", "loss: loud, quiet", "value and loss: a loud island",
                                     "two parts are read", "the end is not read"])
def test_wkv7_where_the_scale_changes_along_time(wkv7: WKV7, profile: str) -> None:
    adapter, T = test_conformance.WKV7Adapter(), 38
    inputs = adapter.inputs((1, T, 1, 4), torch.float32, "cpu")
    assert not test_conformance.wrong_steps(adapter, wkv7, inputs, *test_conformance.profiles(T)[profile])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wkv7_gradients_are_0_after_the_last_read_and_before_the_first_input(wkv7: WKV7, dtype: torch.dtype) -> None:
    first_v, read = 9, 28
    sequences = [tensor.clone() for tensor in wkv7_cases.inputs(1, 45, 1, 16, dtype=dtype)]
    sequences[3][:, :first_v] = 0
    sequences[6].zero_()
    leaves = [tensor.requires_grad_() for tensor in sequences]
    y, _ = wkv7(*leaves)
    grads = dict(zip(wkv7_cases.NAMES, torch.autograd.grad(y[:, :read].square().sum(), leaves), strict=True))
    for name in wkv7_cases.NAMES[:6]:
        assert not grads[name][:, read:].any(), name
        assert grads[name][:, first_v + 1:read].any(), name
    for name, last in (("r", first_v - 1), ("log_w", first_v), ("a", first_v)):
        assert not grads[name][:, :last + 1].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wkv7_is_causal_and_nan_stays_in_its_head(wkv7: WKV7, dtype: torch.dtype) -> None:
    inputs = wkv7_cases.inputs(2, 20, 2, 4, dtype=dtype)
    y, _ = wkv7(*inputs)
    for name, tensor in zip(wkv7_cases.NAMES[:6], inputs, strict=False):
        bad = tensor.clone()
        bad[1, 6, 0, 1] = math.nan
        with np.errstate(all="ignore"):
            actual, _ = wkv7(*(bad if other is tensor else other for other in inputs))
        assert torch.equal(actual[0], y[0]), name
        assert torch.equal(actual[1, :, 1], y[1, :, 1]), name
        assert torch.equal(actual[1, :6, 0], y[1, :6, 0]), name
        assert actual[1, 6:, 0].isnan().any(), name
        if name == "v":
            assert torch.equal(actual[..., 2:], y[..., 2:]), "other rows of the state"
        if name == "r":
            assert torch.equal(actual[1, 7:], y[1, 7:]), "other steps"


def test_wkv7_in_pieces_and_without_gradients(wkv7: WKV7) -> None:
    *sequences, state = wkv7_cases.inputs(1, 37, 1, 4)
    expected = WKV7("reference")(*sequences, state)
    ys = []
    for piece in zip(*(sequence.split((5, 16, 16), 1) for sequence in sequences), strict=True):
        y, state = wkv7(*piece, state)
        ys.append(y)
    assert all(err_ratio(*pair) < 5e-6 for pair in zip((torch.cat(ys, 1), state), expected, strict=True))


def test_gpu_check_allows_the_rounding_of_a_kernel() -> None:
    """With the operator's tolerance, gpu_check would call the state of the default kernel wrong."""
    inputs = wkv7_cases.inputs(1, 40, 1, 16, dtype=torch.bfloat16)
    operator = WKV7("triton_v1")
    results = [wkv7_cases.results(*pair) for pair in ((operator, inputs), (WKV7("reference"), wkv7_cases.double(inputs)))]
    row = compare_results(operator, *results, torch.bfloat16)
    assert row["wrong"] == {}
    assert row["errors"]["state"] > wkv7_cases.tolerance(torch.bfloat16)["state"]


def test_a_head_too_large_for_triton_v1_is_refused() -> None:
    with pytest.raises(registry.KernelUnavailable, match=r"triton_v1.*256.*300.*triton_v0"):
        WKV7("triton_v1")(*wkv7_cases.inputs(1, 1, 1, 300))


@pytest.fixture(params=["one piece", "blocks"])
def softmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Softmax:
    """Returns a softmax that computes a row in one piece or in blocks of 16."""
    if request.param == "blocks":
        for name, size in {"LONGEST": 0, "BLOCK": 16}.items():
            monkeypatch.setattr(registry.load("softmax", "triton_v0"), name, size)
    return Softmax("triton_v0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 16), (2, 2, 35)], ids=str)
def test_softmax(softmax: Softmax, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = (softmax_cases.inputs(*shape, dtype=dtype),)
    assert not test_conformance.wrong(test_conformance.ADAPTERS["softmax"], softmax, inputs, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")               # NumPy warns of the NaN that the test needs
def test_softmax_of_special_rows(softmax: Softmax) -> None:
    x = softmax_cases.special_rows(35)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), rtol=1e-6, atol=1e-38, equal_nan=True)
