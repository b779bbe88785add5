"""Tests benchmarks/positions.py, which measures the loss by position in the context."""

from pathlib import Path

import pytest

from benchmarks import positions
from benchmarks.training import metrics
from rwkv.errors import UserError


def test_octaves_cover_every_position_once() -> None:
    assert positions.by_octave([5.0, 4.0, 3.0, 1.0, 2.0]) == {"0": 5, "1": 4, "2-3": 2, "4": 2}
    assert positions.by_octave([1.0]) == {"0": 1}


@pytest.mark.soak
def test_a_run_is_trained_once_and_its_losses_equal_those_of_its_validation(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is {number * number}\n" for number in range(600)))
    options = ["data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path}", "model.n_layer=1"]
    arguments = tmp_path, "rwkv7", 64, 16, positions.STEP_TOKENS
    run = positions.measure_run(*arguments, options)
    assert list(run["nats"]) == ["mean", "0", "1", "2-3", "4-7", "8-15"]
    val_losses = [row["val/loss"] for row in metrics(tmp_path / f"rwkv7-64-16-{positions.STEP_TOKENS}") if row["val/loss"]]
    assert run["nats"]["mean"] == pytest.approx(float(val_losses[-1]), rel=0.01)         # all but the last few tokens
    assert positions.measure_run(*arguments, options) == run
    with pytest.raises(UserError):
        positions.measure_run(*arguments, [*options, "seed=1"])
