"""Tests kernels/operator.py: both call paths give the same bits; modes, traces and profilers see the registered operator."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from implementations import implementation
from stubs import stub
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.matvec import MatVec, pack
from kernels.operator import Function
from kernels.pad import BrickPad, BrickPadding
from kernels.softmax import Softmax
from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv4 import WKV4, WKVState, cases
from kernels.wkv7 import WKV7

wkv = WKV4("torch_scan")


class Called(RuntimeError):
    """Is raised when the registered operator is called."""


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    """Yields a function that computes 2 x and its gradient; its registered operator only raises Called."""
    def raises(*inputs: Tensor) -> Tensor:
        raise Called

    with stub("softmax", lambda x: 2 * x, lambda y, grad_y: 2 * grad_y) as name:
        function = Softmax(name)._function
        monkeypatch.setattr(function, "_registered", raises)
        yield function


def gradients(operator: Callable[..., Any]) -> list[Tensor]:
    *tensors, state = cases.inputs(2, 9, 3)
    leaves = [tensor.requires_grad_() for tensor in (*tensors, state.a, state.b)]
    y, a, b, p = operator(*leaves, state.p)
    return [y, a, b, p, *torch.autograd.grad(y.square().sum() + (a / b).sum(), leaves)]


def test_values_and_gradients_are_those_of_the_registered_operator() -> None:
    function = wkv._function
    assert all(map(torch.equal, gradients(function), gradients(function.registered)))


def test_plain_tensors_do_not_go_through_the_dispatcher(double: Function) -> None:
    x = torch.randn(3, requires_grad=True)
    y, = double(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))
    with torch.no_grad():
        assert torch.equal(double(torch.nn.Parameter(x))[0], 2 * x)


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class UserTensor(Tensor):
    pass


@contextmanager
def profiler() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]):
        yield


@pytest.mark.parametrize("mode", [PassThrough, FakeTensorMode, profiler], ids=("a dispatch mode", "a fake mode", "a profiler"))
def test_in_a_mode_the_registered_operator_is_called(double: Function, mode: Callable[[], Any]) -> None:
    x = torch.randn(3)
    with mode(), pytest.raises(Called):
        double(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("call", [
    lambda operator: operator(torch.randn(3).as_subclass(UserTensor)),
    lambda operator: make_fx(operator)(torch.randn(3)),
    lambda operator: torch.jit.trace(lambda x: operator(x), torch.randn(3)),
], ids=("a subclass", "make_fx", "a trace"))
def test_subclasses_and_traces_see_the_registered_operator(double: Function, call: Any) -> None:
    with pytest.raises(Called):
        call(double)


TIME_DECAY, TIME_FIRST, _, V, _ = cases.inputs(3, 9, 2)
W, _ = timex_cases.inputs(1, 9, 2)


def run_wkv4(k: Tensor) -> Tensor:
    return wkv(TIME_DECAY, TIME_FIRST, k, V[:len(k)])[0]


def run_timex(k: Tensor) -> Tensor:
    return TimeX("conv1d")(W, k)


def run_pad(k: Tensor) -> Tensor:
    return BrickPadding("torch_strips")(k, 1, 2)


def tangent(operator: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Returns the tangent of operator(x) inside a dispatch mode, where the registered operator is called."""
    with dual_level(), PassThrough():
        return unpack_dual(operator(make_dual(x, x))).tangent


each_operator = pytest.mark.parametrize("operator", [run_wkv4, run_timex], ids=("wkv4", "timex"))


@each_operator
def test_function_transforms(operator: Callable[[Tensor], Tensor]) -> None:
    """torch.func gives the gradients of autograd: of all samples, of each sample, and of one output."""
    k = torch.randn(3, 9, 2, generator=torch.Generator().manual_seed(0))

    def loss(k: Tensor) -> Tensor:
        return operator(k).tanh().sum()

    leaf = k.clone().requires_grad_()
    expected, = torch.autograd.grad(loss(leaf), leaf)
    first = torch.autograd.grad(operator(leaf)[0, 4, 1], leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(k), expected)
    torch.testing.assert_close(torch.func.jacrev(operator)(k)[0, 4, 1], first)
    each = torch.func.vmap(torch.func.grad(lambda sample: loss(sample[None])))(k)
    torch.testing.assert_close(each, torch.cat([torch.func.grad(loss)(sample[None]) for sample in k]))


@each_operator
def test_gradients_of_no_samples(operator: Callable[[Tensor], Tensor]) -> None:
    """Poisson sampling, as in differentially private training, makes batches without samples."""
    k = torch.empty(0, 9, 2)
    assert torch.func.vmap(lambda sample: operator(sample[None])[0])(k).shape == k.shape
    assert torch.func.vmap(torch.func.grad(lambda sample: operator(sample[None]).sum()))(k).shape == k.shape


@pytest.mark.parametrize("name", [implementation("wkv4", "c_v0")])
def test_jacobians_without_grad_mode(name: str) -> None:
    """A kernel that reads addresses gets plain tensors instead of the wrappers of a transform."""
    k = torch.randn(3, 9, 2, generator=torch.Generator().manual_seed(0))

    def out(k: Tensor) -> Tensor:
        return WKV4(name)(TIME_DECAY, TIME_FIRST, k, V)[0]

    expected = torch.func.jacrev(out)(k)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.jacrev(out)(k), expected)


@pytest.mark.parametrize("operator", [run_wkv4, run_timex, run_pad], ids=("wkv4", "timex", "pad"))
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*get_attr")     # torch's own jvp uses torch.jit
@pytest.mark.parametrize("transform", [
    lambda operator, k: torch.func.jvp(operator, (k,), (k,)),
    lambda operator, k: torch.func.jacfwd(operator)(k),
    lambda operator, k: torch.func.hessian(lambda k: operator(k).sum())(k),
    lambda operator, k: torch.func.linearize(operator, k),
    lambda operator, k: tangent(operator, k),
], ids=("jvp", "jacfwd", "hessian", "linearize", "a dispatch mode"))
def test_forward_mode_is_refused(operator: Callable[[Tensor], Tensor], transform: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"jvp|has no gradient"):
        transform(operator, torch.ones(1, 9, 2))


@each_operator
@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=("a constant gradient", "another"))
def test_the_gradient_cannot_be_differentiated_again(operator: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]) -> None:
    """The error is raised even if the incoming gradient is constant."""
    k = torch.ones(1, 9, 2, requires_grad=True)
    grad, = torch.autograd.grad(loss(operator(k)), k, create_graph=True)
    with pytest.raises(ValueError, match="second derivative"):
        torch.autograd.grad(grad.sum(), k)


@pytest.mark.parametrize(("forward", "backward", "message"), [
    (lambda x: None, None, "forward .* must return y .*; got NoneType"),
    (lambda x: x[0], None, r"forward .* must return y \(2, 3\); got \(3,\)"),
    (lambda x: (x.clone(), x.clone()), None, "forward .* must return y .*; got"),
    (torch.clone, lambda y, grad_y: grad_y.numpy(), "backward .* must return grad_x .*; got ndarray"),
], ids=("nothing", "another shape", "too many", "an array"))
def test_a_wrong_result_of_a_kernel_is_named(forward: Any, backward: Any, message: str) -> None:
    with stub("softmax", forward, backward) as name, pytest.raises(AssertionError, match=message):
        Softmax(name)(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_gradients_go_only_to_the_inputs_that_need_one() -> None:
    """Gradients of inputs that need none are dropped, whatever the order of the inputs."""
    *tensors, state = cases.inputs(2, 9, 3)
    k = tensors[2].requires_grad_()
    y, _ = wkv(*tensors, WKVState(*state))
    assert torch.autograd.grad(y.sum(), k)[0].abs().sum() > 0


@pytest.mark.parametrize(("name", "options"), [("timex", {}), ("torch_scan", {"timex": "conv1d"}),
                                               ("timex", {"timex": "conv1d", "chunk": 3})])
def test_an_option_that_is_missing_or_unknown_is_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"WKV4\('{name}'\).*({'|'.join(options) or 'timex'})"):
        WKV4(name, **options)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: run_wkv4(np.zeros((3, 9, 2))), "WKV4: k .* ndarray"),
    (lambda: wkv(TIME_DECAY, TIME_FIRST, V, V, torch.zeros(3, 3, 2)), "WKV4: the state .* Tensor"),
    (lambda: wkv(TIME_DECAY, TIME_FIRST, V, V, (1, 2, 3)), "WKV4: the state .* int, int, int"),
    (lambda: WKV7("reference")(*[torch.zeros(1, 1, 1, 1)] * 5, [[[[0.0]]]]), "WKV7: b .* list"),
    (lambda: WKV7("reference")(*[torch.zeros(1, 1, 1, 1)] * 6, [0.0]), "WKV7: state .* list"),
    (lambda: run_timex([1.0]), "TimeX: k .* list"),
    (lambda: Softmax("formula")(np.zeros(3)), "Softmax: x .* ndarray"),
    (lambda: run_pad(np.zeros((3, 9, 2))), "BrickPadding: tile .* ndarray"),
    (lambda: BrickPad(None, 1)(np.zeros((3, 9, 2))), "BrickPad: the image .* ndarray"),
    (lambda: MatVec("reference")([1.0], pack(W, "int8")), "MatVec: x .* list"),
    (lambda: MatVec("reference")(W, W), "MatVec: W .* Tensor"),
    (lambda: pack([[1.0]], "int8"), "W .* list")])
def test_the_error_names_an_input_that_is_not_a_tensor(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_threads_may_make_the_same_operator_at_once() -> None:
    """torch destroys the registration of a name while another thread registers the same name."""
    barrier = Barrier(8)
    inputs = TIME_DECAY, TIME_FIRST, V, V, *WKVState.empty(V.shape[0], V.shape[2], dtype=V.dtype)

    def result(_: int) -> Tensor:
        barrier.wait()
        return WKV4("timex", timex="formula", block=7)._function.registered(*inputs)[0]      # no other test has this block

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            results = [*pool.map(result, range(8))]
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(result, results[0]) for result in results)
