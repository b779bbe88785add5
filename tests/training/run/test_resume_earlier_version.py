"""Runs of commit 7dbb24b, the version before the folders were rearranged, are resumed: data/earlier_version/NAME.

adamw, normuon: the checkpoint after step 4 of 8, config.yaml, and expected.csv, the losses that 7dbb24b gave for the steps 5
to 8. Both are runs on training_runs.TEXT in float32: train.py debug=fast data=text data.path=text.txt data.tokenizer=char
data.val_fraction=0.1 data.cache_dir=cache trainer=cpu logger=csv kernel=torch_scan model.n_layer=2 model.n_embd=8
model.ctx_len=16 trainer.accumulate=2 trainer.max_steps=8 trainer.val_every=8 trainer.checkpoint_every=4 optim=NAME, and for
normuon optim.matrix_lr=1e-3 optim.weight_decay=0.05 optim.time_decay_lr_scale=20.
shakespeare_char: config.yaml of experiment=shakespeare_char, which set options that no longer exist.
"""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from programs import Run, one_sentence
from training_runs import TEXT, losses

from rwkv.config import TrainConfig
from rwkv.training.run.opening import open_run
from rwkv.training.run.resume import DELETED

RUNS = Path(__file__).parent / "data" / "earlier_version"


def copied(name: str, folder: Path) -> None:
    shutil.copytree(RUNS / name, folder / "run")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")


@pytest.mark.programs
@pytest.mark.parametrize("name", ["adamw", "normuon"])
def test_a_resumed_run_has_the_losses_that_it_had(run: Run, tmp_path: Path, name: str) -> None:
    copied(name, tmp_path)
    status, _, error = run("train", "resume=auto", "out_dir=run", "trainer.sample_every=0", "trainer.sample_tokens=0")
    assert status == 0, error
    with (tmp_path / "run" / "expected.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for metric in ("train/loss", "val/loss", "val/bpb"):
        expected = {int(row["step"]): float(row[metric]) for row in rows if row[metric]}
        assert losses(tmp_path / "run", metric) == pytest.approx(expected, abs=1e-5)


@pytest.mark.programs
def test_every_state_in_its_checkpoint_has_an_owner_now(run: Run, tmp_path: Path) -> None:
    """The keys of callbacks and loops are the same in a checkpoint of this version: Lightning drops unknown ones silently."""
    copied("adamw", tmp_path)
    before = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    options = ("trainer.sample_tokens=0", "trainer.max_steps=5")
    assert run("train", "resume=auto", "out_dir=run", *options)[0] == 0
    after = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert after.keys() == before.keys()
    for part in ("callbacks", "loops"):
        assert after[part].keys() == before[part].keys()


def test_a_deleted_option_that_was_set_is_refused(run: Run, tmp_path: Path) -> None:
    copied("shakespeare_char", tmp_path)
    one_sentence(run("train", "resume=auto", "out_dir=run"), "optim.matrix_", "init_from=")
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == ["config.yaml"]


def test_a_deleted_option_at_its_default_is_dropped(tmp_path: Path) -> None:
    copied("normuon", tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    text = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert all(f"{option.split('.')[1]}: {default}\n" in text for option, default in DELETED.items())
    config = open_run(TrainConfig(resume="auto", out_dir=str(tmp_path / "run"))).config
    assert (config.optim.name, config.optim.matrix_lr, config.optim.time_decay_lr_scale) == ("normuon", 1e-3, 20.0)
