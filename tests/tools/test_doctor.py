"""Tests timemix doctor, which lists packages, kernels and devices."""

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from kernels.registry import names, operators
from rwkv.tools import doctor

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = ("dev", "notebook")            # extras that doctor does not report


def requirement(text: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else " " for char in text).split()[0].lower()


def test_doctor_knows_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {requirement(each) for each in project["dependencies"]}
    assert required == {name for key in ("", *doctor.ALWAYS) for name in doctor.PACKAGES[key]}
    for extra, packages in project["optional-dependencies"].items():
        assert extra in OUTSIDE or {*map(requirement, packages)} == {*doctor.PACKAGES[extra]}, extra
    assert {*doctor.FEATURES} == {*doctor.PACKAGES} - {""}


def test_doctor_says_where_each_kernel_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    for op in operators():
        state = report["kernels"][op]["cpu"]
        assert {*state["run"], *state["elsewhere"], *state["not"]} == {*names(op)}
    assert report["packages"]["torch"] == metadata.version("torch")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("C library", "gpu", "wkv7", *report["kernels"]["wkv7"]["cpu"]["run"]))


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {**doctor.PACKAGES, "": ("torch", "no-such-package"), "serve": ("no-server",)})
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "! package     all programs require no-such-package" in printed
    assert "timemix serve requires no-server" in printed
