"""The fused parts of a block are what its modules compute by their formulas, in value and in every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kernels.wkv4 import WKV4, WKVState
from rwkv.model import fused, rwkv4_fused
from rwkv.model.fused import token_shift
from rwkv.model.rwkv4 import ChannelMix, TimeMix

B, T, C, A = 2, 5, 3, 4
MIX = ((B, T, C), (B, C))
MU, SQUARE, UP, DOWN = (1, 1, C), (C, C), (A, C), (C, A)


def products(x: Tensor, last_x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return fused.mixed_products(x, last_x, others[:len(others) // 2], others[len(others) // 2:])


def plain_products(x: Tensor, last_x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    mus, weights = others[:len(others) // 2], others[len(others) // 2:]
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    return tuple(linear(mu * x + (1 - mu) * before, weight) for mu, weight in zip(mus, weights, strict=True))


def channel_mixing(x: Tensor, last_x: Tensor, mu_k: Tensor, mu_r: Tensor, *weights: Tensor) -> Tensor:
    return rwkv4_fused.channel_mixing(x, last_x, (mu_k, mu_r), *weights)


def plain_channel_mixing(x: Tensor, last_x: Tensor, mu_k: Tensor, mu_r: Tensor, *weights: Tensor) -> Tensor:
    k, r = plain_products(x, last_x, mu_k, mu_r, *weights[:2])
    return torch.sigmoid(r) * linear(torch.relu(k) ** 2, weights[2])


CASES = {
    "three products": (products, plain_products, (*MIX, MU, MU, MU, UP, UP, UP)),
    "two products": (products, plain_products, (*MIX, MU, MU, UP, SQUARE)),
    "one step": (products, plain_products, ((B, 1, C), (B, C), MU, MU, UP, SQUARE)),
    "gate": (rwkv4_fused.gated_product, lambda gate, x, weight: linear(torch.sigmoid(gate) * x, weight), (MIX[0], MIX[0], UP)),
    "channel mixing": (channel_mixing, plain_channel_mixing, (*MIX, MU, MU, UP, SQUARE, DOWN)),
}
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Case = tuple[Function, Function, tuple[tuple[int, ...], ...]]
SHIFTING = [case for case in CASES if case != "gate"]


def random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case: Case) -> None:
    found, plain, shapes = case
    torch.testing.assert_close(found(*random(shapes)), plain(*random(shapes)), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(found, random(shapes))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_second_derivative_is_refused(case: Case) -> None:
    """Also where the gradient that comes in is constant."""
    found, _, shapes = case
    inputs = random(shapes)
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(sum(output.sum() for output in several(found(*inputs))), inputs, create_graph=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inputs_and_incoming_gradients_are_left_alone(case: Case) -> None:
    found, _, shapes = case
    inputs = random(shapes, torch.float32)
    before = [tensor.detach().clone() for tensor in inputs]
    outputs = several(found(*inputs))
    incoming = [torch.ones_like(output) for output in outputs]
    torch.autograd.grad(outputs, inputs, incoming)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))
    assert all((gradient == 1).all() for gradient in incoming)


def test_an_output_without_gradient_counts_as_zero() -> None:
    shapes = CASES["two products"][2]
    inputs, plain_inputs = (random(shapes, torch.float32) for _ in range(2))
    products(*inputs)[1].sum().backward()
    plain_products(*plain_inputs)[1].sum().backward()
    for number in (0, 1, 3, 5):
        torch.testing.assert_close(inputs[number].grad, plain_inputs[number].grad)
    assert not any(inputs[number].grad.any() for number in (2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SHIFTING)
def test_under_autocast_everything_is_in_its_dtype(case: str, dtype: torch.dtype) -> None:
    """But the gradients, which are in that of the inputs."""
    found, plain, shapes = CASES[case]
    inputs, plain_inputs = (random(shapes, torch.float32) for _ in range(2))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = several(found(*inputs))
    expected, eps = several(plain(*plain_inputs)), torch.finfo(dtype).eps
    for output, exact in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), exact, rtol=8 * eps, atol=16 * eps)
    grads, exact_grads = (torch.autograd.grad([output.float().sum() for output in each], leaves)
                          for each, leaves in ((outputs, inputs), (expected, plain_inputs)))
    for grad, exact in zip(grads, exact_grads, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, exact, rtol=16 * eps, atol=60 * eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_in_another_dtype_computes_in_it(dtype: torch.dtype) -> None:
    """Its state is float32 all the same."""
    off = 3e-2 if dtype == torch.bfloat16 else 1e-6
    x, last_x, *others = random(CASES["three products"][2], dtype)
    for found, exact in zip(products(x, last_x.float(), *others), plain_products(x, last_x, *others), strict=True):
        torch.testing.assert_close(found, exact, rtol=off, atol=off)


def parts() -> list[tuple[nn.Module, Callable[..., Tensor], tuple[nn.Linear, ...]]]:
    """Both halves of a block with weights that are not zero, each as a function of x and last_x, and its layers."""
    torch.manual_seed(1)
    time, channel = TimeMix(C, A, WKV4("reference")), ChannelMix(C, A)
    for parameter in (*time.parameters(), *channel.parameters()):
        nn.init.normal_(parameter, std=0.7)
    of_time = time.key, time.value, time.receptance, time.output
    return [(time, lambda x, last_x: time(x, last_x, WKVState.empty(B, A))[0], of_time),
            (channel, lambda x, last_x: channel(x, last_x)[0], (channel.key, channel.receptance, channel.value))]


def gradients(module: nn.Module, run: Callable[..., Tensor]) -> list[Tensor]:
    inputs = random(MIX, torch.float32)
    output = run(*inputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [*inputs, *module.parameters()])]


@pytest.mark.parametrize("number", [0, 1], ids=("time mixing", "channel mixing"))
def test_a_layer_with_a_hook_is_called(number: int) -> None:
    """With the same results as without the hook."""
    module, run, layers = parts()[number]
    expected, seen = gradients(module, run), []
    for layer in layers:
        handle = layer.register_forward_hook(lambda layer, inputs, output: seen.append(layer))
        for found, exact in zip(gradients(module, run), expected, strict=True):
            torch.testing.assert_close(found, exact)
        handle.remove()
    assert seen == list(layers)


def test_layers_of_another_kind_are_called() -> None:
    """As adapters and quantised weights are."""
    plain = nn.Linear(C, C, bias=False)
    assert fused.can_fuse(plain, plain)
    other = type("Adapter", (nn.Linear,), {})(C, C, bias=False)
    quantised = nn.Linear(C, C, bias=False)
    quantised.weight = nn.Parameter(torch.Tensor._make_subclass(type("Quantised", (Tensor,), {}), torch.ones(C, C)))
    patched = nn.Linear(C, C, bias=False)
    patched.forward = lambda x: x                                        # type: ignore[method-assign]
    assert not any(fused.can_fuse(plain, layer) for layer in (other, quantised, patched, nn.Linear(C, C), nn.Identity()))


def test_frozen_weights_are_left_to_autograd() -> None:
    frozen = nn.Linear(C, C, bias=False).requires_grad_(False)
    assert not fused.can_fuse(frozen)
    with torch.no_grad():
        assert fused.can_fuse(frozen)


def test_a_global_hook_sees_all_layers() -> None:
    for module, run, layers in parts():
        seen: list[nn.Module] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda layer, *_, seen=seen: seen.append(layer))
        run(*random(MIX, torch.float32))
        handle.remove()
        assert {*layers} <= {*seen}, type(module)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")     # torch.compile does
def test_a_compiler_sees_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    module, run, _ = parts()[1]
    expected = gradients(module, run)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(rwkv4_fused, "channel_mixing", None)
    for found, exact in zip(gradients(module, lambda *inputs: compiled(*inputs)[0]), expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_the_formula_of_the_token_shift() -> None:
    x, last_x, mu, other = random((*MIX, MU, MU))
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    torch.testing.assert_close(token_shift(x, last_x, mu, other), tuple(m * x + (1 - m) * before for m in (mu, other)))
    with torch.autocast("cpu", torch.bfloat16):
        assert {mix.dtype for mix in token_shift(x.float(), last_x, mu, other)} == {torch.bfloat16}
