"""Tests the plan of a run: what it prints, its warnings and its duration."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Run
from training_runs import TEXT, configured

from kernels.machine import threads
from kernels.machine.memory import resident_memory
from kernels.select import select
from rwkv.config import OptimConfig
from rwkv.pretrained import RWKV
from rwkv.training.plan import duration, this_machine
from rwkv.training.task import LanguageModel

CPU = torch.device("cpu")
GB = 10 ** 9


# The plan

PLANNED = ("debug=fast", "data=text", "data.val_fraction=0.1", "data.cache_dir=cache", "trainer=cpu", "kernel=torch_scan",
           "logger=csv", "plan=true")


@pytest.mark.programs
def test_the_plan_is_printed_and_nothing_is_trained(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan states the memory of the whole process, because the program and libraries need more than a small model."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    Path("text.txt").write_text(TEXT)
    status, output, error = run("train", *PLANNED, "data.path=text.txt", "trainer.max_tokens=1e3")
    assert (status, output) == (0, ""), error
    for expected in ("140,928 parameters, vocabulary 256", "torch_scan on cpu, precision 32-true", "GOMP_SPINCOUNT=77",
                     "weights 0.6 MB, gradients 0.6 MB, optimiser 1.1 MB", "6.8 MB for 4 checkpoints",
                     "8 steps of 128 tokens: 1,024 tokens, about "):
        assert expected in error
    assert "data.val_fraction" not in error
    assert {path.name for path in Path().iterdir()} == {"cache", "text.txt"}
    size, unit = re.findall(r"^memory +about ([\d,.]+) ([MG]B) for each process", error, re.MULTILINE)[0]
    promised = float(size.replace(",", "")) * {"MB": 10 ** 6, "GB": GB}[unit]
    assert sys.platform != "linux" or promised == pytest.approx(resident_memory(), rel=0.2)


@pytest.mark.programs
def test_a_validation_split_with_most_of_the_text_is_reported(run: Run) -> None:
    """The first document, which is always in the validation split, is much longer than the others."""
    lines = [json.dumps({"text": text}) + "\n" for text in (TEXT * 99, *[TEXT[:999]] * 30)]
    Path("long.jsonl").write_text("".join(lines))
    status, _, error = run("train", *PLANNED, "data=jsonl", "data.path=long.jsonl")
    assert status == 0, error
    assert "data.val_fraction" in error


@pytest.mark.parametrize(("width", "options", "timed"), [
    (16, {}, True), (4096, {}, False), (4096, {"plan": "false"}, False), (4096, {"plan": "timed"}, True),
    (16, {"compiled": True}, False), (16, {"compiled": True, "plan": "timed"}, True), (16, {"strategy": "fsdp"}, False)])
def test_steps_are_timed_where_they_are_quick_or_asked_for(width: int, options: dict[str, Any], timed: bool) -> None:
    config = configured(24, width, 8, 1024, compile=options.get("compiled", False), strategy=options.get("strategy", "single"))
    assert duration.is_timed(replace(config, plan=options.get("plan", "true")), 256, CPU) == timed


@pytest.mark.programs
def test_the_plan_reports_copies_marks_and_another_split(run: Run) -> None:
    """The data are ten tales, three times each: as one text with a marker between tales, and as JSON lines."""
    tales = [f"Tale {number} is of {number * number % 97} hens who sat on walls.\n" for number in range(10)]
    Path("text.txt").write_text("<|endoftext|>\n".join(3 * tales))
    Path("tales.jsonl").write_text("".join(json.dumps({"text": tale}) + "\n" for tale in 3 * tales))
    unseparated = run("train", *PLANNED, "data.path=text.txt")[2]
    assert "<|endoftext|> occurs 2" in unseparated
    assert "data.separator='<|endoftext|>'" in unseparated
    assert "100 % of the validation text" in unseparated
    separated = run("train", *PLANNED, "data.path=text.txt", "data.separator=<|endoftext|>")[2]
    assert "20 documents repeat others" in separated
    assert "WARNING" not in separated
    assert run("train", *PLANNED[:-1], "data=jsonl", "data.path=tales.jsonl", "data.val_fraction=0.3", "trainer.max_steps=1",
               "out_dir=base")[0] == 0
    tuned = (*PLANNED, "data=jsonl", "init_from=base")
    Path("tales.jsonl").rename("moved.jsonl")
    Path("other.jsonl").write_text(json.dumps({"text": "Another tale of hens."}) + "\n" + json.dumps({"text": TEXT}) + "\n")
    Path("tales.jsonl").write_text(Path("moved.jsonl").read_text())
    assert "data.val_fraction=0.3" in run("train", *tuned, "data.path=tales.jsonl", "data.val_fraction=0.2")[2]
    assert "data.val_fraction=0.3" not in run("train", *tuned, "data.path=tales.jsonl", "data.val_fraction=0.3")[2]
    assert "data.val_fraction=0.3" not in run("train", *tuned, "data.path=other.jsonl", "data.val_fraction=0.2")[2]


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc/loadavg")
def test_another_busy_program_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert any(threads.competing_threads() for _ in range(100))
        finally:
            other.kill()


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without the variables that set how long waiting threads spin, except those in `environment`."""
    inherited = {name: value for name, value in os.environ.items() if name not in threads.SETTINGS}
    return subprocess.run([sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True,
                          check=False, cwd=Path(__file__).parents[3])


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP on Linux alone")
@pytest.mark.parametrize("program", [("train.py", "kernel=fft"), pytest.param(
    ("-m", "rwkv.tools", "train", "kernel=fft"), marks=pytest.mark.soak)])
def test_the_programs_set_how_long_threads_wait_before_openmp_starts(program: tuple[str, ...]) -> None:
    """libgomp prints the value that it has read. Both command lines are refused after torch is imported."""
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in run_python(*program, OMP_DISPLAY_ENV="VERBOSE").stderr


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP on Linux alone")
@pytest.mark.parametrize("set_by_user", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_the_user_s_setting_for_waiting_threads_is_kept(set_by_user: dict[str, str]) -> None:
    code = "from kernels.machine import threads; threads.wait_briefly(); print(threads.settings())"
    output = run_python("-c", code, **set_by_user).stdout
    expected = set_by_user or {"GOMP_SPINCOUNT": threads.SPINS}
    assert output == f"{[f'{name}={value}' for name, value in expected.items()]}\n"


@pytest.mark.parametrize(("init_from", "steps", "warmup", "expected"), [
    ("base.pth", 3, 10, True), ("base.pth", 10, 10, True), ("base.pth", 11, 10, False), (None, 3, 20, False),
    (None, 100, 100, True), (None, 101, 100, False)])
def test_a_run_that_ends_in_its_warm_up_is_reported(init_from: str | None, steps: int, warmup: int, expected: bool) -> None:
    config = configured(1, 8, 4, 10)
    config = replace(config, init_from=init_from, optim=replace(config.optim, warmup_steps=warmup),
                     trainer=replace(config.trainer, max_steps=steps))
    assert bool(list(this_machine._length_warnings(config, 1.0, False))) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, "1 s"), (0.9, "54 s"), (1.5, "1.5 minutes"), (60, "60.0 minutes"),
                                                   (150, "2.5 hours"), (2900, "2.0 days")])
def test_a_duration_has_a_unit_of_its_size(seconds: float, expected: str) -> None:
    assert duration.format_duration(60 * seconds) == f"about {expected}"


def test_the_plan_counts_segments_computed_twice() -> None:
    """All segments but the last of four are recomputed, which takes a third of a segment's time."""
    configs = [configured(1, 8, 4, 10, tbptt=K) for K in (0, 1, 4)]
    assert [duration.equivalent_steps(config, 60, 0) for config in configs] == [(60, 0), (60, 0), (75, 0)]


def test_the_estimate_has_no_side_effects() -> None:
    """The estimate draws no random numbers and changes no gradients or weights, so training stays bit-identical."""
    config = configured(2, 16, 2, 8)
    task = LanguageModel(RWKV(config.model, 50, select("wkv4", "torch_scan")).init_weights(), OptimConfig(), 10, 1.0)
    before = {name: weight.clone() for name, weight in task.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert duration.seconds_per_step(task, config, CPU, conversations=None) > 0
    assert (torch.get_rng_state().equal(states[0]), random.getstate(), np.random.get_state()[1].tolist()) == (True, *states[1:])
    assert all(weight.equal(before[name]) for name, weight in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())


# Validation of a part, and validation that takes long


@pytest.mark.parametrize(("val_tokens", "time_share", "words"), [
    (None, 0.3, []),
    (None, 0.5, ["30 times", "all 120 tokens", "50 %"]),
    (30, 0.2, ["30 times", "the first 30 of 120 tokens"]),
    (999, 0.5, ["30 times", "all 120 tokens", "50 %"]),
])
def test_the_plan_has_a_line_for_partial_or_long_validation(val_tokens: int | None, time_share: float,
                                                            words: list[str]) -> None:
    lines = list(this_machine._validation(val_tokens, 120, 30, time_share))
    assert len(lines) == bool(words)
    assert not [part for part in words if part not in lines[0][1]]


@pytest.mark.programs
def test_a_debug_run_validates_a_part_and_says_so(run: Run) -> None:
    """A debug run validates on 512 tokens, however large the validation split is."""
    Path("text.txt").write_text(TEXT * 10)
    status, _, error = run("train", *PLANNED[:-1], "data.path=text.txt", "data.val_fraction=0.3", "trainer.max_steps=2",
                           "trainer.val_every=1", "out_dir=run")
    assert status == 0, error
    (planned,) = [line for line in error.splitlines() if line.startswith("validation ") and " times " in line]
    (validation_line,) = [line for line in error.splitlines() if line.startswith("validation used")]
    assert "the first 512 of " in planned
    assert "the first 512 of " in validation_line
    assert "512 tokens" in Path("run/report.html").read_text()
    status, _, resume_error = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=3", "trainer.val_tokens=64")
    assert (status, "trainer.val_tokens" in resume_error) == (2, True), "best.ckpt requires losses of the same tokens"
