"""Adapters and learnt states: gradients against finite differences in float64, merging, and frozen weights in int8."""

import pytest
import torch
from models import each_generation, small_model, tokens
from torch import Tensor

from rwkv.errors import UserError
from rwkv.model.lora import LoraLinear, add_adapters, merged
from rwkv.model.quantized import to_int8
from rwkv.pretrained import RWKV


def adapted(generation: str, modules: tuple[str, ...] = (), **options: float) -> RWKV:
    model = small_model(generation=generation)
    add_adapters(model, modules, rank=2, alpha=6.0, **options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def with_state(**sizes: int) -> RWKV:
    model = small_model(generation="rwkv7", **sizes).requires_grad_(False)
    shape = model.empty_state(1).wkv.shape
    model.set_time_states(list(0.3 * torch.randn(shape[0], *shape[2:], generator=torch.Generator().manual_seed(3))))
    return model


def same_logits(model: RWKV, found: Tensor, expected: Tensor, in_float32: int = 0) -> None:
    """In float64, but for the order of the sums: half a unit in the last place for each term on a token's way to its logits.

    These are at most the T steps of the state and the inputs of every matrix. in_float32 is how often on that way something is
    rounded to float32 besides: half a unit of that each time.
    """
    assert found.dtype == torch.float64
    terms = expected.shape[1] + sum(weight.shape[1] for weight in model.parameters() if weight.dim() == 2)
    units = terms * torch.finfo(torch.float64).eps + in_float32 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=units / 2 * expected.abs().max().item())


def check_gradients(model: RWKV, starts: Tensor | None = None) -> None:
    """Of a sum of features, along a random direction in each trained tensor."""
    model.double()
    ids = tokens(model, T=9)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.randn(2, 9, model.config.n_embd, dtype=torch.float64)

    def value() -> Tensor:
        return (model.forward_features(ids, starts) * weights).sum()

    gradients = torch.autograd.grad(value(), trained)
    assert trained
    for parameter, gradient in zip(trained, gradients, strict=True):
        direction, step = torch.randn_like(parameter), 1e-6
        with torch.no_grad():
            parameter.add_(step * direction)
            above = value()
            parameter.sub_(2 * step * direction)
            below = value()
            parameter.add_(step * direction)
        assert ((above - below) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=1e-4, abs=1e-6)


@pytest.mark.thorough
@each_generation
def test_adapters_gradients_against_finite_differences(generation: str) -> None:
    check_gradients(adapted(generation))


@pytest.mark.parametrize("packed", [False, True])
def test_states_gradients_against_finite_differences(packed: bool) -> None:
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, [0, 4]] = True
    check_gradients(with_state(), starts if packed else None)


@each_generation
def test_merged_adapters_give_the_same_logits(generation: str) -> None:
    model = adapted(generation, ("att.key", "ffn.value")).double().eval()
    ids = tokens(model)
    apart, _ = model(ids)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear):
            weight = merged(layer.base.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale)
            layer.base.weight = torch.nn.Parameter(weight)
            model.set_submodule(name, layer.base)
    same_logits(model, model(ids)[0], apart, in_float32=2 * model.config.n_layer)        # each merged matrix is
    assert not torch.allclose(small_model(generation=generation).double()(ids)[0], apart, atol=1e-2)


@each_generation
def test_adapters_alone_are_trained_and_change_nothing_at_first(generation: str) -> None:
    model = small_model(generation=generation).double()
    before, _ = model(tokens(model))
    layers = {name for name, layer in model.blocks.named_modules() if isinstance(layer, torch.nn.Linear)}
    add_adapters(model, (), rank=2, alpha=6.0)
    assert {name for name, layer in model.blocks.named_modules() if isinstance(layer, LoraLinear)} == layers
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    same_logits(model.double(), model(tokens(model))[0], before)


def test_another_module_is_refused() -> None:
    with pytest.raises(UserError, match=r"tune.modules has 'att.query', and a block of RWKV-7 has att.receptance"):
        add_adapters(small_model(generation="rwkv7"), ("att.query",), rank=2, alpha=6.0)


def test_a_learnt_state_is_read_before_the_first_token() -> None:
    """In one pass, token by token, and packed, where each text begins with it."""
    model = with_state().double()
    ids = tokens(model, T=8)
    whole, _ = model(ids)
    assert not torch.allclose(whole, small_model(generation="rwkv7").double()(ids)[0], atol=1e-2)
    stepped, state = [], model.empty_state(2)
    with torch.no_grad():
        for t in range(8):
            logits, state = model(ids[:, t:t + 1], state)
            stepped.append(logits)
    same_logits(model, torch.cat(stepped, 1), whole, in_float32=8)                       # the state is, at each step
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 5] = True
    packed = model.head(model.forward_features(ids, starts))
    same_logits(model, packed, torch.cat((model(ids[:, :5])[0], model(ids[:, 5:])[0]), 1))


def test_a_learnt_state_is_no_part_of_the_fingerprint() -> None:
    assert with_state().fingerprint() == small_model(generation="rwkv7").fingerprint()


@each_generation
def test_gradients_reach_adapters_through_frozen_int8(generation: str) -> None:
    """Close to those with the frozen weights in float32."""
    gradients = []
    for base in ("float32", "int8"):
        torch.manual_seed(5)
        model = small_model(generation=generation, n_embd=32).requires_grad_(False)
        if base == "int8":
            to_int8(model, head=False)
        torch.manual_seed(5)
        add_adapters(model, (), rank=4, alpha=8.0)
        model.forward_features(tokens(model)).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    exact, rounded = gradients
    assert ((rounded - exact).norm() / exact.norm()).item() < 0.1
