"""Tests that `timemix list` finds runs in runs/ and in this folder, and says so if there is nothing to list."""

from pathlib import Path

import pytest

from rwkv.checkpoint.location import LAST
from rwkv.io import hub
from rwkv.tools import list as listing


def test_runs_are_listed_wherever_out_dir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "cached_models", list)
    listing.main([])
    output = capsys.readouterr()
    assert output.out == ""
    assert "no runs" in output.err
    runs = [Path("first"), Path("runs/2026-11-30"), Path("runs/sweep/seed=0"), Path("two/kernel=fft,seed=1")]
    for run in runs:
        (run / LAST).parent.mkdir(parents=True)
        (run / LAST).write_bytes(b"x")
    Path("runs/latest").symlink_to("../first")
    listing.main([])
    assert [Path(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == runs
