"""Tests that a run whose loss is not finite ends with an error, and keeps its good checkpoints and its report."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from programs import Run
from training_runs import SMALL, TEXT, content, losses, rows

BRIEF = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=6", "out_dir=run",
         "trainer.checkpoint_every=1", "trainer.val_every=100", "data.num_workers=0")
FIRST = 4                                # the step that diverges


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def is_finite(checkpoint: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in content(checkpoint).values() if isinstance(tensor, torch.Tensor))


def steps(checkpoints: Path) -> dict[str, int]:
    return {path.name: content(path)["/global_step"] for path in checkpoints.iterdir()}


@pytest.mark.programs
def test_a_run_that_diverges_ends_and_keeps_its_good_checkpoints_and_its_report(run: Run, folder: Path) -> None:
    """Step `FIRST` is the first after a resume with a far too large learning rate, which spoils the weights."""
    assert run("train", *BRIEF, f"trainer.max_steps={FIRST - 1}", "optim.min_lr=1e-3")[0] == 0
    status, output, error = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=6", "optim.lr=1e30")
    assert (status, output) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("error: ")
    assert f"step {FIRST}" in last
    assert "optim.lr" in last
    assert last.endswith("are from earlier steps and intact")
    assert steps(Path("run/checkpoints")) == {"last.ckpt": FIRST - 1, "last-1.ckpt": FIRST - 2, "best.ckpt": FIRST - 1}
    assert all(is_finite(path) for path in Path("run/checkpoints").iterdir())
    assert Path("run/report.html").is_file()


@pytest.mark.programs
def test_losses_are_named_by_the_first_step_that_is_not_finite(run: Run, folder: Path) -> None:
    """The learning rate spoils the weights in step 1. The error names step 2, although losses are read after step 5."""
    status, _, error = run("train", *BRIEF, "optim.lr=1e30", "optim.warmup_steps=0", "trainer.log_every=5",
                           "trainer.checkpoint_every=6", "trainer.val_every=6", "optim.grad_clip=0")
    assert status == 2
    assert "optim.grad_clip=1" in error
    assert "step 2," in error.splitlines()[-1]
    assert "checkpoints" not in error.splitlines()[-1], "there are none"
    assert not list(Path("run").glob("checkpoints/*"))


def set_scaler(monkeypatch: pytest.MonkeyPatch, **options: float) -> torch.amp.GradScaler:
    """Returns the loss scaler that the next run uses."""
    scaler = torch.amp.GradScaler("cpu", **options)                      # type: ignore[arg-type]
    monkeypatch.setattr("rwkv.training.trainer.MixedPrecision", partial(MixedPrecision, scaler=scaler))
    return scaler


@pytest.mark.programs
@pytest.mark.parametrize("options", [
    *(pytest.param(options, marks=pytest.mark.soak) for options in (
        ("data.batch_size=4",), ("data.batch_size=2", "trainer.accumulate=2"))),
    ("data.batch_size=2", "trainer.accumulate=2", "trainer.tbptt=2")])
def test_a_step_that_the_scaler_of_fp16_skips_is_repeated(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                          options: tuple[str, ...]) -> None:
    """Steps, rates and losses are those of a run whose scale never was too large."""
    for name, scale in (("low", 2.0 ** 8), ("high", 2.0 ** 24)):
        scaler = set_scaler(monkeypatch, init_scale=scale, growth_interval=100)
        status, _, error = run("train", *BRIEF, "trainer.precision=fp16-mixed", "optim.lr=1e-3", f"out_dir={name}", *options)
        assert status == 0, error
        assert (scaler.get_scale() < scale) == (name == "high")
        state = content(Path(name) / "checkpoints/last.ckpt")
        assert {float(value) for key, value in state.items() if key.endswith("/step") and "optimizer" in key} == {6.0}
    low, high = ([row["lr"] for row in rows(Path(name))] for name in ("low", "high"))
    assert low == high
    assert list(losses(Path("low")).values()) == pytest.approx(list(losses(Path("high")).values()), rel=2e-3)


@pytest.mark.programs
def test_a_run_whose_every_step_is_skipped_fails(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_scaler(monkeypatch, init_scale=2.0 ** 120)
    status, output, error = run("train", *BRIEF, "trainer.precision=fp16-mixed")
    assert (status, output) == (2, "")
    assert "step 1 " in error.splitlines()[-1]
    assert "loss scale" in error.splitlines()[-1]
    assert not list(Path("run").glob("checkpoints/*"))


@pytest.mark.programs
def test_a_failed_sample_ends_neither_the_run_nor_its_report(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    for user in ("callbacks.samples", "finish"):
        monkeypatch.setattr(f"rwkv.training.{user}.generate", fail)
    status, _, error = run("train", *BRIEF, "trainer.sample_every=2")
    assert status == 0, error
    assert "out of memory" in error
    assert content(Path("run/checkpoints/last.ckpt"))["/global_step"] == 6
    assert Path("run/report.html").is_file()
    assert Path("run/samples.jsonl").read_bytes() == b""
