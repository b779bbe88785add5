"""Tests the options that are advised for a run that does not fit into memory, and the memory that they need."""

import re
from dataclasses import replace

import pytest
from programs import compose

from rwkv.config import OptimConfig, TrainConfig, TrainerConfig
from rwkv.training.memory.estimate import estimate
from rwkv.training.memory.lines import fitting_remedy_lines
from rwkv.training.memory.remedies import remedies
from rwkv.training.run.options import check_new_run

pytestmark = pytest.mark.thorough
V, GIB = 65536, 2 ** 30
OPTIONS = ("model=rwkv7_1.5b", "model.ctx_len=1024", "data.batch_size=8", "trainer.precision=bf16-mixed")
LARGE: TrainConfig = compose("train", *OPTIONS)


def test_advised_options_can_be_typed_and_need_the_stated_memory() -> None:
    for remedy in remedies(LARGE, V, 1, "cuda", 12 * GIB):
        config = compose("train", *OPTIONS, *remedy.options.split())
        check_new_run(config, [])
        devices = config.trainer.devices if config.trainer.strategy == "fsdp" else 1
        assert estimate(config, V, devices, 12 * GIB).total == remedy.need, remedy.options


def advice_lines(config: TrainConfig, free: int, device: str = "cuda") -> list[str]:
    return [line for _, line in fitting_remedy_lines(remedies(config, V, 1, device, free), free, 0)]


@pytest.mark.parametrize(("gib", "first", "others"), [
    (48, "trainer.activation_checkpointing=true", ["optim_in_backward", "adamw8bit", "trainer=fsdp trainer.devices=2"]),
    (28, "trainer.activation_checkpointing=true data.batch_size=4 trainer.accumulate=2", ["trainer=fsdp"]),
    (24, "trainer.activation_checkpointing=true trainer.optim_in_backward=true optim.grad_clip=0", ["optim=adamw8bit"]),
    (12, "trainer.activation_checkpointing=true optim=adamw8bit trainer.optim_in_backward=true optim.grad_clip=0 "
         "data.batch_size=1", ["trainer=fsdp trainer.devices=4"])])
def test_the_cheapest_comes_first_and_every_kind_once(gib: int, first: str, others: list[str]) -> None:
    lines = advice_lines(LARGE, gib * GIB)
    assert lines[0].endswith(f" with {first}")
    for other in others:
        assert any(other in line for line in lines)
    kinds = [re.sub(r"\d+", "", line.partition(" with ")[2]) for line in lines]
    assert len(kinds) == len(set(kinds))


def test_adapters_are_advised_for_weights_that_exist_and_gpus_where_there_are_gpus() -> None:
    assert not any("tune=lora" in line for line in advice_lines(LARGE, 12 * GIB))
    tuned = replace(LARGE, init_from="base.pth")
    assert any("tune=lora" in line for line in advice_lines(tuned, 12 * GIB))
    assert not any("fsdp" in line for line in advice_lines(tuned, 12 * GIB, "cpu"))


@pytest.mark.parametrize("config", [
    replace(LARGE, optim=OptimConfig(name="muon")), replace(LARGE, trainer=TrainerConfig(tbptt=4)),
    replace(LARGE, trainer=TrainerConfig(accumulate=3)), replace(LARGE, trainer=TrainerConfig(strategy="ddp", devices=2)),
    replace(LARGE, trainer=TrainerConfig(precision="fp16-mixed"))])
def test_no_advice_contradicts_the_run_s_other_options(config: TrainConfig) -> None:
    """No advice replaces Muon, and none updates weights in the backward pass."""
    for remedy in remedies(config, V, 2, "cuda", 12 * GIB):
        assert not (config.optim.name == "muon" and "adamw" in remedy.options)
        assert "optim_in_backward" not in remedy.options


def test_options_that_a_run_has_already_are_not_advised() -> None:
    frugal = replace(LARGE, trainer=replace(LARGE.trainer, activation_checkpointing=True),
                     optim=replace(LARGE.optim, grad_clip=0.0))
    assert not any("activation_checkpointing" in line or "grad_clip" in line for line in advice_lines(frugal, 24 * GIB))


def test_nothing_is_advised_where_nothing_fits() -> None:
    assert advice_lines(LARGE, GIB) == []
