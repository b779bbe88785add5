"""Tests the steps by which a run chooses options: their order, their stages, and which of them a resumed run repeats."""

from dataclasses import replace
from pathlib import Path

import pytest
from files import byte_model

from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig, TuneConfig
from rwkv.training.memory import savings
from rwkv.training.run import resolve as steps
from rwkv.training.run.opening import open_run
from rwkv.training.run.resolve import STEPS, Context, Stage, resolve

CHAT = DataConfig(name="chat", path="conversations.jsonl", batch_size=16)


@pytest.fixture
def lora(tmp_path: Path) -> TrainConfig:
    byte_model(tmp_path / "base.safetensors")
    (tmp_path / "conversations.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    return TrainConfig(init_from=str(tmp_path / "base.safetensors"), tune=TuneConfig(method="lora"),
                       data=replace(CHAT, path=str(tmp_path / "conversations.jsonl")), model=ModelConfig(ctx_len=64),
                       trainer=TrainerConfig(accelerator="cpu", max_tokens=1e5), out_dir=str(tmp_path / "run"))


def test_the_length_is_counted_before_the_rows_are_split_and_memory_is_compared_last() -> None:
    names = [step.choose.__name__ for step in STEPS]
    assert names == ["default_length", "default_rates", "guard_text", "one_length", "precision", "passes", "less_memory",
                     "steps_of_epochs"]
    assert [step.choose.__name__ for step in STEPS if step.again] == ["one_length", "precision", "steps_of_epochs"]


def test_a_new_run_records_the_options_that_it_chose(lora: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "free_memory", lambda device: 1)
    run = open_run(lora, ["tune", "init_from", "trainer.max_tokens"], [])
    assert [note.subject for note in run.notes] == ["rate", "memory", "memory"]
    assert (run.config.data.batch_size, run.config.trainer.accumulate, run.config.trainer.max_steps) == (8, 2, 98)
    assert run.config.trainer.activation_checkpointing
    assert savings.SMALLER[-1].items() >= {("trainer.malloc", run.config.trainer.malloc)}


def test_a_resumed_run_chooses_nothing_but_its_length_and_precision(lora: TrainConfig) -> None:
    config = replace(lora, trainer=replace(lora.trainer, precision="auto", epochs=3.0))
    for stage in (Stage.COMMAND_LINE, Stage.BASE):
        resolved, notes = resolve(config, stage, Context(["trainer.max_tokens"], resumed=True))
        assert notes == ()
        assert resolved.optim == config.optim
        assert resolved.data == config.data
    assert (resolved.trainer.max_steps, resolved.trainer.epochs) == (98, None)
    assert resolved.trainer.precision in ("32-true", "bf16-mixed")
