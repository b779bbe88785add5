"""Tests the length of a new or continued run: trainer.max_tokens, trainer.epochs for each kind of data, and defaults."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import TEXT, configured, content, done_here, losses, same

from rwkv.config import LENGTHS, DataConfig, ModelConfig, TrainConfig, TrainerConfig
from rwkv.data.loaders import DataModule
from rwkv.data.prepare import Corpus, prepare
from rwkv.training.run.length import steps_per_epoch, with_default_length, with_max_steps, with_steps_of_epochs

KINDS = ("text", "chat", "tbptt")
SMALL = ("model.n_layer=1", "model.n_embd=32", "model.ctx_len=32", "data.tokenizer=byte", "data.batch_size=2", "trainer=cpu",
         "data=chat", "data.path=conversations.jsonl", "data.cache_dir=cache", "logger=csv", "trainer.sample_tokens=0",
         "trainer.log_every=1", "trainer.checkpoint_every=3", "trainer.keep_last=9")


def write_data(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT[:1500])
    conversations = [{"prompt": f"{number} and one?", "completion": str(number + 1)} for number in range(20)]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)))


def corpus_of(folder: Path, kind: str, B: int, accumulate: int = 1) -> tuple[TrainConfig, Corpus]:
    name, path = ("chat", "conversations.jsonl") if kind == "chat" else ("text", "text.txt")
    data = DataConfig(name=name, path=str(folder / path), tokenizer="byte", batch_size=B, cache_dir=str(folder / "cache"),
                      template="world" if kind == "chat" else None)
    trainer = TrainerConfig(accumulate=accumulate, tbptt=2 if kind == "tbptt" else 0)
    config = TrainConfig(model=ModelConfig(ctx_len=32), data=data, trainer=trainer)
    return config, prepare(data, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("B", [1, 3, 64])
def test_an_epoch_is_the_loaders_own_pass(kind: str, B: int, tmp_path: Path) -> None:
    """Without a number of steps a loader reads one pass, in whole batches."""
    write_data(tmp_path)
    config, data = corpus_of(tmp_path, kind, B)
    loader = DataModule(data, config.data, 32, 0, config.trainer.tbptt).train_dataloader()
    config = replace(config, trainer=replace(config.trainer, epochs=1.0))
    assert with_steps_of_epochs(config, data).trainer.max_steps == len(loader)


@given(epochs=st.floats(0.01, 50), B=st.integers(1, 9), accumulate=st.integers(1, 4), kind=st.sampled_from(KINDS))
def test_the_steps_are_the_fewest_that_read_the_epochs(tmp_path_factory: pytest.TempPathFactory, epochs: float, B: int,
                                                       accumulate: int, kind: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "text.txt").exists():
        write_data(folder)
    config, data = corpus_of(folder, kind, B, accumulate)
    config = replace(config, trainer=replace(config.trainer, epochs=epochs))
    steps, each = with_steps_of_epochs(config, data).trainer.max_steps, steps_per_epoch(config, data)
    assert steps >= epochs * each - 1e-6
    assert steps == 1 or steps - 1 < epochs * each


@pytest.mark.programs
def test_a_run_on_conversations_has_two_epochs_and_can_be_extended(tmp_path: Path) -> None:
    """A run that has read all epochs is finished. Resuming with more epochs is bit-identical to resuming with as many steps."""
    write_data(tmp_path)
    first = done_here(tmp_path, "train", *SMALL, "out_dir=run")
    assert first.status == 0, first.error
    assert "2 epochs, " in first.error
    assert "WARNING" not in first.error
    finished = done_here(tmp_path, "train", *SMALL, "out_dir=run", "resume=auto")
    assert finished.status == 2
    assert "trainer.epochs" in finished.error
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    more = done_here(tmp_path, "train", *SMALL, "out_dir=run", "resume=auto", "trainer.epochs=5")
    assert more.status == 0, more.error
    assert "5 epochs, " in more.error
    assert "WARNING" in more.error
    steps = content(tmp_path / "run/checkpoints/last.ckpt")["/global_step"]
    other = done_here(tmp_path, "train", *SMALL, "out_dir=other", "resume=auto", f"trainer.max_steps={steps}")
    assert other.status == 0, other.error
    one, two = (content(tmp_path / run / "checkpoints/last.ckpt") for run in ("run", "other"))
    differ = {key for key in one if not same(one[key], two[key])}
    assert differ == {"/timemix/run/out_dir", "/timemix/run/trainer/epochs"}
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


# Tokens and steps


@given(st.floats(1, 1e12), st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 4))
def test_max_tokens_gives_the_fewest_steps_that_read_them(tokens: float, B: int, T: int, accumulate: int, tbptt: int) -> None:
    config = configured(1, 8, B, T, max_tokens=tokens, accumulate=accumulate, tbptt=tbptt)
    steps = with_max_steps(config, ["trainer.max_tokens"]).trainer.max_steps
    assert config.tokens_per_step == B * T * accumulate * max(1, tbptt)
    assert (steps - 1) * config.tokens_per_step < tokens <= steps * config.tokens_per_step


def test_the_length_that_the_user_sets_replaces_the_others() -> None:
    config = configured(1, 8, 4, 10, max_tokens=1000.0, max_steps=7, epochs=2.0)
    trainers = [with_max_steps(config, [key]).trainer for key in LENGTHS]
    assert [(each.max_steps, each.max_tokens, each.epochs) for each in trainers] == [(7, None, None), (25, 1000.0, None),
                                                                                     (7, None, 2.0)]


def test_conversations_are_read_twice_by_default() -> None:
    chat, text = (TrainConfig(data=DataConfig(name=name)) for name in ("chat", "text"))
    assert with_default_length(chat, ["data"]).trainer.epochs == 2
    assert with_default_length(text, ["data"]).trainer.epochs is None
    for key in LENGTHS:                  # the user, an experiment or debug=fast may set the key
        assert with_default_length(chat, [key]).trainer.epochs is None
