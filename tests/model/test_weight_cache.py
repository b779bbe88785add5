"""Tests that a weight's rounded copy is up to date, made once per step, and the only copy that a training step saves."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens
from torch import Tensor, nn

from rwkv.config import OptimConfig, TrainerConfig
from rwkv.model.loss import head_loss
from rwkv.model.weight_cache import WeightCache, round_weights
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

HALF = torch.bfloat16


def weights(n: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 5, generator=generator)) for _ in range(n)]


def optimizer_step(optimiser: type[torch.optim.Optimizer], **options: Any) -> Callable[[list[nn.Parameter]], None]:
    def change(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimiser(parameters, lr=0.5, **options).step()      # type: ignore[call-arg]

    return change


def load_state(parameters: list[nn.Parameter]) -> None:
    nn.ParameterList(parameters).load_state_dict({str(i): torch.full_like(p, i) for i, p in enumerate(parameters)})


def replace_data(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data + 1


def write_in_place(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter[0, 0] += 1


@pytest.mark.parametrize("change", [optimizer_step(torch.optim.AdamW, fused=True),
                                    optimizer_step(torch.optim.AdamW, foreach=True),
                                    optimizer_step(torch.optim.SGD), load_state, replace_data, write_in_place],
                         ids=["fused AdamW", "AdamW", "SGD", "load_state_dict", ".data =", "in place"])
def test_a_copy_follows_every_change(change: Callable[[list[nn.Parameter]], None]) -> None:
    parameters = weights()
    cache = WeightCache(parameters)
    first = round_weights(HALF, parameters)
    assert all(map(torch.equal, first, (p.to(HALF) for p in parameters)))
    change(parameters)
    again = round_weights(HALF, parameters[:1])
    assert all(map(torch.equal, round_weights(HALF, parameters), (p.to(HALF) for p in parameters)))
    assert again[0] is first[0], "a copy stays where it is"
    assert cache is not None


def test_one_operation_updates_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = weights()
    WeightCache(parameters)
    round_weights(HALF, parameters)
    calls, plain = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: calls.append(len(lists[0])) or plain(*lists))
    for _ in range(3):
        optimizer_step(torch.optim.AdamW, fused=True)(parameters)
        for _ in range(2):               # a step has two batches
            for parameter in parameters:
                round_weights(HALF, [parameter])
    assert calls == [3, 3, 3]


def test_a_copy_that_is_made_in_inference_mode_serves_training() -> None:
    (weight,) = weights(1)
    WeightCache([weight])
    with torch.inference_mode():
        round_weights(HALF, [weight])
    assert not round_weights(HALF, [weight])[0].is_inference()


def test_copies_of_a_weight_have_no_cache() -> None:
    (weight,) = weights(1)
    WeightCache([weight])
    (rounded_copy,) = round_weights(HALF, [weight])
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        with torch.no_grad():
            other += 1
        assert torch.equal(round_weights(HALF, [other])[0], other.to(HALF))
    assert len(pickle.dumps(weight)) < len(pickle.dumps(weight.data)) + 500, "the rounded copy is not pickled"
    assert torch.equal(rounded_copy, weight.to(HALF))


def train(generation: str, cached: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the losses of 3 steps under bfloat16 autocast, with two batches each, and the weights after them."""
    precision = "bf16-mixed" if cached else "32-true"
    model = prepare_blocks(small_model("c_v0", generation=generation), TrainerConfig(precision=precision))
    task = LanguageModel(model, OptimConfig(), 10, 1.0)
    optimizer = task.configure_optimizers()["optimizer"]
    losses = []
    for step in range(3):
        for part in range(2):
            x = tokens(model, seed=2 * step + part)
            with torch.autocast("cpu", HALF):
                losses.append(task.loss(x, x.roll(-1, 1)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses], [p.detach() for p in model.parameters()]


@each_generation
def test_training_is_the_same_bit_for_bit(generation: str) -> None:
    for one, other in zip(train(generation, True), train(generation, False), strict=True):
        assert all(map(torch.equal, one, other))


@each_generation
@pytest.mark.parametrize("cached", [True, False])
def test_no_second_copy_of_the_weights_lives_until_the_backward_pass(generation: str, cached: bool) -> None:
    """Autograd saves no tensor in bfloat16 that has the shape of a weight, except the cache's own copies."""
    model = small_model("c_v0", generation=generation, n_embd=32)
    if cached:
        WeightCache(model.parameters())
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2 and p.shape[0] > 6 and p.shape[1] > 6}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = tokens(model, 2, 5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", HALF):
        loss = head_loss(model.forward_features(x).flatten(0, 1), model.head.weight, x.flatten())
    rounded_weights = [tensor for tensor in saved if tensor.dtype == HALF and tuple(tensor.shape) in shapes]
    cached_pointers = {copied.data_ptr() for copied in round_weights(HALF, model.parameters())} if cached else set()
    assert all(tensor.data_ptr() in cached_pointers for tensor in rounded_weights)
    assert bool(rounded_weights) == cached
    loss.backward()
