"""The fused elementwise steps are their plain formulas, in value and in every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rwkv import fused as module
from rwkv.fused import sigmoid_gate, squared_relu, token_shift_mixes


def plain_mixes(x: Tensor, last_x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    return tuple(mu * x + (1 - mu) * before for mu in mus)


CASES = {
    "two mixes": (token_shift_mixes, plain_mixes, ((2, 5, 3), (2, 3), (1, 1, 3), (1, 1, 3))),
    "three mixes": (token_shift_mixes, plain_mixes, ((2, 5, 3), (2, 3), (1, 1, 3), (1, 1, 3), (1, 1, 3))),
    "one step": (token_shift_mixes, plain_mixes, ((2, 1, 3), (2, 3), (1, 1, 3), (1, 1, 3))),
    "squared relu": (squared_relu, lambda x: torch.relu(x) ** 2, ((2, 5, 3),)),
    "gate": (sigmoid_gate, lambda gate, x: torch.sigmoid(gate) * x, ((2, 5, 3), (2, 5, 3))),
}
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Case = tuple[Function, Function, tuple[tuple[int, ...], ...]]


def random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case: Case) -> None:
    fused, plain, shapes = case
    torch.testing.assert_close(fused(*random(shapes)), plain(*random(shapes)))
    assert torch.autograd.gradcheck(fused, random(shapes))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inputs_and_incoming_gradients_are_left_alone(case: Case) -> None:
    fused, _, shapes = case
    inputs = random(shapes, torch.float32)
    before = [tensor.detach().clone() for tensor in inputs]
    outputs = fused(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [torch.ones_like(output) for output in outputs]
    torch.autograd.grad(outputs, inputs, incoming)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))
    assert all((gradient == 1).all() for gradient in incoming)


def test_an_output_without_gradient_counts_as_zero() -> None:
    inputs, plain_inputs = (random(CASES["two mixes"][2]) for _ in range(2))
    token_shift_mixes(*inputs)[1].sum().backward()
    plain_mixes(*plain_inputs)[1].sum().backward()
    for fused, plain in zip(inputs[:2], plain_inputs[:2], strict=True):
        torch.testing.assert_close(fused.grad, plain.grad)
    assert not inputs[2].grad.any()


@pytest.fixture(params=[module.LONG, range(2**30)], ids=("short", "long"))
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixes through PyTorch's operations, and through the operator that a long sequence goes through."""
    monkeypatch.setattr(module, "LONG", request.param)


@pytest.mark.usefixtures("length")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] is token_shift_mixes])
def test_mixes_under_autocast_come_in_its_dtype(case: str, dtype: torch.dtype) -> None:
    """And their gradients in that of the inputs."""
    inputs, plain_inputs = (random(CASES[case][2], torch.float32) for _ in range(2))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        mixes = token_shift_mixes(*inputs)
    expected, eps = plain_mixes(*plain_inputs), torch.finfo(dtype).eps
    for found, exact in zip(mixes, expected, strict=True):
        torch.testing.assert_close(found, exact.to(dtype), rtol=2 * eps, atol=4 * eps)
    grads, exact_grads = (torch.autograd.grad([mix.sum() for mix in each], leaves)
                          for each, leaves in ((mixes, inputs), (expected, plain_inputs)))
    for found, exact in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=4 * eps, atol=20 * eps)


@pytest.mark.usefixtures("length")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_mixes_of_a_model_in_another_dtype_come_in_it(dtype: torch.dtype) -> None:
    """Its state is float32 all the same."""
    x, last_x, *mus = random(CASES["three mixes"][2], dtype)
    for found, exact in zip(token_shift_mixes(x, last_x.float(), *mus), plain_mixes(x, last_x, *mus), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")     # torch.compile does
def test_long_mixes_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one; not a compiled block's, which the compiler fuses."""
    torch.compiler.reset()
    monkeypatch.setattr(module, "LONG", range(30, 31))
    monkeypatch.setattr(module.select, "token_shift", lambda device, dtype: lambda *inputs: ("the operator",))
    inputs = random(CASES["three mixes"][2], torch.float32)              # x has 30 elements
    assert token_shift_mixes(*inputs) == ("the operator",)
    compiled = torch.compile(token_shift_mixes, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), plain_mixes(*inputs))
    for others in (range(30), range(31, 99)):
        monkeypatch.setattr(module, "LONG", others)
        torch.testing.assert_close(token_shift_mixes(*inputs), plain_mixes(*inputs))
