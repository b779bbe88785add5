"""Tests training from the command line, end to end: a run's files, its output, and sweeps over kernels."""

import json
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

import pytest
import torch
import yaml
from losing import dropping
from programs import Run
from training_runs import SMALL, TEXT, Done, assert_same_training, done_here, finish, losses, rows, start

from kernels.registry import why_not
from rwkv.checkpoint.files import read_checkpoint
from rwkv.checkpoint.location import locate
from rwkv.config import TrainerConfig
from rwkv.errors import UserError
from rwkv.generation.engine import generate
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.samples import read_samples

pytestmark = pytest.mark.programs
LONG = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=200",
        "trainer.val_every=80", "trainer.checkpoint_every=150")


def assert_run_files(run: Path, steps: int, kernel: str) -> None:
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"best.ckpt", "last.ckpt"} <= names <= {"best.ckpt", "last.ckpt", "last-1.ckpt"}
    assert read_checkpoint(run).step == steps
    assert yaml.safe_load((run / "config.yaml").read_text())["kernel"] == {"name": kernel}
    assert list(losses(run)) == list(range(1, steps + 1))
    assert len(rows(run)) == steps + len(losses(run, "val/loss")), "each step and each validation must have a row"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Done:
    """Trains a run from beginning to end, in folder/whole."""
    return done_here(folder, "train", *LONG, "out_dir=whole", "resume=auto")


@pytest.mark.parametrize(("stream", "kind"), [("stderr", "terminal"), ("stderr", "none"), ("stdout", "pipe")])
def test_training_continues_if_nobody_reads_its_output(run: Run, monkeypatch: pytest.MonkeyPatch, stream: str,
                                                       kind: str) -> None:
    """The stream is a pipe without a reader, a closed terminal or, as after `2>&-`, missing."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    with unread_stream(kind) as unread, monkeypatch.context() as patch:
        patch.setattr(sys, stream, unread)
        status, *_ = run("train", *SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "out_dir=unread")
    assert status == 0
    assert read_checkpoint(Path("unread")).step == 5
    assert Path("unread", "report.html").exists()


def unread_stream(kind: str) -> AbstractContextManager[TextIO | None]:
    if kind == "none":
        return nullcontext()
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")           # noqa: PTH123 (a descriptor)


def test_a_run_leaves_checkpoints_metrics_and_its_configuration(folder: Path, whole: Done) -> None:
    assert whole.status == 0, whole.error
    assert_run_files(folder / "whole", 200, "conv1d")
    assert list(losses(folder / "whole", "val/loss")) == list(losses(folder / "whole", "val/bpb")) == [80, 160, 200]
    assert [sample["step"] for sample in read_samples(folder / "whole" / "samples.jsonl")] == [80, 160, 200]
    for row in rows(folder / "whole"):
        assert row["kernel"] == "conv1d"
        assert bool(row["val/loss"]) != bool(float(row["tok_per_sec"] or 0) > 0 and float(row["peak_mem"]) > 0)


def test_a_run_s_configuration_trains_the_same_run_again(folder: Path, whole: Done) -> None:
    again = done_here(folder, "train", "experiment=./whole", "trainer.sample_tokens=20", "out_dir=again")
    assert again.status == 0, again.error
    assert_same_training(folder / "again", folder / "whole")


def test_bits_per_byte_of_a_text_that_the_tokenizer_lost_are_withheld(run: Run) -> None:
    """The tokenizer loses all dashes, of 3 bytes each. Plan, metrics, result and report say so."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    Path("letters.json").write_text(dropping(sorted(set(TEXT) - {"—"})).definition)
    options = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "data.tokenizer=letters.json", "out_dir=lost")
    assert "WARNING" in run("train", *options, "plan=true")[2]
    status, _, error = run("train", *options)
    assert status == 0, error
    assert error.count("the tokenizer loses ") == 4, "plan and result have a line for each split"
    last = rows(Path("lost"))[-1]
    assert not last["val/bpb"]
    assert "gzip -9" not in error
    assert float(last["val/lost"]) == pytest.approx(0.07, rel=0.3)
    assert "The tokenizer loses" in Path("lost", "report.html").read_text(encoding="utf-8")


def test_the_model_learns(folder: Path, whole: Done) -> None:
    train_losses = losses(folder / "whole")
    assert train_losses[1] > 3.5
    assert train_losses[200] < 2.5
    assert losses(folder / "whole", "val/loss")[200] < 2.5


def test_the_result_is_printed_and_no_library_warns(whole: Done) -> None:
    for part in ("resume=auto: there is no run to continue", "val/loss", "val/bpb",
                 "python generate.py checkpoint=whole prompt="):
        assert part in whole.error
    assert "Warning" not in whole.error


def test_standard_output_is_the_sample_alone(folder: Path, whole: Done) -> None:
    checkpoint = read_checkpoint(folder / "whole")
    model = RWKV.from_pretrained(folder / "whole", "conv1d")
    sample = "".join(generate(model, Tokenizer.from_dict(checkpoint.tokenizer), max_new_tokens=20, seed=0))
    assert whole.output == sample + "\n"


def test_generation_needs_only_the_checkpoint(folder: Path, whole: Done, tmp_path: Path) -> None:
    """Generation works in another directory, writes to standard output alone, and takes a prompt that Hydra would refuse."""
    prompt = "line 7: the ${quick}, 'brown' = fox\n"
    result = done_here(tmp_path, "generate", f"checkpoint={folder / 'whole'}", f"prompt={prompt}", "max_new_tokens=30")
    assert result.status == 0
    assert [line.split()[0].rstrip(":") for line in result.error.splitlines()] == ["loading", "read", "sampling", "decoding"]
    assert result.output.startswith(prompt)
    assert len(result.output) > len(prompt) + 20
    assert not list(tmp_path.iterdir())


def test_steps_over_a_part_of_their_batches_are_refused() -> None:
    assert TrainerConfig(overfit_batches=4, accumulate=2)
    with pytest.raises(UserError):
        TrainerConfig(overfit_batches=3, accumulate=2)


@pytest.mark.programs
def test_overfitting_a_batch_limits_training_alone(run: Run) -> None:
    """The first val/loss is that of an ordinary run, because validation reads the whole split."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    once = (*SMALL, "logger=csv", "kernel=conv1d", "trainer.sample_tokens=0", "trainer.val_every=1")
    assert run("train", *once, "trainer.max_steps=1", "out_dir=all")[0] == 0
    assert run("train", *once, "trainer.max_steps=3", "trainer.overfit_batches=1", "out_dir=one")[0] == 0
    assert losses(Path("one"), "val/loss")[1] == losses(Path("all"), "val/loss")[1]
    assert list(losses(Path("one"))) == [1, 2, 3]


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Done:
    """Trains with two kernels in separate processes, logged by W&B without an account."""
    return finish(start(folder, "train", "-m", "kernel=conv1d,torch_scan", *SMALL, "logger=wandb", "out_dir=sweep"))


@pytest.mark.soak
def test_wandb_without_an_account_is_offline(folder: Path, sweep: Done) -> None:
    assert "`wandb sync sweep/wandb/*run-* sweep/*/wandb/*run-*`" in sweep.error
    for run in sorted((folder / "sweep").glob("kernel=*")):
        offline = list((run / "wandb").glob("offline-run-*"))
        assert len(offline) == 1
        assert list(offline[0].glob("run-*.wandb"))
        assert list(offline[0].glob("files/media/table/samples_*.table.json"))
        content = next(offline[0].glob("run-*.wandb")).read_bytes()
        assert f"{run.name.removeprefix('kernel=')}-seed0".encode() in content
        assert b"sweep" in content       # the name of the group


@pytest.mark.soak
def test_wandb_has_the_report_of_a_sweep_too(folder: Path, sweep: Done) -> None:
    media = folder / "sweep" / "wandb" / "latest-run" / "files" / "media"
    assert [path.read_text() for path in media.glob("html/*.html")] == [(folder / "sweep" / "report.html").read_text()]
    summary, = media.glob("table/summary_*.table.json")
    table = json.loads(summary.read_text())
    assert table["columns"][:3] == ["level", "statistic", "kernel"]
    assert [row[:3] for row in table["data"][:2]] == [["run", "value", "conv1d"], ["kernel", "median", "conv1d"]]


def test_accumulation_bf16_and_a_char_vocabulary_train(folder: Path) -> None:
    kernel = "taichi_v3" if why_not("timex", "taichi_v3") is None else "conv1d"
    result = done_here(folder, "train", *SMALL, f"kernel={kernel}", "data.tokenizer=char", "trainer.precision=bf16-mixed",
                       "trainer.accumulate=2", "trainer.malloc=default", "trainer.val_every=4", "logger=csv", "out_dir=char")
    assert result.status == 0, result.error
    assert "5 steps of 256 tokens: 1,280 tokens" in result.error
    assert "bf16-mixed" in result.error
    assert_run_files(folder / "char", 5, kernel)
    assert list(losses(folder / "char", "val/loss")) == [4, 5]
    assert set(result.output) <= set(TEXT)
    assert losses(folder / "char")[1] == pytest.approx(math.log(31), abs=0.2), "the loss must be that of a whole batch"
    weights = torch.load(locate(folder / "char"), weights_only=True)["state_dict"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}
