"""The fused elementwise steps are their plain formulas, in value and in every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
