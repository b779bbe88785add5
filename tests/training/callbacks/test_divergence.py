"""A run whose loss is not finite ends with an error, and keeps its good checkpoints and its report."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from programs import Run
from training_runs import SMALL, TEXT, content, losses

BRIEF = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=6", "out_dir=run",
         "trainer.checkpoint_every=1", "trainer.val_every=100", "data.num_workers=0")
FIRST = 4                                # the step that diverges


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def finite(checkpoint: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in content(checkpoint).values() if isinstance(tensor, torch.Tensor))


def steps(checkpoints: Path) -> dict[str, int]:
    return {path.name: content(path)["/global_step"] for path in checkpoints.iterdir()}


@pytest.mark.programs
def test_a_run_that_diverges_ends_and_keeps_its_good_checkpoints_and_its_report(run: Run, folder: Path) -> None:
    """Step FIRST, the first after a resume with a senseless learning rate, spoils the weights."""
    assert run("train", *BRIEF, f"trainer.max_steps={FIRST - 1}", "optim.min_lr=1e-3")[0] == 0
    status, output, error = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=6", "optim.lr=1e30")
    assert (status, output) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("error: ")
    assert f"step {FIRST}" in last
    assert "optim.lr" in last
    assert steps(Path("run/checkpoints")) == {"last.ckpt": FIRST - 1, "last-1.ckpt": FIRST - 2, "best.ckpt": FIRST - 1}
    assert all(finite(path) for path in Path("run/checkpoints").iterdir())
    assert Path("run/report.html").is_file()


@pytest.mark.programs
def test_losses_are_named_by_the_first_step_that_is_not_finite(run: Run, folder: Path) -> None:
    """Even if the losses are read later: the learning rate spoils the weights in step 1, and losses are read after step 5."""
    status, _, error = run("train", *BRIEF, "optim.lr=1e30", "optim.warmup_steps=0", "trainer.log_every=5",
                           "trainer.checkpoint_every=6", "trainer.val_every=6")
    assert status == 2
    assert "step 2," in error.splitlines()[-1]
    assert not list(Path("run").glob("checkpoints/*"))


@pytest.mark.programs
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_steps_that_the_scaler_of_fp16_skips_are_no_divergence(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20)
    monkeypatch.setattr("rwkv.training.trainer.MixedPrecision", partial(MixedPrecision, scaler=scaler))
    status, _, error = run("train", *BRIEF, "trainer.precision=fp16-mixed", "trainer.max_steps=12")
    assert status == 0, error
    assert scaler.get_scale() < 2.0 ** 20, "some were skipped"
    assert len(losses(Path("run"))) == 12


@pytest.mark.programs
def test_a_sample_that_cannot_be_drawn_costs_neither_the_run_nor_its_report(run: Run, folder: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    for user in ("callbacks.samples", "trainer"):
        monkeypatch.setattr(f"rwkv.training.{user}.generate", fail)
    status, _, error = run("train", *BRIEF, "trainer.sample_every=2")
    assert status == 0, error
    assert "out of memory" in error
    assert content(Path("run/checkpoints/last.ckpt"))["/global_step"] == 6
    assert Path("run/report.html").is_file()
    assert Path("run/samples.jsonl").read_bytes() == b""
