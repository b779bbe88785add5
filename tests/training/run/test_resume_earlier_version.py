"""A run of commit 7dbb24b, the version before the folders were rearranged, is resumed: data/earlier_version.

The checkpoint after step 4 of 8, config.yaml, and expected.csv, the losses that 7dbb24b gave for steps 5 to 8. The run is on
training_runs.TEXT in float32: train.py debug=fast data=text data.path=text.txt data.tokenizer=char data.val_fraction=0.1
data.cache_dir=cache trainer=cpu logger=csv kernel=torch_scan model.n_layer=2 model.n_embd=8 model.ctx_len=16
trainer.accumulate=2 trainer.max_steps=8 trainer.val_every=8 trainer.checkpoint_every=4 optim=normuon optim.matrix_lr=1e-3
optim.weight_decay=0.05 optim.time_decay_lr_scale=20.
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


@pytest.fixture(autouse=True)
def _copied(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "data" / "earlier_version", tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")


@pytest.mark.programs
def test_a_resumed_run_has_the_losses_that_it_had(run: Run) -> None:
    """Every state in its checkpoint has an owner now: Lightning drops unknown keys of callbacks and loops silently."""
    before = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    status, _, error = run("train", "resume=auto", "out_dir=run", "trainer.sample_every=0", "trainer.sample_tokens=0")
    assert status == 0, error
    with Path("run/expected.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for metric in ("train/loss", "val/loss", "val/bpb"):
        expected = {int(row["step"]): float(row[metric]) for row in rows if row[metric]}
        assert losses(Path("run"), metric) == pytest.approx(expected, abs=1e-5)
    after = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    assert after.keys() == before.keys()
    for part in ("callbacks", "loops"):
        added = {"Metrics"} if part == "callbacks" else set()            # the sums since the last row
        assert after[part].keys() == before[part].keys() | added


def test_a_deleted_option_is_dropped_at_its_default_and_refused_where_it_was_set(run: Run) -> None:
    shutil.rmtree("run/checkpoints")
    path = Path("run/config.yaml")
    text = path.read_text(encoding="utf-8")
    assert all(f"{option.split('.')[1]}: {default}\n" in text for option, default in DELETED.items())
    config = open_run(TrainConfig(resume="auto", out_dir="run")).config
    assert (config.optim.name, config.optim.matrix_lr, config.optim.time_decay_lr_scale) == ("normuon", 1e-3, 20.0)
    path.write_text(text.replace("matrix_every: 1\n", "matrix_every: 3\n"), encoding="utf-8")
    one_sentence(run("train", "resume=auto", "out_dir=run"), "optim.matrix_every", "init_from=")
    assert {each.name for each in Path("run").iterdir()} <= {"config.yaml", "expected.csv", ".lock"}
