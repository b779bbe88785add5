"""Tests what a run prints while it trains and validates."""

import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning import LightningModule
from training_runs import SMALL, TEXT, done_here

from rwkv.training.callbacks import progress_bar
from rwkv.training.callbacks.metrics import Metrics


@pytest.mark.programs
def test_validation_has_a_separate_bar_and_the_median_a_separate_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    result = done_here(tmp_path, "train", *SMALL, "logger=none", "trainer.max_steps=4", "trainer.val_every=2",
                       "trainer.log_every=1", "out_dir=run")
    assert result.status == 0, result.error
    assert result.error.startswith("loading ")
    assert len(re.findall(r"validating: +0%\|[^|]*\| 0/\d+ ", result.error)) == 2
    assert re.search(r"^median [\d.]+ ms a step", result.error, re.MULTILINE)


def test_a_file_gets_lines_early_and_then_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines come early, to show that a run of a sweep makes progress. Later lines are rare, so a log stays short."""
    clock = 0.0
    bar = progress_bar.bar(total=1000)
    bar._time = lambda: clock
    bar.start_t = bar.last_print_t = 0.0
    printed = []
    for second in range(1, 151):
        clock = float(second)
        progress_bar._advance(bar, 1)
        if bar.last_print_t == clock:
            printed.append(second)
    bar.close()
    assert printed == [3, 9, 21, 45, 75, 105, 135]


def test_the_user_may_disable_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tqdm reads TQDM_DISABLE when it is imported."""
    monkeypatch.setattr(progress_bar, "tqdm", partial(progress_bar.tqdm, disable=True))
    trainer: Any = SimpleNamespace(max_steps=3, global_step=0, callback_metrics={}, num_val_batches=[1])
    shown = progress_bar.ProgressBar(Metrics(1, False))
    shown.on_train_batch_start(trainer)
    for trainer.global_step in range(1, 4):
        shown.on_train_batch_end(trainer)
    shown.on_validation_start(trainer, LightningModule())
    shown.on_validation_batch_end()
    shown.on_train_end(trainer)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals of this kind")
def test_a_terminal_of_unknown_width_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = os.openpty()
    with os.fdopen(there, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        bar = progress_bar.bar(total=10)
        bar.update(5)
        bar.close()
    printed = b""
    while b"5/10" not in printed:          # the output comes in pieces, and a read after the last one fails
        printed += os.read(here, 10_000)
    os.close(here)


def test_the_bar_fits_into_a_terminal_of_80_columns() -> None:
    metrics = "train 4.144, val 4.212, 112,345 tokens/s"
    line = progress_bar.tqdm.format_meter(70_000, 100_000, 3665.0, ncols=80, bar_format=progress_bar.FORMAT, postfix=metrics)
    assert len(line) <= 80
    assert line.endswith(f"{metrics}]")


@pytest.mark.parametrize(("value", "printed"), [(4.14398, "4.144"), (2379.26, "2,379"), (12345.6, "12,346")])
def test_numbers_beside_the_bar_have_no_power_of_ten(value: float, printed: str) -> None:
    assert progress_bar._format_number(value) == printed
