"""What a run says while it trains and validates."""

import re
from pathlib import Path

import pytest
from training_runs import SMALL, TEXT, done_here


@pytest.mark.programs
def test_validation_has_a_bar_of_its_own_and_the_median_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    done = done_here(tmp_path, "train", *SMALL, "logger=none", "trainer.max_steps=4", "trainer.val_every=2",
                     "trainer.log_every=1", "out_dir=run")
    assert done.status == 0, done.error
    assert done.error.startswith("loading ")
    assert len(re.findall(r"validating: +0%\|[^|]*\| 0/\d+ ", done.error)) == 2
    assert re.search(r"^median [\d.]+ ms a step", done.error, re.MULTILINE)
