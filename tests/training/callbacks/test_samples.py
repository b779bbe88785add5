"""Tests that samples, metrics.csv and gradient norms do not change training, and that their values are right."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from models import small_model, tokens
from programs import Run
from training_runs import OWN, SMALL, TEXT, content, losses, rows, same

from kernels.machine.memory import peak_memory
from rwkv.config import TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.report.run_files import read_samples
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer
from rwkv.training.callbacks.metrics import gradient_norms
from rwkv.training.callbacks.samples import Samples, sample_every
from rwkv.training.loggers import COLUMNS, MetricsFile, norm_names

PROMPT = "line 7, ${x}: "
BRIEF = (*SMALL, "logger=csv", "kernel=conv1d", "model.ctx_len=16", "trainer.max_steps=5", "trainer.sample_tokens=6",
         f"data.sample_prompt={PROMPT}")


def differences(run: Path, other: Path) -> set[str]:
    one, two = (content(folder / "checkpoints" / "last.ckpt") for folder in (run, other))
    return {name for name in one.keys() | two.keys() if name not in OWN and not same(one.get(name), two.get(name))}


@pytest.mark.programs
def test_samples_and_norms_do_not_change_training(run: Run, tmp_path: Path) -> None:
    """Weights, optimiser, random state and data position are bit-identical. Standard output has the last sample."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    without = run("train", *BRIEF, "trainer.sample_every=0", "out_dir=without")
    sampled = run("train", *BRIEF, "trainer.sample_every=2", "trainer.grad_norms=true", "out_dir=with")
    assert (without[0], sampled[0]) == (0, 0), sampled[2]
    expected = {"/timemix/run/trainer/sample_every", "/timemix/run/trainer/grad_norms"}
    assert differences(Path("without"), Path("with")) == expected
    assert losses(Path("without")) == losses(Path("with"))
    assert not Path("without/samples.jsonl").exists()
    samples = read_samples(Path("with/samples.jsonl"))
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(2, PROMPT), (4, PROMPT), (5, PROMPT)]
    assert sampled[1] == without[1] == f"{PROMPT}{samples[-1]['text']}\n"
    assert len({sample["text"] for sample in samples}) > 1, "other weights must write other texts"
    assert_norms(rows(Path("with")))


def assert_norms(results: list[dict[str, str]]) -> None:
    for row in results:
        if row["train/loss"]:
            parts = torch.tensor([float(row[name]) for name in norm_names(2)], dtype=torch.float64)
            assert parts.norm().item() == pytest.approx(float(row["grad_norm"]), rel=1e-5)
        assert row["kernel"] == "conv1d"


def test_a_prompt_that_has_no_tokens_is_refused_before_training(tmp_path: Path) -> None:
    config = TrainConfig()
    config.data.sample_prompt = "ä"
    with pytest.raises(UserError, match=r"data\.sample_prompt.*'ä'"):
        Samples(config, CharTokenizer("abc"), tmp_path, None, lambda seconds: None)


def test_a_continued_run_has_the_samples_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Samples of steps after the checkpoint are dropped, and so is an incomplete last line."""
    lines = [json.dumps({"step": step, "prompt": "", "text": "é\n"}, ensure_ascii=False) + "\n" for step in (10, 20, 30)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(lines) + lines[0][:-5], encoding="utf-8")
    Samples(TrainConfig(), ByteTokenizer(), tmp_path, 20, lambda seconds: None).on_train_start(Trainer(), None)
    assert path.read_text(encoding="utf-8") == "".join(lines[:2])
    Samples(TrainConfig(), ByteTokenizer(), tmp_path, None, lambda seconds: None).on_train_start(Trainer(), None)
    assert path.read_text(encoding="utf-8") == ""


def test_a_run_is_not_continued_with_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step\n{"step": 1, "prompt": "", "text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError):
        Samples(TrainConfig(), ByteTokenizer(), tmp_path, 2, lambda seconds: None)
    (tmp_path / "metrics.csv").write_text("step,train/loss\nnan,1\n2,1\n", encoding="utf-8")
    with pytest.raises(UserError):
        MetricsFile(tmp_path / "metrics.csv", "conv1d", resumed_at=2)


class Trainer:
    global_step = 20


def test_the_interval_of_samples() -> None:
    assert sample_every(TrainerConfig(val_every=7)) == 7
    assert sample_every(TrainerConfig(val_every=7, sample_every=3)) == 3
    assert sample_every(TrainerConfig(sample_every=0)) == sample_every(TrainerConfig(strategy="fsdp")) == 0
    for wrong in ({"sample_every": -1}, {"strategy": "fsdp", "sample_every": 3}):
        with pytest.raises(UserError):
            TrainerConfig(**wrong)


# metrics.csv


def test_a_continued_run_keeps_its_columns_and_has_new_ones_after_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss,mine\n1,2.5,a\n2,2.25,b\n3,2,c\n4,1.", encoding="utf-8")
    MetricsFile(path, "conv1d", ["grad_norm/emb"], resumed_at=2).log_metrics({"train/loss": 2.0, "grad_norm/emb": 3.0}, 3)
    with path.open(newline="", encoding="utf-8") as file:
        header, *results = csv.reader(file)
    assert header == ["step", "train/loss", "mine", *(name for name in COLUMNS if name != "train/loss"), "kernel",
                      "grad_norm/emb"]
    assert [row[:3] for row in results] == [["1", "2.5", "a"], ["2", "2.25", "b"], ["3", "2.0", ""]]
    assert results[-1][-2:] == ["conv1d", "3.0"]


# Measurements


def test_gradient_norms_are_those_of_each_part() -> None:
    model = small_model()
    model(tokens(model))[0].sum().backward()
    results = gradient_norms(model)
    assert tuple(results) == norm_names(3)
    for name, norm in results.items():
        part = model.get_submodule(name.removeprefix("grad_norm/"))
        flat = torch.cat([parameter.grad.flatten() for parameter in part.parameters()])
        assert norm == pytest.approx(flat.norm().item(), rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("status", [None, "Name:\tpython\nVmRSS:\t100 kB\n"])
def test_peak_memory_without_what_proc_says(tmp_path: Path, status: str | None) -> None:
    """In a sandbox there may be no /proc, or a status without VmHWM."""
    if status is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(status)
    assert 0.9 < peak_memory(tmp_path) / peak_memory() < 100
