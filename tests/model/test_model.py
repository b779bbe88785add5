"""Tests models of every generation with every kernel: their forms agree, and so do their training steps.

test_parity.py compares RWKV-4 with its paper's formulas, and rwkv7/test_rwkv7.py does so for RWKV-7.
"""

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import OPERATORS, assert_same_state, each_form, each_generation, small_config, small_model, tokens
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.select import select
from rwkv.config import ModelConfig, OptimConfig
from rwkv.model.state import State
from rwkv.pretrained import RWKV
from rwkv.training.task import LanguageModel


def assert_close(actual: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, check_dtype=False)


@each_form
@torch.no_grad()
def test_parallel_chunked_and_recurrent_forms_agree(generation: str, kernel: str) -> None:
    model = small_model(kernel, generation=generation)
    ids = tokens(model)
    logits, state = model(ids)
    for lengths in ([5, 1, 18], [1] * 24):
        state_so_far, parts = None, []
        for chunk in ids.split(lengths, dim=1):
            part, state_so_far = model(chunk, state_so_far)
            parts.append(part)
        assert_close(torch.cat(parts, dim=1), logits, 1e-5)
        assert_same_state(state_so_far, state)


@each_form
def test_a_single_step_is_the_same_with_and_without_gradient(generation: str, kernel: str) -> None:
    """Without gradients the operator's step function computes a single step, and with gradients the kernel does."""
    model = small_model(kernel, generation=generation)
    _, state = model(tokens(model))
    last = tokens(model, T=1, seed=2)
    with torch.no_grad():
        expected = model(last, state)
    logits, after = model(last, state)
    assert logits.requires_grad
    assert_close(logits, expected[0], 1e-5)
    assert_same_state(after, expected[1])


@each_generation
@pytest.mark.parametrize("T", [1, 7])
@torch.no_grad()
def test_the_input_state_is_not_changed(T: int, generation: str) -> None:
    model = small_model(generation=generation)
    for state in (model.empty_state(2), model(tokens(model))[1]):
        before = copy.deepcopy(state)
        _, after = model(tokens(model, T=T, seed=2), state)
        assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))
        assert not any(one.data_ptr() == other.data_ptr() for one, other in zip(state, after, strict=True))


SHAPES = {"rwkv4": [(3, 2, 16), *[(3, 2, 8)] * 3, (3, 2, 16)], "rwkv7": [(3, 2, 16), (3, 2, 4, 4, 4), (3, 2, 16)]}
SIZES = {"rwkv4": {"n_att": 8}, "rwkv7": {"head_size": 4}}


@each_generation
@torch.no_grad()
def test_the_state_has_the_documented_shape_and_dtype(generation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(generation=generation, **SIZES[generation]).to(dtype)
        for state in (model.empty_state(2), model(tokens(model))[1]):
            assert [tuple(part.shape) for part in state] == SHAPES[generation]
            assert {part.dtype for part in state} == {torch.float32}


@each_generation
def test_the_parts_of_an_empty_state_share_no_memory(generation: str) -> None:
    """A change of one element changes no other element."""
    model = small_model(generation=generation)
    for index in range(len(model.empty_state(2))):
        state = model.empty_state(2)
        before = copy.deepcopy(state)
        state[index].view(-1)[0] = 7.0
        assert sum(int((one != other).sum()) for one, other in zip(state, before, strict=True)) == 1


@pytest.mark.parametrize(("generation", "other"), [
    *(("rwkv4", other) for other in ({"B": 1}, {"n_layer": 2}, {"n_embd": 8}, {"n_att": 8})), ("rwkv7", {"head_size": 4})],
    ids=str)
@pytest.mark.parametrize("T", [1, 5])
def test_a_state_of_another_shape_is_refused(T: int, generation: str, other: dict[str, int]) -> None:
    model = small_model(generation=generation)
    sizes = {name: size for name, size in other.items() if name != "B"}
    state = small_model(generation=generation, **sizes).empty_state(other.get("B", 2))
    with pytest.raises(ValueError, match="state"):
        model(tokens(model, T=T), state)


@each_form
@torch.no_grad()
def test_a_later_token_changes_nothing_earlier(generation: str, kernel: str) -> None:
    model = small_model(kernel, generation=generation)
    ids = tokens(model)
    changed = ids.clone()
    changed[:, 12] = (ids[:, 12] + 1) % model.vocab_size
    one, other = model(ids)[0], model(changed)[0]
    assert_close(one[:, :12], other[:, :12], 1e-5)      # bits may differ, because the largest k of a block is its scale
    assert not torch.isclose(one[:, 12:], other[:, 12:]).all(-1).any()


@each_form
def test_packed_texts_do_not_see_each_other(generation: str, kernel: str) -> None:
    """If the loss depends on one of three texts in a row, only that text's tokens have a gradient."""
    model = small_model(kernel, generation=generation, vocab_size=60)
    lengths = 8, 12, 4                                           # the first is computed together with the second, as 12 steps
    owners = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    ids = tokens(model, B=1) % 20 + 20 * owners                 # each text has tokens of its own
    starts = (owners.diff(prepend=torch.tensor([-1])) != 0).unsqueeze(0)
    for text in range(3):
        hidden = model.forward_features(ids, starts)[:, owners == text]
        grad, = torch.autograd.grad(hidden.square().sum(), [model.emb.weight])
        assert grad[20 * text:20 * (text + 1)].any()
        grad[20 * text:20 * (text + 1)] = 0
        assert not grad.any(), text


@each_generation
@torch.no_grad()
def test_prefill_returns_the_last_position_and_rows_are_independent(generation: str) -> None:
    model = small_model(generation=generation)
    logits, state = model(tokens(model))
    last, after = model.prefill(tokens(model))
    assert_close(last, logits[:, -1], 1e-6)
    assert_same_state(after, state)
    assert_close(logits[1:], model(tokens(model)[1:])[0], 1e-6)


@pytest.mark.thorough
@each_form
def test_gradients_of_each_sample(generation: str, kernel: str) -> None:
    """torch.func gives each sample the gradients that autograd gives for the sample alone."""
    model = small_model(kernel, generation=generation)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        logits, _ = torch.func.functional_call(model, weights, (row[None, :-1],))
        return torch.nn.functional.cross_entropy(logits[0], row[1:])

    rows = tokens(model, T=8)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)
    loss(dict(model.named_parameters()), rows[1]).backward()
    for name, weight in model.named_parameters():
        assert_close(each[name][1], weight.grad, 2e-6)


@each_generation
def test_the_gradients_of_several_logits_at_once(generation: str) -> None:
    """Under vmap, each backward runs once for each logit."""
    model = small_model("torch_scan" if generation == "rwkv4" else "torch_chunk", generation=generation)
    logits, weights = model(tokens(model))[0][0, -1, :3], list(model.parameters())

    def gradients(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(logits, weights, grad, retain_graph=True)

    units = torch.eye(3)
    for together, *alone in zip(torch.vmap(gradients)(units), *map(gradients, units), strict=True):
        assert_close(together, torch.stack(alone), 2e-6)


@each_generation
def test_a_batch_of_gradients_of_the_first_vmap_is_refused(generation: str) -> None:
    model = small_model(generation=generation)
    logits = model(tokens(model))[0][0, -1, :3]
    with pytest.raises(ValueError, match=r"torch\.vmap"):
        torch.autograd.grad(logits, model.emb.weight, torch.eye(3), is_grads_batched=True)


@each_generation
def test_the_graph_of_a_dispatch_mode_is_the_model(generation: str) -> None:
    model = small_model("torch_scan" if generation == "rwkv4" else "torch_chunk", generation=generation)
    ids = tokens(model)
    assert_close(make_fx(lambda ids: model(ids)[0])(torch.zeros_like(ids))(ids), model(ids)[0], 1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_trace_computes_the_model() -> None:
    """A trace has every layer and operator, and gives the same logits for other tokens."""
    model = small_model("torch_scan")
    ids = tokens(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, (ids,), check_trace=False)
        assert_close(traced(tokens(model, seed=2))[0], model(tokens(model, seed=2))[0], 1e-5)


@each_generation
@pytest.mark.parametrize("convert", [list, tuple, lambda state: state.named()])
def test_a_state_of_another_type_is_refused(generation: str, convert: Callable[[State], Any]) -> None:
    model = small_model(generation=generation)
    with pytest.raises(ValueError, match="state"):
        model(tokens(model), convert(model.empty_state(2)))


@pytest.mark.parametrize("shape", [(2, 0), (5,), (1, 2, 3)])
def test_tokens_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        small_model()(torch.zeros(shape, dtype=torch.long))


# RWKV-7 normalises each head, which magnifies the rounding of a head with small outputs. Wide heads have more even outputs.
IN_BF16 = {"rwkv4": ({}, 0.1), "rwkv7": ({"n_embd": 32, "head_size": 32}, 0.25)}


@pytest.mark.thorough
@each_form
def test_bf16_autocast_is_close_and_the_model_learns(generation: str, kernel: str) -> None:
    sizes, allowed = IN_BF16[generation]
    model = small_model(kernel, generation=generation, **sizes)
    task, x, y = LanguageModel(model, OptimConfig(), 1, 1), tokens(model), tokens(model, seed=2)
    exact, gradients = gradients_of(task, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        rough, rough_gradients = gradients_of(task, x, y)
    assert rough == pytest.approx(exact, abs=0.03)
    for gradient, rough_gradient in zip(gradients, rough_gradients, strict=True):
        assert rough_gradient.dtype == torch.float32
        assert (rough_gradient - gradient).norm() < allowed * gradient.norm()


def gradients_of(task: LanguageModel, x: Tensor, y: Tensor) -> tuple[float, list[Tensor]]:
    task.zero_grad()
    loss = task.loss(x, y)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in task.parameters()]


# Names, sizes and initialisation


def test_parameters_have_the_official_names_and_shapes() -> None:
    C, V, A, F = 16, 50, 8, 24
    layer = {"ln1.weight": (C,), "ln1.bias": (C,), "ln2.weight": (C,), "ln2.bias": (C,),
             "att.time_decay": (A,), "att.time_first": (A,),
             "att.time_mix_k": (1, 1, C), "att.time_mix_v": (1, 1, C), "att.time_mix_r": (1, 1, C),
             "att.key.weight": (A, C), "att.value.weight": (A, C), "att.receptance.weight": (A, C), "att.output.weight": (C, A),
             "ffn.time_mix_k": (1, 1, C), "ffn.time_mix_r": (1, 1, C),
             "ffn.key.weight": (F, C), "ffn.receptance.weight": (C, C), "ffn.value.weight": (C, F)}
    expected = {f"blocks.{index}.{name}": shape for index in range(3) for name, shape in layer.items()}
    expected |= {"emb.weight": (V, C), "blocks.0.ln0.weight": (C,), "blocks.0.ln0.bias": (C,),
                 "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}
    model = small_model(n_att=A, n_ffn=F)
    assert {name: tuple(weight.shape) for name, weight in model.state_dict().items()} == expected


@pytest.fixture(scope="module")
def new_model() -> RWKV:
    torch.manual_seed(0)
    return RWKV(ModelConfig(n_layer=3, n_embd=8, n_ffn=40), 50, select("wkv4", "reference")).init_weights()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_initial_decays_and_mixing_weights(new_model: RWKV, layer: int) -> None:
    att, ffn = new_model.blocks[layer].att, new_model.blocks[layer].ffn
    rho, sigma = layer / 2, 1 - layer / 3
    for h, x in ((0, 0.0), (3, 3 / 8), (7, 7 / 8)):
        power = x ** sigma
        assert att.time_decay[h].item() == pytest.approx(-5 + 8 * (h / 7) ** (0.7 + 1.3 * rho))
        assert att.time_first[h].item() == pytest.approx(math.log(0.3) + {0: 0.0, 1: 0.5, 2: -0.5}[h % 3])
        assert att.time_mix_k[0, 0, h].item() == pytest.approx(power)
        assert att.time_mix_v[0, 0, h].item() == pytest.approx(power + 0.3 * rho)
        assert att.time_mix_r[0, 0, h].item() == pytest.approx(x ** (0.5 * sigma))
        assert ffn.time_mix_k[0, 0, h].item() == ffn.time_mix_r[0, 0, h].item() == pytest.approx(power)


def test_initial_matrices(new_model: RWKV) -> None:
    for block in new_model.blocks:
        for zero in (block.att.key, block.att.receptance, block.att.output, block.ffn.value, block.ffn.receptance):
            assert not zero.weight.any()
        orthogonal(block.att.value.weight, 1.0)
        orthogonal(block.ffn.key.weight, math.sqrt(5))
    orthogonal(new_model.head.weight, 0.5 * math.sqrt(50 / 8))
    assert 0.9e-4 < new_model.emb.weight.abs().max() <= 1e-4


def orthogonal(weight: Tensor, gain: float) -> None:
    assert_close(weight.T @ weight, gain ** 2 * torch.eye(weight.shape[1]), 1e-5)


def test_one_layer_of_one_channel_has_finite_weights() -> None:
    model = RWKV(ModelConfig(n_layer=1, n_embd=1), 3, select("wkv4", "reference")).init_weights()
    assert all(weight.isfinite().all() for weight in model.parameters())


# Only the kernel changes


def seeded_model(generation: str, kernel: str) -> RWKV:
    torch.manual_seed(0)
    return RWKV(small_config(generation), 40, select(OPERATORS[generation], kernel)).init_weights()


@cache
def train(generation: str, kernel: str, steps: int = 20) -> list[float]:
    """Returns the losses of a run from the initial weights, with the optimiser and schedule of training."""
    config = OptimConfig(warmup_steps=5, weight_decay=0.01)
    task = LanguageModel(seeded_model(generation, kernel), config, steps, val_bytes_per_token=1.0)
    configured = task.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    text = torch.randint(40, (steps, 4, 1), generator=torch.Generator().manual_seed(1)) + 3 * torch.arange(33)
    losses = []
    for batch in text % 40:
        loss = task.training_step((batch[:, :-1], batch[:, 1:]), 0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), config.grad_clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
@each_form
def test_twenty_training_steps_are_the_same_in_every_form(generation: str, kernel: str) -> None:
    reference = train(generation, "reference")
    assert reference[-1] < 0.75 * reference[0], "20 steps that learn nothing prove nothing"
    assert train(generation, kernel) == pytest.approx(reference, abs=1e-4)
