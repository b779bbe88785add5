"""Tests that train/loss in a row of metrics is the mean since the row before, even if the run stops between the rows."""

from pathlib import Path

import pytest
from programs import Run
from training_runs import OWN, SMALL, TEXT, assert_same_training, losses

RUN = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "data.num_workers=0",
       "trainer.max_steps=8", "trainer.checkpoint_every=4", "trainer.val_every=8")


@pytest.mark.programs
@pytest.mark.parametrize("options", [
    (), pytest.param(("trainer.accumulate=2",), marks=pytest.mark.soak), ("trainer.tbptt=2",)])
def test_a_row_has_the_mean_loss_since_the_row_before(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for name, every in (("each", 1), ("third", 3), ("longer", 100)):
        assert run("train", *RUN, *options, f"trainer.log_every={every}", f"out_dir={name}")[0] == 0
    each, third = losses(Path("each")), losses(Path("third"))
    assert list(third) == [3, 6]
    for step, loss in third.items():
        assert loss == pytest.approx(sum(each[number] for number in range(step - 2, step + 1)) / 3, rel=1e-6)
    assert losses(Path("longer")) == {8: pytest.approx(sum(each.values()) / 8, rel=1e-6)}, "the run is shorter than an interval"


@pytest.mark.programs
def test_a_run_that_is_continued_between_two_rows_logs_the_same_means(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = (*RUN, "trainer.accumulate=2", "trainer.log_every=3", "trainer.val_every=4", "optim.schedule=constant")
    assert run("train", *options, "out_dir=whole")[0] == 0
    assert run("train", *options, "out_dir=parts", "trainer.max_steps=4")[0] == 0
    assert run("train", "resume=auto", "out_dir=parts", "trainer.max_steps=8")[0] == 0
    assert list(losses(Path("whole"))) == [3, 6]
    own = (*OWN, "/timemix/run/trainer/max_steps", "/loops/fit_loop/epoch_loop.batch_progress/is_last_batch")
    assert_same_training(Path("parts"), Path("whole"), own)
