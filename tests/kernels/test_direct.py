"""An operator called past the dispatcher is the registered one, and who has to see an operator sees the registered one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.backends.direct import Direct
from kernels.wkv4 import WKV, WKVState, cases

wkv = WKV("torch_scan")


class Called(RuntimeError):
    """The registered operator was."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An operator whose registered form only raises Called."""

    def raises(*inputs: Tensor) -> Tensor:
        raise Called

    return Direct(raises, lambda x: (2 * x,), lambda x, grad: (2 * grad,), lambda inputs, outputs: inputs)


def gradients(operator: Callable[..., Any]) -> list[Tensor]:
    *tensors, state = cases.inputs(2, 9, 3)
    leaves = [tensor.requires_grad_() for tensor in (*tensors, state.a, state.b)]
    y, a, b, p = operator(*leaves, state.p)
    return [y, a, b, p, *torch.autograd.grad(y.square().sum() + (a / b).sum(), leaves)]


def test_values_and_gradients_are_those_of_the_registered_operator() -> None:
    direct = wkv._operator
    assert all(map(torch.equal, gradients(direct), gradients(direct.registered)))


def test_past_the_dispatcher_where_autograd_alone_has_to_know(registered: Direct) -> None:
    x = torch.randn(3, requires_grad=True)
    y, = registered(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))
    with torch.no_grad():
        assert torch.equal(registered(torch.nn.Parameter(x))[0], 2 * x)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class OfAUser(Tensor):
    pass


@contextmanager
def profiled() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]):
        yield


@pytest.mark.parametrize("watching", [Watching, FakeTensorMode, profiled, lambda: torch.device("cpu")],
                         ids=("a dispatch mode", "a fake mode", "a profiler", "a function mode"))
def test_in_a_mode_the_registered_operator_is_called(registered: Direct, watching: Callable[[], Any]) -> None:
    x = torch.randn(3)
    with watching(), pytest.raises(Called):
        registered(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("call", [
    lambda operator: operator(torch.randn(3).as_subclass(OfAUser)),
    lambda operator: torch.vmap(operator)(torch.randn(2, 3)),
    lambda operator: torch.func.jvp(operator, (torch.randn(3),), (torch.randn(3),)),
    lambda operator: make_fx(operator)(torch.randn(3)),
    lambda operator: torch.jit.trace(lambda x: operator(x), torch.randn(3)),
], ids=("a subclass", "vmap", "jvp", "make_fx", "a trace"))
def test_what_is_no_plain_tensor_or_is_traced_meets_the_registered_operator(registered: Direct, call: Any) -> None:
    with pytest.raises(Called):
        call(registered)


def test_the_gradient_cannot_be_differentiated_again(registered: Direct) -> None:
    x = torch.randn(3, requires_grad=True)
    grad, = torch.autograd.grad(registered(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradients_go_only_to_what_trains() -> None:
    """Gradients for what asks for none are dropped, whatever the order of the inputs."""
    *tensors, state = cases.inputs(2, 9, 3)
    k = tensors[2].requires_grad_()
    y, _ = wkv(*tensors, WKVState(*state))
    assert torch.autograd.grad(y.sum(), k)[0].abs().sum() > 0
