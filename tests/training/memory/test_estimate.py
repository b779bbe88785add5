"""Compares parameters and memory by formula with published sizes and with measured peaks."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import OPERATORS
from training_runs import configured

from kernels.bench.profiler import extra_bytes
from kernels.select import select
from rwkv import cli
from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig
from rwkv.data.tbptt_segments import Segments
from rwkv.pretrained import RWKV
from rwkv.training.memory import estimate as memory
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

VOCABULARIES = {"rwkv4": 50277, "rwkv7": 65536}          # sizes of released files; tiny and small have 2,048
PRESETS = {"tiny": 2_712_576, "small": 13_101_312, "169m": 169_342_464, "430m": 430_397_440, "1b5": 1_515_106_304,
           "3b": 2_984_627_200, "7b": 7_392_649_216, "rwkv7_tiny": 2_817_024, "rwkv7_small": 13_414_656,
           "rwkv7_0.1b": 191_084_544, "rwkv7_0.4b": 450_834_432, "rwkv7_1.5b": 1_527_668_736, "rwkv7_2.9b": 2_948_065_280,
           "rwkv7_7.2b": 7_199_932_416, "rwkv7_13.3b": 13_238_317_056}
KERNELS = {"rwkv4": "torch_scan", "rwkv7": "torch_chunk"}


def parameters_on_meta(config: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RWKV(config, vocab_size, select("wkv4", "reference")).parameters())


# Parameters


def test_every_preset_is_known() -> None:
    assert {path.stem for path in (cli.CONFIGS / "model").glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    text = (cli.CONFIGS / "model" / f"{name}.yaml").read_text()
    config = ModelConfig(**yaml.safe_load(text))
    V = 2048 if "tiny" in name or "small" in name else VOCABULARIES[config.generation]
    assert memory.n_parameters(config, V) == PRESETS[name]
    assert f"{PRESETS[name]:,} " in text, "the file must state the number"


WIDTHS = st.integers(1, 90)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), WIDTHS, st.none() | WIDTHS, st.none() | WIDTHS, WIDTHS)
def test_the_formula_counts_any_model(L: int, C: int, A: int | None, F: int | None, V: int) -> None:
    config = ModelConfig(n_layer=L, n_embd=C, n_att=A, n_ffn=F)
    assert memory.n_parameters(config, V) == parameters_on_meta(config, V)


# Memory


def measured_peak(config: TrainConfig, V: int, kernel: str) -> int:
    """Returns the peak memory of a model and two steps in Lightning's order: gradients live until the next backward pass."""
    batch, half = batch_of(config, V), config.trainer.precision == "bf16-mixed"

    def train() -> tuple[()]:
        model = prepare_blocks(RWKV(config.model, V, select(OPERATORS[config.model.generation], kernel)), config.trainer)
        task = LanguageModel(model, config.optim, 10, 1.0)
        optimizer = task.configure_optimizers()["optimizer"]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = task.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return ()

    return extra_bytes(train, "cpu")


def batch_of(config: TrainConfig, V: int) -> tuple[torch.Tensor, torch.Tensor] | Segments:
    B, T, K = config.data.batch_size, config.model.ctx_len, config.trainer.tbptt
    x = torch.randint(V, (B, max(1, K), T))
    return Segments(x, x, torch.arange(K).expand(B, K) == 0, 0, 1.0, x.numel()) if K else (x[:, 0], x[:, 0])


@pytest.mark.thorough
@pytest.mark.parametrize(("generation", "sizes", "V", "options"), [
    ("rwkv4", (2, 192, 2, 64), 8192, {}),                                  # weights and the loss need most of the memory
    ("rwkv4", (2, 64, 8, 128), 256, {"precision": "bf16-mixed"}),
    ("rwkv4", (2, 64, 2, 64), 256, {"tbptt": 4}),
    ("rwkv7", (2, 64, 8, 128), 256, {}),
    ("rwkv7", (4, 64, 4, 128), 256, {"activation_checkpointing": True}),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (
        ("rwkv4", (2, 64, 8, 128), 256, {}), ("rwkv4", (4, 64, 4, 128), 256, {"activation_checkpointing": True}),
        ("rwkv7", (2, 64, 8, 128), 256, {"precision": "bf16-mixed"}), ("rwkv7", (2, 64, 2, 64), 256, {"tbptt": 4})))], ids=str)
def test_the_estimate_is_near_the_measured_peak(generation: str, sizes: tuple[int, ...], V: int,
                                                options: dict[str, Any]) -> None:
    config = configured(*sizes, generation=generation, **options)
    assert memory.estimate(config, V).total == pytest.approx(measured_peak(config, V, KERNELS[generation]), rel=0.25)


def test_processes_share_a_batch_and_fsdp_the_weights() -> None:
    config = configured(2, 64, 8, 128)
    alone = memory.estimate(config, 256)
    ddp, fsdp = (memory.estimate(replace(config, trainer=TrainerConfig(strategy=strategy)), 256, processes=4)
                 for strategy in ("ddp", "fsdp"))
    assert (ddp.fixed, 4 * fsdp.fixed) == (alone.fixed, alone.fixed)
    assert 4 * ddp.activations == pytest.approx(alone.activations, rel=0.1)
    several = TrainerConfig(strategy="fsdp", accumulate=2)       # the gradients of the first batch are not divided
    assert memory.estimate(replace(config, trainer=several), 256, processes=4).gradients == alone.gradients


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_the_plan_adds_a_quarter_for_holes_in_a_heap_that_is_returned_after_each_block() -> None:
    """The soak tests measure the peaks that this factor comes from."""
    packed = replace(configured(2, 64, 8, 128, accelerator="cpu"), data=DataConfig(name="chat", batch_size=8))
    with_holes, without = (memory.estimate(replace(packed, trainer=replace(packed.trainer, malloc=malloc)), 256)
                           for malloc in ("tuned", "default"))
    assert (with_holes.activations, with_holes.loss) == (round(1.25 * without.activations), round(1.25 * without.loss))
    assert with_holes.fixed == without.fixed
