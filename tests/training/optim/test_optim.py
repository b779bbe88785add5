"""Tests the optimiser's parameter groups and the schedules."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import small_model

from rwkv.config import OptimConfig
from rwkv.model.lora import add_adapters
from rwkv.training.optim.optimisers import lr_factor, parameter_groups
from rwkv.training.task import LanguageModel

CONFIG = OptimConfig(lr=1e-3, min_lr=1e-5, warmup_steps=10, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-7)
DECAYED = {"emb.weight", "head.weight", *(f"blocks.{layer}.{name}.weight" for layer in range(3) for name in (
    "att.key", "att.value", "att.receptance", "att.output", "ffn.key", "ffn.value", "ffn.receptance"))}


def test_every_parameter_is_in_one_group_with_its_rate_and_decay() -> None:
    model = small_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, CONFIG)
    assert sorted(names[parameter] for group in groups for parameter in group["params"]) == sorted(names.values())
    for group in groups:
        for name in (names[parameter] for parameter in group["params"]):
            scale = {"time_decay": 2, "time_first": 3}.get(name.split(".")[-1], 1)
            assert group["lr"] == pytest.approx(scale * 1e-3)
            assert group["weight_decay"] == (0.1 if name in DECAYED else 0.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adapters_are_matrices_with_weight_decay_that_no_optimiser_orthogonalises(name: str) -> None:
    model = small_model()
    add_adapters(model, [], rank=2, alpha=4.0)
    groups = parameter_groups(model, replace(CONFIG, name=name))
    assert [(group["lr"], group["weight_decay"], "orthogonal" in group) for group in groups] == [(1e-3, 0.1, False)]


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_muon_has_the_matrices_of_blocks_but_gates_and_nothing_else_changes(name: str) -> None:
    model = small_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, replace(CONFIG, name=name, matrix_lr=0.05, matrix_momentum=0.9))
    muon_group, = (group for group in groups if group.pop("orthogonal", False))
    assert {names[parameter] for parameter in muon_group["params"]} == {
        name for name in DECAYED if name.startswith("blocks.") and "receptance" not in name}
    assert (muon_group["lr"], muon_group["weight_decay"], muon_group["momentum"]) == (0.05, 0.1, 0.9)
    before = {names[parameter]: group["lr"] for group in parameter_groups(model, CONFIG) for parameter in group["params"]}
    assert all(before[names[parameter]] == group["lr"] for group in groups if group is not muon_group
               for parameter in group["params"])


def test_each_kind_of_parameter_has_its_scale() -> None:
    model = small_model()
    names = {parameter: name.split(".")[-1] for name, parameter in model.named_parameters()}
    scales = {"time_mix": 5.0, "time_decay": 0.5, "time_first": 0.0}
    rates = {names[parameter]: group["lr"] for group in parameter_groups(model, OptimConfig(
        lr=1.0, **{f"{name}_lr_scale": scale for name, scale in scales.items()})) for parameter in group["params"]}
    assert rates.pop("weight") == rates.pop("bias") == 1.0
    assert rates == {"time_mix_k": 5.0, "time_mix_v": 5.0, "time_mix_r": 5.0, "time_decay": 0.5, "time_first": 0.0}


def weights_after_steps(**options: Any) -> list[torch.Tensor]:
    """Returns the weights after three steps in which each gradient equals its weight."""
    model = small_model()
    optimizer = LanguageModel(model, OptimConfig(warmup_steps=0, **options), 100, 1.0).configure_optimizers()["optimizer"]
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return list(model.parameters())


def test_adam_equals_adamw_only_without_weight_decay() -> None:
    assert all(map(torch.equal, weights_after_steps(name="adam"), weights_after_steps(name="adamw")))
    pairs = zip(*(weights_after_steps(name=name, weight_decay=0.5) for name in ("adam", "adamw")), strict=True)
    assert [bool((adam != adamw).any()) for adam, adamw in pairs] == [
        name in DECAYED for name, _ in small_model().named_parameters()]


def test_the_optimiser_is_the_configured_one_and_follows_the_schedule() -> None:
    optimisation = LanguageModel(small_model(), CONFIG, max_steps=100, val_bytes_per_token=1.0).configure_optimizers()
    optimizer, scheduler = optimisation["optimizer"], optimisation["lr_scheduler"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert scheduler["interval"] == "step"
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-7)
        assert group["lr"] == pytest.approx(group["initial_lr"] / 10)
    for _ in range(100):
        optimizer.step()
        scheduler["scheduler"].step()
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(group["initial_lr"] / 100)


@pytest.mark.parametrize(("schedule", "halfway"), [
    ("cosine", (1 + 0.01) / 2), ("linear", (1 + 0.01) / 2), ("exponential", 0.1), ("constant", 1.0)])
def test_a_schedule_rises_and_falls(schedule: str, halfway: float) -> None:
    factor = lr_factor(OptimConfig(lr=1e-3, min_lr=1e-5, warmup_steps=10, schedule=schedule), 110)
    assert [factor(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert factor(60) == pytest.approx(halfway)
    assert factor(110) == factor(1000) == pytest.approx(1.0 if schedule == "constant" else 0.01)


@given(st.sampled_from(("cosine", "linear", "exponential", "constant")), st.integers(0, 50), st.integers(1, 100),
       st.floats(1e-6, 1.0), st.floats(1e-3, 1.0))
def test_any_schedule_stays_between_its_rates_and_never_rises_after_the_warm_up(
        schedule: str, warmup: int, max_steps: int, lr: float, lowest: float) -> None:
    config = OptimConfig(lr=lr, min_lr=lr * lowest, schedule=schedule, warmup_steps=warmup)
    factors = [lr_factor(config, max_steps)(step) for step in range(max_steps + 1)]
    assert all(0 < factor <= 1 + 1e-12 for factor in factors)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors[warmup:]))
    assert all(factor >= lowest * (1 - 1e-9) for factor in factors[warmup:])
