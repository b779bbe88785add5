"""Tests that gpu_check continues after a failed part, and keeps the measurements of a stopped part."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks._gpu_parts import programs
from benchmarks._gpu_parts.__main__ import PARTS
from benchmarks._gpu_parts.check import Check
from benchmarks._gpu_parts.operators import kernels_of, peers
from benchmarks.gpu_check import Part, Rows, run_part
from kernels.machine.hardware import ROOT
from kernels.registry import why_not
from kernels.select import rule
from rwkv import cli
from rwkv.config import ChatConfig, EvaluateConfig, GenerateConfig, TrainConfig

SLOW_PART = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(Path(sys.argv[1]) / "child").write_text(str(child.pid))
with (Path(sys.argv[1]) / "results.jsonl").open("a") as file:
    file.write('{"part": "slow", "ms": 1.5}\\n{"part": "slow", "kernel": "cuda_v9", "error": "illegal address"}\\n')
    file.write('{"part": "slow", "half a li')
    file.flush()
    time.sleep(300)
"""


@pytest.mark.programs
def test_a_part_that_is_stopped_keeps_its_rows_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_S", 2.0)
    run_part(Part("slow", 1000), [sys.executable, "-c", SLOW_PART], tmp_path, "cpu", 3.0)
    rows = Rows(tmp_path).read()
    assert [row.get("ms") or row.get("error") or row["status"][:7] for row in rows] == [1.5, "illegal address", "stopped"]
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while time.monotonic() < end and _is_running(child):
        time.sleep(0.05)
    assert not _is_running(child)
    run_part(Part("next", 1000), [sys.executable, "-c", "print('well')"], tmp_path, "cpu", 60.0)
    run_part(Part("late", 1000), [sys.executable, "-c", "raise SystemExit(1)"], tmp_path, "cpu", 1.0)
    assert gpu_check.report(Rows(tmp_path)) == 1
    output = capsys.readouterr().out
    assert all(words in output for words in ("next", "not started, the budget is spent", "cuda_v9", "NOT all well"))
    assert "well" in (tmp_path / "log.txt").read_text()
    assert len(list(tmp_path.iterdir())) <= 3 <= 8


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_fails_shows_the_end_of_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_part(Part("bad", 100), [sys.executable, "-c", "raise SystemExit('no such device')"], tmp_path, "cpu", 60.0)
    run_part(Part("bad again", 100), [sys.executable, "-c", "raise SystemExit(3)"], tmp_path, "cpu", 60.0)
    output = capsys.readouterr().out
    assert "no such device" in output
    assert "status 3" in output
    assert gpu_check.report(Rows(tmp_path)) == 1


def test_a_part_without_its_packages_is_skipped_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_part(Part("train", 100, ("torch", "no_such_package")), [sys.executable, "-c", "print('well')"], tmp_path, "cpu", 60.0)
    assert Rows(tmp_path).read() == [{"part": "train", "status": "not started: not installed: no_such_package"}]
    assert "no_such_package" in capsys.readouterr().out


@pytest.mark.programs
def test_parts_that_do_not_train_need_no_lightning() -> None:
    """A machine with GPUs often lacks some packages. Their absence must not prevent all measurements."""
    packages = {*gpu_check.PROGRAMS, *gpu_check.SERVER, "taichi"}
    program = f"import sys; sys.modules.update(dict.fromkeys({packages!r})); import benchmarks._gpu_parts.__main__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_kernels_of_auto_come_first_and_torch_compile_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    why_not.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    check = Check("wkv4", Rows(tmp_path), "cuda", time.monotonic() + 60, tmp_path)
    kernels = kernels_of("wkv4", check)
    why_not.cache_clear()
    first = [name for name in rule("wkv4", "cuda", torch.bfloat16).order if name in kernels]
    assert "torch_scan" in first
    assert kernels[:len(first)] == first
    assert not any(name.startswith("torch_compile") for name in kernels)


def test_several_calls_append_to_one_file(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.add(part="train", status="stopped after 9 s")
    assert gpu_check.report(rows) == 1
    rows.add(part="train", status="ok", seconds=3)
    assert gpu_check.report(rows) == 0
    rows.add(part="right", kernel="cuda_v3", wrong={"y": "2e-3, but at most 5e-6 is allowed"})
    assert gpu_check.report(rows) == 1


def test_wrong_arguments_are_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "out")]) == 2
    assert gpu_check.main([str(tmp_path / "out"), "--device", "cpu", "--only", "nonsense"]) == 2
    assert capsys.readouterr().out.count("\n") == 2
    assert not (tmp_path / "out").exists()


def test_every_part_is_defined_and_documented() -> None:
    names = [part.name for part in gpu_check.PARTS]
    assert names == [part.__name__ for part in PARTS]
    assert all(f"    {name} " in str(gpu_check.__doc__) or f" {name} " in str(gpu_check.__doc__) for name in names)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_options_passed_to_the_programs_exist(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without this test, an invalid call of a program would first be noticed on a GPU."""
    commands: list[tuple[str, ...]] = []

    def program(_: Check, name: str, *command: str, **__: Any) -> bool:
        commands.append(command)
        return not name.startswith("train ") or name == "train rwkv7_tiny"

    monkeypatch.setattr(programs, "run_program", program)
    monkeypatch.setattr(programs, "_request_completion", lambda *_: None)
    check = Check("programs", Rows(tmp_path), device, time.monotonic() + 60, tmp_path)
    programs.programs(check)
    programs.shards(check)
    schemas = {"train.py": TrainConfig, "generate.py": GenerateConfig, "chat.py": ChatConfig,
               "rwkv.tools.evaluate": EvaluateConfig}
    called = [command[1:] if command[0] == "-m" else command for command in commands]
    assert {name for name, *_ in called} == set(schemas)
    for name, *options in called:
        cli.check(cli.split(options, schemas[name]), schemas[name])


@pytest.mark.programs
def test_measurements_on_a_cpu(tmp_path: Path) -> None:
    """Runs the quickest part in its own process: its lines are JSON and describe the measurements."""
    assert gpu_check.main([str(tmp_path), "--device", "cpu", "--only", "right"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {"c_v0"} == {row["kernel"] for row in lines if "operator" in row}
    compared = {(row["fused"], row["precision"]) for row in lines if "fused" in row}
    assert {("rwkv4", "bf16-mixed"), ("rwkv7", "32-true")} <= compared
    decoded = {(row["decoding"], row["dtype"]) for row in lines if "decoding" in row}
    assert {("rwkv4", "bfloat16"), ("rwkv7", "float32")} <= decoded
    assert {"rwkv4", "rwkv7"} == {row["texts"] for row in lines if "texts" in row}


def test_published_measurements_are_rows_too(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    peers(Check("peers", rows, "cpu", time.monotonic() + 60, tmp_path))
    assert any(row.get("published") for row in rows.read())


@pytest.mark.soak
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    assert gpu_check.main([str(tmp_path), "--device", "cpu"]) == 0
    assert len(list(tmp_path.iterdir())) <= 8
