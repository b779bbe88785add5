"""Tests that benchmarks.versions compares the numbers in the JSON of one program in two checkouts."""

from pathlib import Path

import pytest

from benchmarks import versions

PROGRAM = """import json
print("reading")
print(json.dumps({{"float32": {{"ms": [{ms}, {ms}]}}, "name": "x", "fast": True, "{own}": 1}}))
"""


def checkout(folder: Path, ms: int, own: str) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "job.py").write_text(PROGRAM.format(ms=ms, own=own), encoding="utf-8")
    return folder


def test_numbers_of_both_versions_are_compared(tmp_path: Path) -> None:
    this, old = checkout(tmp_path / "this", 30, "new"), checkout(tmp_path / "old", 40, "dropped")
    pairs = [(versions.run(this, ["job.py"]), versions.run(old, ["job.py"])) for _ in range(2)]
    report = versions.compare(pairs)
    assert set(report) == {"elapsed s", "CPU s", "float32.ms.0", "float32.ms.1"}
    assert report["float32.ms.1"] == {"this": 30, "old": 40, "ratio": 0.75, "least": 0.75, "greatest": 0.75}


def test_a_program_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    (checkout(tmp_path / "this", 1, "a") / "job.py").write_text("raise SystemExit('no data')", encoding="utf-8")
    with pytest.raises(SystemExit, match="no data"):
        versions.run(tmp_path / "this", ["job.py"])


def test_each_run_is_announced_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """A run takes minutes, and its output is shown only if it fails."""
    monkeypatch.setattr(versions, "ROOT", checkout(tmp_path / "this", 30, "new"))
    (checkout(tmp_path / "old", 40, "dropped") / "job.py").write_text("raise SystemExit('no data')", encoding="utf-8")
    with pytest.raises(SystemExit, match="no data"):
        versions.main([str(tmp_path / "old"), "job.py"])
    assert [line.rpartition("/")[2] for line in capsys.readouterr().err.splitlines()] == ["this", "old"]


def test_old_must_be_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        versions.main([str(tmp_path), "train.py"])
    assert "must be another checkout" in capsys.readouterr().err
