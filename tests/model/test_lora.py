"""Tests adapters and learnt states: gradients by finite differences in float64, merging, and frozen weights in other dtypes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, saved_activations, small_model, tokens
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from kernels.matvec import Int4
from rwkv.errors import UserError
from rwkv.model.lora import LoraLinear, add_adapters, merge_adapter
from rwkv.model.quantized import (
    BFloat16Linear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    to_bfloat16,
    to_int4,
    to_int8,
    to_packed,
)
from rwkv.pretrained import RWKV

ROUNDING: dict[str, Callable[..., RWKV]] = {
    "bfloat16": to_bfloat16, "int8": lambda model: to_int8(model, head=False), "int4": lambda model: to_int4(model, head=False),
    "int8 for a GPU": lambda model: to_packed(model, "int8", "cpu", head=False),
    "int4 for a GPU": lambda model: to_packed(model, "int4", "cpu", head=False)}


def adapted_model(generation: str, modules: tuple[str, ...] = (), **options: float) -> RWKV:
    model = small_model(generation=generation)
    add_adapters(model, modules, rank=2, alpha=6.0, **options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def model_with_state(**sizes: int) -> RWKV:
    model = small_model(generation="rwkv7", **sizes).requires_grad_(False)
    shape = model.empty_state(1).wkv.shape
    model.set_time_states(list(0.3 * torch.randn(shape[0], *shape[2:], generator=torch.Generator().manual_seed(3))))
    return model


def assert_same_logits(model: RWKV, actual: Tensor, expected: Tensor, in_float32: int = 0) -> None:
    """Checks that float64 logits differ by no more than the rounding that another order of sums causes.

    The bound is half a unit in the last place for each term between a token and its logits. The terms are at most the T steps
    of the state and the inputs of all matrices. `in_float32` is the number of additional roundings to float32.
    """
    assert actual.dtype == torch.float64
    terms = expected.shape[1] + sum(weight.shape[1] for weight in model.parameters() if weight.dim() == 2)
    units = terms * torch.finfo(torch.float64).eps + in_float32 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(actual, expected, rtol=0, atol=units / 2 * expected.abs().max().item())


def check_gradients(model: RWKV, starts: Tensor | None = None) -> None:
    """Compares the gradients of a sum of features with finite differences along a random direction in each tensor."""
    model.double()
    ids = tokens(model, T=9)
    unused = {"head.weight", *model.generation.UNUSED}
    trained = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name not in unused]
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
@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradients_against_finite_differences(generation: str, method: str) -> None:
    check_gradients(adapted_model(generation) if method == "lora" else small_model(generation=generation))


@each_generation
@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradients_of_rows_of_several_texts_are_those_of_the_texts_alone(generation: str, method: str) -> None:
    """The backward pass of packed rows may use other functions than that of single texts, or products of other rows."""
    model = adapted_model(generation) if method == "lora" else small_model(generation=generation)
    model.double()
    ids, weights = tokens(model, B=1, T=9), torch.randn(9, model.config.n_embd, dtype=torch.float64)
    starts = torch.zeros(1, 9, dtype=torch.bool)
    starts[0, [0, 4]] = True
    trained = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name != "head.weight"]
    together = (model.forward_features(ids, starts)[0] * weights).sum()
    separate = sum((model.forward_features(ids[:, text])[0] * weights[text]).sum() for text in (slice(0, 4), slice(4, 9)))
    for actual, expected in zip(*(torch.autograd.grad(value, trained) for value in (together, separate)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("packed", [False, True])
def test_states_gradients_against_finite_differences(packed: bool) -> None:
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, [0, 4]] = True
    check_gradients(model_with_state(), starts if packed else None)


@each_generation
def test_merged_adapters_give_the_same_logits(generation: str) -> None:
    model = adapted_model(generation, ("att.key", "ffn.value")).double().eval()
    ids = tokens(model)
    separate, _ = model(ids)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear):
            weight = merge_adapter(layer.base.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale)
            layer.base.weight = torch.nn.Parameter(weight)
            model.set_submodule(name, layer.base)
    assert_same_logits(model, model(ids)[0], separate, in_float32=2 * model.config.n_layer)        # merging rounds each matrix
    assert not torch.allclose(small_model(generation=generation).double()(ids)[0], separate, atol=1e-2)


@each_generation
def test_adapters_alone_are_trained_and_change_nothing_at_first(generation: str) -> None:
    model = small_model(generation=generation).double()
    before, _ = model(tokens(model))
    layers = {name for name, layer in model.blocks.named_modules() if isinstance(layer, torch.nn.Linear)}
    add_adapters(model, (), rank=2, alpha=6.0)
    assert {name for name, layer in model.blocks.named_modules() if isinstance(layer, LoraLinear)} == layers
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert_same_logits(model.double(), model(tokens(model))[0], before)


def test_another_module_is_refused() -> None:
    with pytest.raises(UserError):
        add_adapters(small_model(generation="rwkv7"), ("att.query",), rank=2, alpha=6.0)


def test_a_learnt_state_is_read_before_the_first_token() -> None:
    """Logits are compared in one pass, token by token, and packed, where each text begins with the learnt state."""
    model = model_with_state().double()
    ids = tokens(model, T=8)
    whole, _ = model(ids)
    assert not torch.allclose(whole, small_model(generation="rwkv7").double()(ids)[0], atol=1e-2)
    stepped, state = [], model.empty_state(2)
    with torch.no_grad():
        for t in range(8):
            logits, state = model(ids[:, t:t + 1], state)
            stepped.append(logits)
    assert_same_logits(model, torch.cat(stepped, 1), whole, in_float32=8)                       # each step rounds the state
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 5] = True
    packed = model.head(model.forward_features(ids, starts))
    assert_same_logits(model, packed, torch.cat((model(ids[:, :5])[0], model(ids[:, 5:])[0]), 1))


def test_a_learnt_state_is_not_part_of_the_fingerprint() -> None:
    assert model_with_state().fingerprint() == small_model(generation="rwkv7").fingerprint()


@pytest.mark.parametrize("base", ["bfloat16", "int8", "int4"])
@each_generation
def test_gradients_reach_adapters_through_frozen_weights_in_other_dtypes(generation: str, base: str) -> None:
    """Gradients are close to those of the same rounded weights in float32; integer products may also round inputs."""
    model = ROUNDING[base](small_model(generation=generation, n_embd=32).requires_grad_(False))
    exact = small_model(generation=generation, n_embd=32).requires_grad_(False)
    exact.emb.weight.data = model.emb.weight.float()
    for name, layer in model.named_modules():
        if isinstance(layer, (BFloat16Linear, Int8Linear, Int4Linear, PackedLinear)):
            exact.get_submodule(name).weight.data = torch.cat(list(layer.row_blocks(torch.float32)))
    expected, actual = gradients_of_adapters(exact), gradients_of_adapters(model)
    assert ((actual - expected).norm() / expected.norm()).item() < (1e-4 if base == "bfloat16" else 0.1)


def test_packed_weights_move_with_their_model_and_keep_their_dtypes() -> None:
    model = to_packed(small_model(generation="rwkv7"), "int4", "cpu", head=False)
    layer = model.blocks[0].att.key
    before = [tensor.dtype for tensor in layer.packed]
    model.double()
    assert [tensor.dtype for tensor in layer.packed] == before
    model.to("meta")                     # as Lightning moves a model to a GPU and, at the end, back
    assert {tensor.device.type for tensor in layer.packed} == {"meta"}


@pytest.mark.parametrize("base", ["int8", "int4 for a GPU"])
def test_a_quantised_model_is_not_saved(base: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be saved, because its matrices are quantised"):
        ROUNDING[base](small_model(generation="rwkv7")).save_pretrained(tmp_path / "model.pth")


def gradients_of_adapters(model: RWKV) -> Tensor:
    torch.manual_seed(5)
    add_adapters(model, (), rank=4, alpha=8.0)
    model.forward_features(tokens(model, T=20)).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("layer", [lambda weight: BFloat16Linear(weight), lambda weight: Int4Linear(Int4.of(weight))],
                         ids=["bfloat16", "int4"])
def test_the_gradient_of_an_input_is_that_of_the_rounded_weight(layer: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(1)
    linear = layer(torch.randn(300, 70))
    x, grad = torch.randn(2, 40, 70, requires_grad=True), torch.randn(2, 40, 300)
    weight = torch.cat(list(linear.row_blocks(torch.float32)))
    (actual,) = torch.autograd.grad(linear(x), x, grad)
    torch.testing.assert_close(actual, grad @ weight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layer", [BFloat16Linear, lambda weight: Int4Linear(Int4.of(weight)), Int8Linear],
                         ids=["bfloat16", "int4", "int8"])
def test_a_dispatch_mode_saves_no_dense_copy_of_a_rounded_weight(layer: Callable[[Tensor], Any]) -> None:
    """Modes that count operations or choose what to recompute see PyTorch's operations."""
    linear, x, saved = layer(torch.randn(300, 70)), torch.randn(2, 40, 70, requires_grad=True), []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(save, lambda tensor: tensor):
        output = linear(x)
    (actual,) = torch.autograd.grad(output.sum(), x)
    assert not saved
    assert counter.get_total_flops() == 2 * 2 * 40 * 70 * 300
    torch.testing.assert_close(actual, linear.dense(torch.float32).sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_bfloat16_layers_can_be_vectorised_by_vmap() -> None:
    """The tensors of torch.func have no address, so C cannot multiply them."""
    layer, x = BFloat16Linear(torch.randn(20, 16)), torch.randn(3, 70, 16)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))


@pytest.mark.parametrize("method", ["lora", "state"])
def test_frozen_weights_take_less_memory_than_trained_ones(method: str) -> None:
    """The test measures the activations that a forward pass saves, which grow with the text."""
    model = small_model(generation="rwkv7", n_embd=64, head_size=16)
    ids_read = tokens(model, T=100)
    full_bytes = saved_activations(model, lambda: model.forward_features(ids_read))
    if method == "lora":
        add_adapters(model, (), rank=2, alpha=2.0)
    else:
        model.requires_grad_(False)
        model.set_time_states([layer.wkv[0].clone() for layer in model.empty_state(1).layers()])
    tuned_bytes = saved_activations(model, lambda: model.forward_features(ids_read))
    assert tuned_bytes <= {"lora": 0.35, "state": 0.32}[method] * full_bytes
