"""Tests reports of runs and sweeps: the measurements of a run, failed runs, damaged files, and the numbers on the page."""

import codecs
import csv
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from xml.etree import ElementTree

import pytest
import torch
import yaml
from forked import Forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import small_model
from stubs import selectable_stub
from training_runs import OF_PROBE, SMALL, TEXT, assert_same_training, losses, rows

from kernels.timex import conv1d
from rwkv import cli, report
from rwkv.config import DataConfig, KernelConfig, LoggerConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.io.signals import StopRequest
from rwkv.report import page as report_page
from rwkv.report.findings import findings
from rwkv.report.numbers import columns, compare
from rwkv.report.numbers import rows as numbers_rows
from rwkv.report.run_files import Run, read
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import report as report_tool
from rwkv.training import finish, fit
from rwkv.training.run.opening import open_run
from rwkv.training.sweep import launchers, sweep
from rwkv.training.sweep.launchers import End, Processes, Task

ROOT = Path(__file__).parent.parent.parent
RESULTS = ("y", *(f"grad {name}" for name in ("time_decay", "time_first", "k", "v")))


# In this sweep conv1d trains, torch_scan fails after some backward passes, and cuda_v3 has no device


RUN_OF_SWEEP = "from rwkv.training.sweep import child; child.main()"
FAILING_RUN = f"""
from kernels.registry import load

scan, calls = load("wkv4", "torch_scan"), []
right = scan.backward

def backward(*inputs):
    calls.append(1)
    if len(calls) > 9:
        raise RuntimeError("out of <luck> & such")
    return right(*inputs)

scan.backward = backward
{RUN_OF_SWEEP}
"""


class ForkedRun(Forked):
    """A run of a sweep in a forked process, with the part of subprocess.Popen's interface that sweeps use."""

    code = FAILING_RUN                   # torch_scan fails after some backward passes
    stdout = None

    def __init__(self, command: list[str], **_: Any) -> None:
        self._log = Path(f"{command[2]}.stderr").absolute()
        super().__init__(Path.cwd(), ("-c", self.code, *command[2:]), dict(os.environ), log=self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    @property
    def stderr(self) -> list[str]:
        self.wait()
        return self._log.read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """Yields a function that runs a sweep in this process, with its runs in forked processes.

    The function takes command-line arguments ("-m", ...) and returns the exit status.
    """
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")

    def call(*arguments: str) -> int:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        with pytest.MonkeyPatch.context() as forking:
            forking.setattr(launchers, "subprocess", SimpleNamespace(Popen=ForkedRun, PIPE=None, STDOUT=None))
            with pytest.raises(SystemExit) as stop:
                cli.run(fit.main, TrainConfig, "train", None, sweep.run)
        return int(stop.value.code or 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(folder)
        yield call


@pytest.fixture(scope="module")
def swept(start: Callable[..., int]) -> tuple[int, Path]:
    status = start("-m", "kernel=conv1d,torch_scan,cuda_v3", *SMALL, "logger=csv", "model.n_layer=1", "out_dir=a, b",
                   "trainer.max_steps=10", "trainer.val_every=5")
    return status, Path("a, b").absolute()


@pytest.mark.programs
def test_failed_runs_do_not_stop_the_others(swept: tuple[int, Path]) -> None:
    status, folder = swept
    assert status == 1
    runs = {run.kernel: run for run in read(folder)}
    assert {kernel: run.status for kernel, run in runs.items()} == {
        "conv1d": "finished", "torch_scan": "failed", "cuda_v3": "unavailable"}
    assert runs["torch_scan"].reason == "RuntimeError: out of <luck> & such"
    assert "not on cpu" in str(runs["cuda_v3"].reason)
    assert list(runs["conv1d"].curve("train/loss")) == list(range(1, 11))
    assert 0 < len(runs["torch_scan"].curve("train/loss")) < 9, "its curve until then"
    assert runs["torch_scan"].measured["steps"], "and what was measured until then"
    assert sorted(run.order or 0 for run in runs.values()) == [1, 2, 3]
    assert "Traceback" in (folder / "logs" / "kernel=torch_scan.txt").read_text()


@pytest.mark.programs
def test_the_numbers_of_a_report_equal_those_of_the_run(swept: tuple[int, Path]) -> None:
    folder = swept[1]
    by_kernel = {(row["kernel"], row["statistic"]): row for row in table(folder)}
    one, run = by_kernel["conv1d", "value"], folder / "kernel=conv1d"
    measured = json.loads((run / "kernel.json").read_text())
    speeds = [float(row["tok_per_sec"]) for row in rows(run) if row["tok_per_sec"] and int(row["step"]) > measured["warm_up"]]
    assert measured["warm_up"] == 2
    assert float(one["tok_per_sec"]) == pytest.approx(statistics.median(speeds))
    assert float(one["val_loss"]) == losses(run, "val/loss")[10]
    assert float(one["peak_mib"]) == max(float(row["peak_mem"]) for row in rows(run) if row["peak_mem"])
    steps = measured["steps"]
    assert [step["step"] for step in steps] == list(range(2, 10))
    assert all(0 < step["forward_ms"] + step["backward_ms"] < step["ms"] for step in steps)
    assert float(one["step_ms"]) == pytest.approx(statistics.median(step["ms"] for step in steps))
    for when in ("start", "end"):
        errors = [layer["errors"]["grad k"]["err_ratio"] for layer in measured["errors"][when]["layers"]]
        assert 0 < float(one[f"err_{when}_grad_k"]) == max(errors) < 1e-5
    assert by_kernel["conv1d", "median"]["val_loss"] == one["val_loss"]
    ours, theirs = losses(folder / "kernel=torch_scan"), losses(run)
    assert float(by_kernel["torch_scan", "value"]["difference"]) == max(abs(ours[step] - theirs[step]) for step in ours)
    assert by_kernel["torch_scan", "median"]["runs"] == "0"


@pytest.mark.programs
def test_the_page_names_the_failed_runs(swept: tuple[int, Path]) -> None:
    page = parse_page(swept[1] / "report.html")
    for expected_text in ("torch_scan failed in 1 of 1 run: RuntimeError: out of <luck> & such", "cuda_v3 cannot run here",
                          "compared with conv1d", "WKV forward", "shuffled with seed 0", "commit", "torch"):
        assert expected_text in page.text
    assert "The runs differ in more than" not in page.text
    assert page.figures >= 5


@pytest.mark.programs
def test_a_sweep_continues_its_unfinished_runs(swept: tuple[int, Path], start: Callable[..., int],
                                               monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = swept[1]
    monkeypatch.setattr(ForkedRun, "code", RUN_OF_SWEEP)
    before = (folder / "kernel=conv1d" / "metrics.csv").stat().st_mtime
    assert start("-m", "resume=auto", "out_dir=a, b") == 0
    error = capsys.readouterr().err
    lines = {line[:11].strip(): line for line in error.splitlines()}
    assert "3 runs, 2 unfinished" in error
    assert "checkpoint=a, b/kernel=" in lines["best"].replace("'", "")
    assert "runs/latest" in lines["latest"]
    assert lines["latest"].endswith("kernel=torch_scan")
    assert (folder / "kernel=conv1d" / "metrics.csv").stat().st_mtime == before
    assert losses(folder / "kernel=torch_scan") == pytest.approx(losses(folder / "kernel=conv1d"), abs=1e-4)
    assert {run.status for run in read(folder)} == {"finished", "unavailable"}


@pytest.mark.programs
@pytest.mark.parametrize(("arguments", "expected_text"), [
    (("kernel=conv1d,torch_scan", "out_dir=a, b"), "-m resume=auto"),
    (("kernel=conv1d,torch_scan", "seed=7", "out_dir=a, b", "resume=auto"), "kernel=conv1d"),
    (("out_dir=none", "resume=auto"), "sweep.json"),
    (("resume=auto",), "out_dir=DIR"),
    (("plan=true", "out_dir=new"), "plan=true"),
    (("seed=0,1", "plan=false,true", "out_dir=new"), "plan=true"),
    (("hydra/launcher=basic", "seed=0,1", "out_dir=new"), "hydra/launcher"),
    (("+hydra.launcher.n_jobs=4", "out_dir=new"), "hydra.launcher.n_jobs"),
    (("kernel=conv1d,torch_chunk", "out_dir=new"), "torch_chunk computes the operator of RWKV-7"),
    (("seed=0,1", "resume=auto", "out_dir=a, b/kernel=conv1d"), "exists already"),
])
def test_mistakes_in_the_command_line_of_a_sweep(swept: tuple[int, Path], start: Callable[..., int], arguments: tuple[str, ...],
                                                 expected_text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("-m", *arguments) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert expected_text in error
    assert not Path("new").exists()


@pytest.mark.soak                        # four runs one after another take a quarter of a minute
def test_a_sweep_computes_the_operator_of_its_initial_file(start: Callable[..., int]) -> None:
    """The file's model is RWKV-7, although the command line has sizes of RWKV-4. A run is resumed without the file."""
    small_model("reference", 256, generation="rwkv7").save_pretrained("seven.safetensors", ByteTokenizer())
    options = (*SMALL, "logger=none", "model.ctx_len=16", "trainer.sample_tokens=0", "trainer.max_steps=2")
    assert start("-m", "init_from=seven.safetensors", "kernel=torch_chunk", "seed=0,1", *options, "out_dir=sevens") == 0
    runs = json.loads(Path("sevens/sweep.json").read_text())
    runs["runs"][0]["status"] = sweep.STOPPED
    Path("sevens/sweep.json").write_text(json.dumps(runs))
    Path("sevens/seed=0/kernel.json").unlink()
    Path("seven.safetensors").unlink()
    assert start("-m", "resume=auto", "out_dir=sevens") == 0
    assert [run.status for run in read(Path("sevens"))] == ["finished"] * 2


@pytest.mark.programs
def test_an_experiment_sets_the_swept_options_and_the_command_line_overrides_them() -> None:
    def jobs(*arguments: str) -> list[cli.Job]:
        line = cli.split(["experiment=kernel_ablation", *arguments], TrainConfig)
        return cli.jobs(line, TrainConfig, "train")

    everything = jobs("data=text", "data.path=a, b=c")
    assert len(everything) == 18
    assert len({sweep.name_of(job) for job in everything}) == 18
    assert [job.config.seed for job in everything[:4]] == [0, 1, 2, 0]
    assert {job.config.data.path for job in everything} == {"a, b=c"}
    assert all(job.config.trainer.probe and job.config.trainer.max_steps == 300 for job in everything)
    assert [sweep.name_of(job) for job in jobs("kernel=auto", "seed=3,4", "optim.lr=1e-3")] == ["seed=3", "seed=4"]
    single = cli.split(["experiment=kernel_ablation", "kernel=conv1d", "seed=3"], TrainConfig)
    assert cli.compose(single, TrainConfig, "train").kernel.name == "conv1d"


def test_ctrl_c_is_passed_to_the_run_and_the_sweep_waits(tmp_path: Path) -> None:
    """A run's process has its own session, so the terminal's Ctrl-C does not reach the process."""
    program = ("import os, signal, sys, time\n"
               "def stop(*_): print('saved', file=sys.stderr); sys.exit(130)\n"
               "signal.signal(signal.SIGINT, stop)\n"
               "os.kill(os.getppid(), signal.SIGINT)\n"
               "time.sleep(60)")
    launcher = Processes(1, 1, 0)
    with StopRequest(on_signal=launcher.stop, every_signal=True) as stop:
        launcher.start(Task("run", [sys.executable, "-c", program], tmp_path, [], tmp_path / "log.txt"), None)
        ends = next(ends for _ in range(1000) if (ends := launcher.ends()))
    assert (stop.requested, ends, (tmp_path / "log.txt").read_text()) == (True, [End("run", 130)], "saved\n")


def test_a_sweep_keeps_the_order_of_its_runs_lines_in_one_file(tmp_path: Path) -> None:
    """Standard output and standard error of a run go to the same file, as with `> log.txt 2>&1`."""
    run = "import sys\nfor n in range(50): print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)"
    program = ("import pathlib, sys\nfrom rwkv.training.sweep.launchers import Processes, Task\nlauncher = Processes(1, 1, 0)\n"
               f"file = pathlib.Path({str(tmp_path / 'run.txt')!r})\n"
               f"launcher.start(Task('run', [sys.executable, '-c', {run!r}], file.parent, [], file), None)\n"
               "while not launcher.ends(): pass")
    with (tmp_path / "log.txt").open("w") as log:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=log, stderr=log, check=True)
    assert (tmp_path / "log.txt").read_text().split() == [str(n) for n in range(50)]


@pytest.mark.parametrize(("status", "error", "log", "reason"), [
    (1, "KeyError: 'z'", "a\nb\n", "KeyError: 'z'"), (1, None, "one\nlast\n\n", "last"), (3, None, "", "exit status 3"),
    (-9, None, "step 3\n", "ended by SIGKILL: out of memory?"),
])
def test_the_reason_of_a_failed_run(status: int, error: str | None, log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    if error:
        (tmp_path / "reason.txt").write_text(error)
    assert sweep.reason_of(status, tmp_path / "reason.txt", tmp_path / "log.txt") == reason


@pytest.mark.parametrize(("program", "reason"), [
    ("raise KeyError('z')", "KeyError: 'z'"),
    ("try:\n    raise ValueError('one\\ntwo')\nexcept ValueError:\n    sys.exit(2)", "one"),
    ("try:\n    raise ValueError('one')\nexcept ValueError:\n    sys.exit(1)", "ValueError: one"),
    ("sys.exit(1)", None), ("", None)])
def test_a_run_of_a_sweep_writes_the_error_that_ends_it(program: str, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import sys\n{program}\n")
    child = tmp_path / "rwkv" / "training" / "sweep" / "child.py"
    child.parent.mkdir(parents=True)
    shutil.copy(sweep.CHILD, child)
    reason_file = tmp_path / "reason.txt"
    subprocess.run([sys.executable, child, reason_file], stderr=subprocess.DEVNULL, check=False)
    assert (reason_file.read_text() if reason_file.exists() else None) == reason


# The probe


def small(folder: Path, name: str, kernel: str = "torch_scan", **trainer: Any) -> TrainConfig:
    options = {"max_steps": 6, "val_every": 3, "checkpoint_every": 3, "log_every": 1, "sample_tokens": 0, "sample_every": 0}
    return TrainConfig(
        KernelConfig(kernel), ModelConfig(n_layer=2, n_embd=16, ctx_len=16), logger=LoggerConfig("csv"),
        optim=OptimConfig(warmup_steps=0),
        data=DataConfig("text", str(folder / "text.txt"), tokenizer="byte", batch_size=4, cache_dir=str(folder / "cache")),
        trainer=TrainerConfig(accelerator="cpu", **options | trainer), out_dir=str(folder / name))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.mark.programs
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "precision": "bf16-mixed", "activation_checkpointing": True}])
def test_a_probe_does_not_change_training_by_a_bit(folder: Path, options: dict[str, Any]) -> None:
    for name, probe in (("with", True), ("without", False)):
        fit.train(open_run(small(folder, name, probe=probe, sample_every=3, sample_tokens=2, **options)))
    assert_same_training(folder / "with", folder / "without", OF_PROBE)
    page = parse_page(folder / "without" / "report.html")
    assert "torch_scan, seed 0" in page.text
    assert "Samples" in page.text
    assert "compared with" not in page.text
    measured, without = (json.loads((folder / name / "kernel.json").read_text()) for name in ("with", "without"))
    assert (measured["finished"], without["finished"], without["probe"], without["errors"]) == (True, True, "off", {})
    assert len(measured["steps"]) == 5
    errors = [layer["errors"][result]["err_ratio"] for when in ("start", "end")
              for layer in measured["errors"][when]["layers"] for result in RESULTS]
    assert all(0 < error < (2e-2 if options else 1e-5) for error in errors), "at the third step no gradient is zero any more"


@pytest.mark.programs
def test_a_wrong_gradient_is_exposed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings appear before the run and in the report. With the probe, warnings also appear at the run's start and end."""
    def wrong(w: torch.Tensor, k: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_w, grad_k = conv1d.backward(w, k, grad_out)
        return grad_w, grad_k.roll(1, -1)

    warnings = {}
    with selectable_stub("timex", conv1d.forward, wrong) as name:
        for kernel in ("conv1d", name):
            fit.train(open_run(small(folder, f"runs/{kernel}", kernel, probe=True)))
            warnings[kernel] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
        fit.train(open_run(small(folder, "unprobed", name)))
    assert warnings["conv1d"] == []
    before, at_start, at_end, of_report = warnings[name]
    assert f"{name} is wrong" in of_report
    *_, of_report = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert of_report == f"{before}."
    assert before.partition(name)[2] in parse_page(folder / "unprobed" / "report.html").text
    for warning, where in ((before, "2 of 2 runs"), (at_start, "at step 2"), (at_end, "at step 6")):
        assert where in warning
        assert "gradient of k" in warning
        assert "time_decay" not in warning
    report.write(folder / "runs")
    assert {row["run"] for row in table(folder / "runs") if row["run"]} == {"conv1d", name}, "runs/latest is no run of its own"
    page = parse_page(folder / "runs" / "report.html")
    assert f"{name} is wrong: the error of the gradient of k is " in page.text
    assert f"{name}: the loss deviates from that of conv1d by " in page.text
    assert "conv1d is wrong" not in page.text
    right, broken = (next(row for row in table(folder / "runs") if row["kernel"] == kernel) for kernel in ("conv1d", name))
    assert float(broken["err_end_grad_k"]) > 1e-2 > 1e-5 > float(right["err_end_grad_k"])
    assert float(broken["err_end_y"]) < 1e-5


def test_a_report_has_every_sample(tmp_path: Path) -> None:
    """A damaged line, and characters that str.splitlines() treats as newlines, hide no sample."""
    make_run(tmp_path, "conv1d", 0, [3.0])
    run = tmp_path / "kernel=conv1d,seed=0"
    lines = [json.dumps({"step": step, "prompt": "", "text": f"a\u2028\x85{step}"}, ensure_ascii=False) for step in (1, 2, 3)]
    (run / "samples.jsonl").write_text("\n".join([lines[0], '{"step', *lines[1:]]) + "\n", encoding="utf-8")
    assert [(one["step"], one["text"]) for one in read(run)[0].samples] == [
        (step, f"a\u2028\x85{step}") for step in (1, 2, 3)]


ERRORS = {"allowed": {"y": 1.0}, "layers": [{
    "errors": {result: {"err_ratio": 0.1, "max": 0.2} for result in RESULTS},
    "ranges": {name: [0, 1] for name in ("k", "v", "time_decay", "time_first")}}]}
MEASURED = {"finished": True, "warm_up": 2, "precision": "32-true", "machine": {"cpu": "x"},
            "steps": [{"step": 2, "ms": 3.0, "forward_ms": 1.0, "backward_ms": 1.0}],
            "errors": {"start": ERRORS, "end": ERRORS}}


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> Any:
    """Draws a copy of a JSON value in which one part has another value or is missing."""
    if isinstance(whole, (dict, list)) and whole and draw(st.integers(0, 5)):
        places = list(whole) if isinstance(whole, dict) else range(len(whole))
        place = draw(st.sampled_from(list(places)))
        copy = whole.copy()
        if draw(st.integers(0, 5)):
            copy[place] = draw(damaged(whole[place]))
        else:
            del copy[place]
        return copy
    return draw(st.sampled_from([None, True, -1, 2.5, 1e308, math.nan, math.inf, "", "x", [], [1], {}, {"x": 1}]))


@pytest.mark.thorough
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(measured=damaged(MEASURED), config=damaged({"kernel": {"name": "conv1d"}, "seed": 0, "optim": {"lr": 0.1}}),
       rows=st.text("0123456789.,-\n\r\"xnaife\0", max_size=30), place=st.integers(0, 100))
def test_damage_to_a_run_does_not_stop_the_report_of_the_others(tmp_path: Path, measured: Any, config: Any, rows: str,
                                                                place: int) -> None:
    for kernel in ("conv1d", "other") if not (tmp_path / "kernel=other,seed=0").exists() else ():
        make_run(tmp_path, kernel, 0, [3.0, 2.0])
        (tmp_path / f"kernel={kernel},seed=0" / "kernel.json").write_text(json.dumps(MEASURED))
    run = tmp_path / "kernel=conv1d,seed=0"
    whole = "step,train/loss,val/loss,tok_per_sec,peak_mem,kernel\n1,3.0,,100,50,conv1d\n2,2.0,1.0,100,50,conv1d\n"
    (run / "kernel.json").write_text(json.dumps(measured))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "metrics.csv").write_text(whole[:place] + rows + whole[place:], newline="")
    report_tool.main([str(tmp_path)])


@pytest.mark.parametrize(("name", "content"), [
    ("kernel.json", b"{"), ("kernel.json", b"[1]"), ("kernel.json", b'{"steps": [{}]}'), ("kernel.json", b"[" * 9999),
    ("config.yaml", b"a: ["), ("config.yaml", b"kernel: 3"), ("config.yaml", b"\xff"),
    ("samples.jsonl", b'{"prompt": "", "text": "a"}\n'), ("samples.jsonl", b'{"step": 1}\n'),
    ("metrics.csv", b"step,train/loss\nnan,1\n"), ("metrics.csv", b"step,train/loss\n" + b"9" * 5000 + b",1\n"),
    ("metrics.csv", b"step,train/loss\n1," + b"1" * 200_000 + b"\n")])
def test_a_report_lists_damaged_files(tmp_path: Path, name: str, content: bytes) -> None:
    make_run(tmp_path, "conv1d", 0, [3.0, 2.0])
    assert read(tmp_path)[0].damaged == []
    (tmp_path / "kernel=conv1d,seed=0" / name).write_bytes(content)
    report_tool.main([str(tmp_path)])
    assert f"kernel=conv1d,seed=0: {name}" in parse_page(tmp_path / "report.html").text


def test_a_byte_order_mark_is_not_damage(tmp_path: Path) -> None:
    """Spreadsheets and some editors write a byte order mark when a user saves a file."""
    make_run(tmp_path, "conv1d", 0, [3.0, 2.0])
    before = read(tmp_path)
    for path in tmp_path.glob("*/*"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read(tmp_path) == before
    assert before[0].damaged == []


def test_a_run_does_not_fail_when_its_report_cannot_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish.write_report(folder)
    assert "cannot write the report: " in capsys.readouterr().err


# The report


def make_run(folder: Path, kernel: str, seed: int, train_loss: list[float], speed: float = 100.0, **config: Any) -> None:
    """Writes the files that training leaves."""
    run = folder / f"kernel={kernel},seed={seed}"
    run.mkdir(parents=True)
    settings = {"kernel": {"name": kernel}, "seed": seed, "out_dir": str(run), "optim": {"lr": 0.1}} | config
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "train/loss", "val/loss", "tok_per_sec", "peak_mem", "kernel"])
        for step, loss in enumerate(train_loss, start=1):
            writer.writerow([step, loss, "", 1e9 if step < 3 else speed + step, 50 + step, kernel])
        writer.writerow([len(train_loss), "", train_loss[-1] / 2, "", "", kernel])
    (run / "kernel.json").write_text(json.dumps({"finished": True, "warm_up": 2, "machine": {"cpu": "x", "commit": "c"}}))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "report.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_medians_and_ranges_are_over_seeds_and_after_warm_up(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path, "conv1d", seed, [3.0, 2.0, 1.0 + seed], 100)
        make_run(tmp_path, "taichi_v3", seed, [3.0, 2.0 + seed / 8, 1.0 + seed], 200 + 10 * seed * seed)
    report_tool.main([str(tmp_path)])
    numbers = {(row["kernel"], row["statistic"]): row for row in table(tmp_path) if row["level"] == "kernel"}
    assert list(table(tmp_path)[0]) == list(columns([])), "no errors were measured"
    assert [float(numbers["taichi_v3", statistic]["tok_per_sec"]) for statistic in ("median", "min", "max")] == [213, 203, 243]
    assert [float(numbers["taichi_v3", statistic]["difference"]) for statistic in ("median", "min", "max")] == [0.125, 0, 0.25]
    assert [float(numbers["conv1d", statistic]["val_loss"]) for statistic in ("median", "min", "max")] == [1, 0.5, 1.5]
    assert numbers["conv1d", "median"]["difference"] == ""
    runs = [row for row in table(tmp_path) if row["level"] == "run"]
    assert [row["difference_step"] for row in runs] == ["", "", "", "1.0", "2.0", "2.0"]
    page = parse_page(tmp_path / "report.html")
    assert "2.07" in page.text, "taichi_v3's throughput beside conv1d's 103"
    assert {"step", "WKV forward", "reason", "order"}.isdisjoint(page.headers), "no run measured these"
    assert {"kernel", "tokens/s", "difference", "status"} <= set(page.headers)
    report_tool.main([str(tmp_path), "--reference", "taichi_v3"])
    assert "compared with taichi_v3" in parse_page(tmp_path / "report.html").text


def test_a_report_of_several_runs_includes_the_runs_of_sweeps(tmp_path: Path) -> None:
    names = [f"kernel=conv1d,seed={seed}" for seed in range(3)]
    for seed, folder in enumerate((tmp_path / "sweep", tmp_path / "sweep", tmp_path)):
        make_run(folder, "conv1d", seed, [3.0, 2.0])
    entry = {"status": "finished", "reason": None, "order": 1, "kernel": "conv1d", "seed": 0}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": [entry | {"name": name} for name in names[:2]]}))
    assert [run.name for run in read(tmp_path)] == [names[2], f"sweep/{names[0]}", f"sweep/{names[1]}"]
    shutil.rmtree(tmp_path / names[2])
    report.write(tmp_path)
    assert {row["run"] for row in table(tmp_path) if row["run"]} == {f"sweep/{name}" for name in names[:2]}


def test_only_the_first_20_steps_are_early() -> None:
    """Within these steps rounding hardly separates kernels that compute the same."""
    losses = {"conv1d": dict.fromkeys(range(1, 41), 2.0), "other": {step: 2.0 + step / 1024 for step in range(1, 41)}}
    comparison = compare([Run(kernel, kernel, 0, metrics={"train/loss": curve}) for kernel, curve in losses.items()])
    numbers, = comparison.kernels[1].numbers
    assert (numbers["difference_early"], numbers["difference"]) == (20 / 1024, 40 / 1024)


def test_throughput_is_compared_with_the_reference_with_the_same_options(tmp_path: Path) -> None:
    """For two learning rates the reference has 100 and 200 tokens/s, and the other kernel is 0.5 and 3 times as fast."""
    speeds = [("conv1d", 0.1, 100.0), ("conv1d", 0.2, 200.0), ("taichi_v3", 0.1, 50.0), ("taichi_v3", 0.2, 600.0)]
    runs = [Run(f"{kernel} {lr}", kernel, 0, config={"optim": {"lr": lr}},
                metrics={"train/loss": {1: 2.0}, "tok_per_sec": {1: speed}}) for kernel, lr, speed in speeds]
    comparison = compare(runs)
    path = tmp_path / "page.html"
    path.write_text(report_page.render(tmp_path, comparison, []), encoding="utf-8")
    assert "times conv1d" in parse_page(path).text
    for label, speed, ratio in (("conv1d, optim.lr=0.1", 100, "1.00"), ("conv1d, optim.lr=0.2", 200, "1.00"),
                                ("taichi_v3, optim.lr=0.1", 50, "0.50"), ("taichi_v3, optim.lr=0.2", 600, "3.00")):
        row = next(row for row in path.read_text(encoding="utf-8").split("<tr>") if row.startswith(f"<td>{label}<"))
        assert f"<td>{speed}</td><td>{ratio}</td>" in row


def test_an_option_differs_only_between_runs_in_which_it_has_an_effect() -> None:
    """The runs with adamw have the default of an option that only muon uses."""
    def compared(*optims: tuple[str, float]) -> tuple[list[str], list[str]]:
        runs = [Run(str(number), "conv1d", 0, config={"optim": {"name": name, "matrix_lr": rate}})
                for number, (name, rate) in enumerate(optims)]
        comparison = compare(runs)
        return [*comparison.options], [kernel.label for kernel in comparison.kernels]

    assert compared(("adamw", 0.02), ("muon", 0.1)) == (["optim.name"], ["conv1d, optim.name=adamw", "conv1d, optim.name=muon"])
    assert compared(("adamw", 0.02), ("muon", 0.1), ("muon", 0.2)) == (
        ["optim.name", "optim.matrix_lr"], ["conv1d, optim.name=adamw", "conv1d, optim.name=muon, optim.matrix_lr=0.1",
                                            "conv1d, optim.name=muon, optim.matrix_lr=0.2"])


def test_mean_losses_are_shown_next_to_a_published_run(tmp_path: Path) -> None:
    """The comparison ends with the run's steps, and a value that is not a list of losses is ignored."""
    published = {"published_losses": [3.25, 1.0, 0.5], "published_steps": 2}
    make_run(tmp_path, "conv1d", 0, [4.0, 3.0, 2.0, 1.0, 0.5], logger=published)
    make_run(tmp_path, "conv1d", 1, [4.0, 3.0], logger={"published_losses": "x", "published_steps": 2})
    report_tool.main([str(tmp_path)])
    text = parse_page(tmp_path / "report.html").text
    assert all(number in text for number in ("1 to 2", "3.2500", "3.5000", "+0.2500", "3 to 4", "1.0000", "1.5000", "+0.5000"))
    assert "5 to 6" not in text


@pytest.mark.parametrize(("results", "expected_text"), [(RESULTS, "The outputs and gradients of"), (("y",), "The outputs of")])
def test_gradients_are_called_correct_only_if_they_were_measured(results: tuple[str, ...], expected_text: str) -> None:
    """A tuned model of one layer may have no gradients."""
    layer = {"errors": {result: {"err_ratio": 0.1, "max": 0.2} for result in results}, "ranges": {}}
    measured = {"errors": {"end": {"allowed": {}, "layers": [layer]}}}
    runs = [Run(kernel, kernel, 0, metrics={"train/loss": {1: 2.0}}, measured=measured) for kernel in ("conv1d", "taichi_v3")]
    assert expected_text in findings(compare(runs))[-1].text


def loaded_run(kernel: str, seed: int = 0, train_loss: Sequence[float] = (3.0, 2.0), speed: float = 100.0, commit: str = "c",
               pairs: bool = False, **config: Any) -> Run:
    """Returns a run as if read from its files. With `pairs` it was trained on pairs of answers, one of them preferred."""
    steps = range(1, len(train_loss) + 1)
    metrics = {"train/loss": dict(zip(steps, train_loss, strict=True)), "val/loss": {len(train_loss): train_loss[-1] / 2},
               "tok_per_sec": {step: speed + step for step in steps}, **({"val/rewards_margin": {1: 0.5}} if pairs else {})}
    return Run(f"kernel={kernel},seed={seed}", kernel, seed, config={"optim": {"lr": 0.1}} | config, metrics=metrics,
               measured={"machine": {"cpu": "x", "commit": commit}})


@pytest.mark.parametrize(("others", "kinds", "expected_text"), [
    ([loaded_run("taichi_v3", optim={"lr": 0.2})], ["bad"], "optim.lr is 0.1 in kernel=conv1d,seed=0; 0.2 in "),
    ([loaded_run("taichi_v3", resume="auto", logger={"run_name": "x"})], ["good"], ""),
    ([loaded_run("taichi_v3", commit="d")], ["bad"], "commit is c in kernel=conv1d,seed=0; d in"),
    ([loaded_run("taichi_v3"), loaded_run("other_seed", 1, [3.1, 2.1]), loaded_run("wrong", 0, [3.0, 2.5])], ["bad", "good"],
     "the losses of taichi_v3 equal those of conv1d"),           # a run without a counterpart of the same seed is ignored
    ([loaded_run("taichi_v3", 0, [3.0, math.nan])], ["bad"], "the loss deviates from that of conv1d"),
], ids=["options", "no options", "commit", "one is wrong", "not a number"])
def test_findings(others: list[Run], kinds: list[str], expected_text: str) -> None:
    actual = findings(compare([loaded_run("conv1d"), *others]))
    assert [finding.kind for finding in actual] == kinds
    assert expected_text in actual[-1].text


def test_a_loss_that_is_not_a_number_is_the_largest_difference() -> None:
    comparison = compare([loaded_run("conv1d", 0, [3.0, 2.0, 1.0]), loaded_run("taichi_v3", 0, [3.0, math.nan, 1.5])])
    row = next(row for row in numbers_rows(comparison) if row["kernel"] == "taichi_v3")
    assert (str(row["difference"]), row["difference_step"]) == ("nan", 2.0)


def runs_of_speeds(conv1d: Sequence[float], fast: Sequence[float]) -> list[Run]:
    return [loaded_run(kernel, seed, [3.0, 2.0, 1.0], speed) for kernel, of_seeds in (("conv1d", conv1d), ("fast", fast))
            for seed, speed in enumerate(of_seeds)]


def runs_of_rates(pairs: bool) -> list[Run]:
    return [loaded_run("conv1d", seed, [3.0, 2.0 + lr], pairs=pairs, optim={"lr": lr}) for seed, lr in enumerate((0.1, 0.2))]


@pytest.mark.parametrize(("runs", "expected_text", "absent_text"), [
    (runs_of_speeds((100, 101), (150, 152)), ("fast is the fastest: 153 tokens/s, 1.49 times", "faster than every run"),
     "may be equally fast"),
    (runs_of_speeds((100, 160), (150, 152)), ("fast is the fastest", "conv1d, which may be equally fast"),
     "faster than every run"),
    (runs_of_speeds((160, 161), (150, 152)), ("conv1d is the fastest", "the next, fast"), "times as many"),
    (runs_of_speeds((100,), (150,)), ("fast is the fastest", "has only one run"), "faster than every run"),
    (runs_of_rates(False), ("optim.lr=0.1 has the lowest validation loss: 1.0500 nats per token",), "objective"),
    (runs_of_rates(True), ("optim.lr=0.1 has the lowest validation loss: 1.0500 objective per pair",), "nats"),
], ids=["faster", "overlapping", "slower", "one run", "another option", "pairs"])
def test_the_first_lines_say_which_run_is_best_and_how_certain_that_is(runs: list[Run], expected_text: tuple[str, ...],
                                                                       absent_text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page.render(tmp_path, compare(runs), []), encoding="utf-8")
    before_the_table = parse_page(page).text.partition("Summary")[0]
    assert all(words in before_the_table for words in expected_text)
    assert absent_text not in before_the_table


@pytest.mark.parametrize(("share", "bits"), [(0.25, ""), (0.005, "1.5")])
def test_a_tokenizer_that_loses_text_is_a_finding(tmp_path: Path, share: float, bits: str) -> None:
    """A val/bpb that was logged at an earlier step, before the run was resumed, is not the value of the last validation."""
    for seed in range(2):
        make_run(tmp_path, "conv1d", seed, [3.0, 2.0])
        path = tmp_path / f"kernel=conv1d,seed={seed}" / "metrics.csv"
        header, *lines = path.read_text().splitlines()
        lines[0] += ",9.0,"
        lines[-1] += f",{bits},{share}"
        path.write_text("\n".join([f"{header},val/bpb,val/lost", *lines]) + "\n")
    report.write(tmp_path)
    run = table(tmp_path)[0]
    assert (run["val_bpb"], run["val_lost"]) == (bits, str(share))
    finding_text, = (finding.text for finding in findings(compare(read(tmp_path))) if "loses" in finding.text)
    assert f"{100 * share:g} %" in finding_text
    assert ("not reported" in finding_text) == (not bits)
    assert f"{100 * share:g} %" in parse_page(tmp_path / "report.html").text


def test_a_report_that_cannot_be_made_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without runs, an unknown reference and a damaged list of runs are errors."""
    def error_of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            report_tool.main([str(tmp_path), *arguments])
        error = capsys.readouterr().err
        assert (stop.value.code, error.startswith("error: ")) == (2, True)
        return error

    assert "no run in" in error_of()
    make_run(tmp_path, "conv1d", 0, [3.0])
    assert "conv1d; got 'fft'" in error_of("--reference", "fft")
    (tmp_path / "sweep.json").write_text('{"runs": [{"name": 3}]}')
    assert "sweep.json" in error_of()


HOSTILE = '<script>alert("1")</script> & \' </svg> ]]>'


def test_names_that_users_choose_are_escaped(tmp_path: Path) -> None:
    run = Run(HOSTILE, HOSTILE, 0, "failed", HOSTILE, 1, {"data": {"path": HOSTILE}}, {"train/loss": {1: 2.0, 2: 1.0}},
              {"machine": {"cpu": HOSTILE}, "steps": [{"step": 1, "ms": 3.0, "forward_ms": 1.0, "backward_ms": 1.0}]},
              [{"step": 1, "prompt": HOSTILE, "text": HOSTILE}])
    for runs in ([run], [run, Run("b", "b", 0, metrics={"train/loss": {1: 2.5}})]):
        comparison = compare(runs)
        path = tmp_path / "page.html"
        path.write_text(report_page.render(tmp_path, comparison, findings(comparison)), encoding="utf-8")
        page = parse_page(path)
        assert HOSTILE in page.text
        assert "script" not in page.tags


class Page(HTMLParser):
    """Checks that tags are closed in order and that nothing is loaded or executed; collects text, headers and figures."""

    VOID = ("meta", "br", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.headers: list[str] = []
        self.text, self.figures = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {name for name, _ in attrs if name in ("src", "href") or name.startswith("on")}
        self.figures += ("class", "figure") in attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "th":
            self.headers.append(data)
        self.text += data


def parse_page(path: Path) -> Page:
    content, page = path.read_text(encoding="utf-8"), Page()
    page.feed(content)
    page.close()
    assert not page.open
    assert "://" not in content.replace(HOSTILE, "")
    for figure in content.split("<svg")[1:]:
        ElementTree.fromstring(f"<svg{figure.partition('</svg>')[0]}</svg>")
    return page
