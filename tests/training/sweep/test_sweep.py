"""Tests sweeps that train runs at the same time: kills, stops, continuations, and bits equal to those of sequential runs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import KILLED, OF_PROBE, SMALL, assert_same_training, done_here, finish, start, steps_done

from rwkv import cli
from rwkv.config import DataConfig, SweepConfig, TrainConfig
from rwkv.errors import UserError
from rwkv.report import table
from rwkv.training.sweep import sweep
from rwkv.training.sweep.launchers import End, JobRejected, Launcher, Processes, Task, launcher_for

pytestmark = pytest.mark.thorough
SHORT = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=120",
         "trainer.val_every=20", "trainer.checkpoint_every=20")
BEFORE_LAST = ("last-1.ckpt",)           # saved at an interruption after which only the last was due
LOCAL_JOBS = ("sweep.launcher=submitit", "sweep.arguments=cluster=local")
NEEDS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
NEEDS_SUBMITIT = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


def statuses(folder: Path) -> dict[str, str]:
    return {run["name"]: run["status"] for run in json.loads((folder / "sweep.json").read_text())["runs"]}


def processes_of(run: Path) -> list[int]:
    """Returns the processes that train a run: those with the run's directory on their command line."""
    return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/cmdline") if f"out_dir={run}" in words_of(file)]


def words_of(file: Path) -> list[str]:
    try:
        return file.read_bytes().decode().split("\0")
    except OSError:                      # the process has ended
        return []


def wait_until(condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_as_alone(folder: Path, swept: Path, except_for: tuple[str, ...] = ()) -> None:
    """Checks that each run of the sweep is bit-identical to a run of train.py with the same options."""
    for name in statuses(swept):
        alone = folder / f"alone {name}"
        if not alone.exists():
            result = done_here(folder, "train", *SHORT, *name.split(","), "trainer.probe=true", f"out_dir={alone.name}")
            assert result.status == 0, result.error
        assert_same_training(swept / name, alone, OF_PROBE, except_for)


@NEEDS_PROC
@pytest.mark.soak
def test_a_run_that_is_killed_is_named_and_continued_and_the_others_finish(folder: Path) -> None:
    swept = folder / "killed"
    process = start(folder, "train", "-m", "seed=0,1", *SHORT, "sweep.jobs=2", f"out_dir={swept}")
    victim = swept / "seed=0"
    wait_until(lambda: steps_done(victim) > 30 or process.poll() is not None)
    at_once = len(processes_of(swept / "seed=1"))
    for number in processes_of(victim):
        subprocess.run(["kill", "-9", str(number)], check=True)
    first = finish(process)
    assert first.status == 1, first.error
    assert at_once == 1
    assert statuses(swept) == {"seed=0": "failed", "seed=1": "finished"}
    assert "failed: seed=0: ended by SIGKILL" in first.error
    assert f"out_dir={swept} sweep.jobs=2" in first.error.replace("'", ""), "the error must say how to continue"
    again = finish(start(folder, "train", "-m", "resume=auto", f"out_dir={swept}", "sweep.jobs=2"))
    assert again.status == 0, again.error
    assert set(statuses(swept).values()) == {"finished"}
    assert_as_alone(folder, swept)


@NEEDS_PROC
@pytest.mark.soak
def test_four_runs_two_at_a_time_equal_sequential_runs(folder: Path) -> None:
    """Ctrl-C or a kill of the sweep ends all processes. The sweep continues after each of these ends."""
    options = ("-m", "seed=0,1", "optim.lr=1e-3,3e-3", *SHORT)
    one, two = folder / "one", folder / "two"
    assert finish(start(folder, "train", *options, f"out_dir={one}")).status == 0
    runs = [two / name for name in statuses(one)]

    process = start(folder, "train", *options, "sweep.jobs=2", f"out_dir={two}", apart=True)
    wait_until(lambda: sum(steps_done(run) > 20 for run in runs) == 2 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.status == 130, stopped.error
    assert not [number for run in runs for number in processes_of(run)]
    assert sorted(statuses(two).values()) == ["stopped", "stopped", "waiting", "waiting"]

    continuation = ("-m", "resume=auto", f"out_dir={two}", "sweep.jobs=2")
    process = start(folder, "train", *continuation, apart=True)
    wait_until(lambda: sum(steps_done(run) > 60 for run in runs) == 2 or process.poll() is not None)
    process.kill()
    assert finish(process).status == KILLED
    wait_until(lambda: not [number for run in runs for number in processes_of(run)])
    last = finish(start(folder, "train", *continuation))
    assert last.status == 0, last.error
    assert_as_alone(folder, two, BEFORE_LAST)
    for name in statuses(one):
        assert_same_training(one / name, two / name, OF_PROBE, BEFORE_LAST)
    of_one, of_two = ([(row["kernel"], row["val_loss"]) for row in table(swept)[0]] for swept in (one, two))
    assert of_one == of_two, "the reports must have the same rows"


@NEEDS_SUBMITIT
@pytest.mark.soak
def test_jobs_of_submitit_train_the_same_runs(folder: Path) -> None:
    """Jobs go on when the sweep is killed, and the continued sweep finds the jobs again."""
    swept = folder / "jobs"
    continuation = (*LOCAL_JOBS, f"out_dir={swept}")
    runs = [swept / "seed=0", swept / "seed=1"]

    def jobs() -> list[str]:
        return [run["job"] for run in json.loads((swept / "sweep.json").read_text())["runs"]]

    process = start(folder, "train", "-m", "seed=0,1", *SHORT, *continuation)
    wait_until(lambda: all(steps_done(run) > 10 for run in runs) or process.poll() is not None)
    process.kill()
    process.wait()                       # finish() would also wait for the jobs, which hold the pipes
    first = jobs()
    assert all(first)
    result = finish(start(folder, "train", "-m", "resume=auto", *continuation))
    assert (finish(process).status, result.status) == (KILLED, 0), result.error
    submitted = {path.name.partition("_")[0] for path in swept.rglob("*_submitted.pkl")}
    assert submitted == {*first}, "no job may start a second time"
    assert_as_alone(folder, swept)


@NEEDS_PROC
@NEEDS_SUBMITIT
@pytest.mark.soak
def test_a_stopped_sweep_cancels_its_jobs(folder: Path) -> None:
    swept = folder / "cancelled"
    runs = [swept / "seed=0", swept / "seed=1"]
    process = start(folder, "train", "-m", "seed=0,1", *SHORT, "trainer.max_steps=3000", *LOCAL_JOBS, f"out_dir={swept}")
    wait_until(lambda: all(steps_done(run) > 10 for run in runs) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.status == 130, result.error
    wait_until(lambda: not [number for run in runs for number in processes_of(run)], 60)
    assert set(statuses(swept).values()) == {"stopped"}
    assert all((run / "checkpoints" / "last.ckpt").exists() for run in runs), "each run must save a checkpoint"


# Launchers, with programs that take no time


def ends_of(launcher: Launcher, count: int) -> list[End]:
    ends: list[End] = []
    wait_until(lambda: ends.extend(launcher.ends()) or len(ends) == count, 60)
    return sorted(ends, key=lambda end: end.name)


def task(folder: Path, name: str, program: str) -> Task:
    return Task(name, [sys.executable, "-c", program], folder / name, [], folder / f"{name}.txt", number=int(name))


def test_runs_share_the_threads_and_each_has_a_gpu(tmp_path: Path) -> None:
    """A later run gets the GPU of a run that has ended."""
    launcher = Processes(2, threads=5, gpus=2)
    show = "import sys; print(sys.argv[1], file=sys.stderr)"
    for name in ("0", "1"):
        launcher.start(task(tmp_path, name, show), None)
    assert ends_of(launcher, 2) == [End("0", 0), End("1", 0)]
    launcher.start(task(tmp_path, "2", show), None)
    ends_of(launcher, 1)
    shares = [(tmp_path / f"{name}.txt").read_text().strip() for name in range(3)]
    assert shares[:2] == ["--share=2,0", "--share=2,1"]
    assert shares[2] in shares[:2]


def test_a_run_may_write_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    launcher = Processes(2, threads=2, gpus=0)
    write = "import sys\nfor stream in (sys.stdout, sys.stderr): stream.buffer.write(b'caf\\xe9\\n')"
    launcher.start(task(tmp_path, "0", write), None)
    assert ends_of(launcher, 1) == [End("0", 0)]
    assert (tmp_path / "0.txt").read_text(encoding="utf-8") == "caf\ufffd\n"


@pytest.mark.parametrize(("share", "before", "after"), [
    ("3,", {}, "3 None"), ("3,", {"OMP_NUM_THREADS": "7"}, "7 None"), (",1", {}, "None 1"),
    ("2,1", {"CUDA_VISIBLE_DEVICES": "5, 6,7"}, "2 6")])
def test_a_process_takes_its_share(share: str, before: dict[str, str], after: str, tmp_path: Path) -> None:
    child = tmp_path / "rwkv" / "training" / "sweep" / "child.py"
    child.parent.mkdir(parents=True)
    child.write_text(sweep.CHILD.read_text())
    root = Path(__file__).parents[3]
    (tmp_path / "kernels" / "machine").mkdir(parents=True)
    (tmp_path / "kernels" / "machine" / "shares.py").write_text((root / "kernels" / "machine" / "shares.py").read_text())
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ.get('OMP_NUM_THREADS'), "
                                       "os.environ.get('CUDA_VISIBLE_DEVICES'), *sys.argv[1:])\n")
    result = subprocess.run([sys.executable, child, tmp_path / "reason", f"--share={share}", "seed=3"], env=before, check=True,
                            capture_output=True, text=True)
    assert result.stdout == f"{after} seed=3\n"


def test_lines_of_runs_have_their_number_and_samples_stay_whole(tmp_path: Path) -> None:
    """Two runs write parts of lines at the same time, to standard error and to standard output."""
    half = ("import sys, time\nfor n in range(20):\n"
            "  for s in (sys.stdout, sys.stderr): print(NAME, file=s, end='', flush=True)\n"
            "  time.sleep(0.001)\n  print(file=sys.stderr, flush=True)")
    program = ("import pathlib, sys\nfrom rwkv.training.sweep.launchers import Processes, Task\nlauncher = Processes(2, 2, 0)\n"
               f"for name in '12':\n  launcher.start(Task(name, [sys.executable, '-c', {half!r}.replace('NAME', name)],\n"
               f"    pathlib.Path('x'), [], pathlib.Path({str(tmp_path)!r}, name), int(name)), None)\n"
               "ends = 0\nwhile ends < 2: ends += len(launcher.ends())")
    root = sweep.CHILD.parents[3]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert sorted(result.stdout.split()) == ["1" * 20, "2" * 20]
    assert sorted(result.stderr.splitlines()) == ["[1] 1"] * 20 + ["[2] 2"] * 20
    assert (tmp_path / "1").read_text() == "1\n" * 20


@pytest.mark.parametrize("end", ["the sweep is killed", "the sweep has an error"])
def test_runs_end_with_their_sweep(tmp_path: Path, end: str) -> None:
    """A killed sweep sends the run no signal, but the pipe to the run ends."""
    root = sweep.CHILD.parents[3]
    child_code = (f"import os, pathlib, signal, sys, time\nsys.path[0] = {str(root)!r}\nfrom rwkv.training.sweep import child\n"
                  f"def stop(*_): pathlib.Path({str(tmp_path / 'saved')!r}).touch(); sys.exit(130)\n"
                  "signal.signal(signal.SIGTERM, stop)\nchild.stop_with_parent()\n"
                  f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(60)")
    program = ("import pathlib, sys, time\nfrom rwkv.training.sweep.launchers import Processes, Task\n"
               "launcher = Processes(1, 1, 0)\n"
               f"folder = pathlib.Path({str(tmp_path)!r})\n"
               f"launcher.start(Task('run', [sys.executable, '-c', {child_code!r}], folder, [], folder / 'log'), None)\n"
               "while not (folder / 'begun').exists(): time.sleep(0.01)\n"
               + ("time.sleep(60)" if "killed" in end else "launcher.close()"))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    wait_until((tmp_path / "begun").exists, 60)
    if "killed" in end:
        process.kill()
    process.wait(60)
    wait_until((tmp_path / "saved").exists, 60)


# Mistakes


def make_sweep(*arguments: str) -> sweep.Sweep:
    line = cli.split(["-m", *arguments], TrainConfig)
    return sweep.open_sweep(line, lambda line: cli.jobs(line, TrainConfig, "train"))


@pytest.mark.parametrize(("arguments", "words"), [
    (("sweep.jobs=0",), ("sweep.jobs", "at least 1")), (("sweep.jobs=1,2",), ("sweep.jobs", "single value")),
    (("sweep.launcher=joblib",), ("sweep.launcher", "local, submitit")),
    (("sweep.arguments=timeout_min=3",), ("sweep.arguments", "sweep.launcher=submitit")),
    (("hydra/launcher=joblib",), ("hydra/launcher", "sweep.jobs")), (("out_dir=",), ("out_dir is empty",)),
    (("optim.lr=interval(0,1)",), ("optim.lr=interval(0,1)", "A,B")),
    (("seed=range(2,1)",), ("seed=range(2,1)", "no values")),
    (("optim.lr=1e-3,2e-3", "optim.lr=5e-3"), ("optim.lr=", "2 times"))])
def test_mistakes_are_reported_in_one_sentence(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError) as error:
        sweep.open_launcher(make_sweep("seed=0,1", *SMALL, "kernel=conv1d", "logger=csv", *arguments))
    assert all(word in str(error.value) for word in words)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("key", ["data.path", "init_from"])
def test_an_error_about_several_paths_says_how_to_sweep_over_paths(key: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may contain commas, so the commas of a path do not separate values."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a,b.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(UserError) as error:
        make_sweep("seed=0,1", "data=text", f"{key}=a.txt,b.txt", *(["data.path=a.txt"] if key == "init_from" else []))
    assert all(word in str(error.value) for word in (key, "experiment=A.yaml,B.yaml"))
    assert len(make_sweep("seed=0,1", "data=text", "data.path=a,b.txt").entries) == 2


def test_the_best_run_of_a_sweep_is_sampled_with_the_program_for_its_data(tmp_path: Path,
                                                                          capsys: pytest.CaptureFixture[str]) -> None:
    configs = {name: TrainConfig(data=DataConfig(name=name)) for name in ("chat", "text")}
    swept = sweep.Sweep(tmp_path, configs=configs)
    commands = {}
    for name in configs:
        sweep._log_best(swept, (name, 1.0))
        commands[name] = capsys.readouterr().err
    assert "chat.py" in commands["chat"]
    assert "generate.py" in commands["text"]


def test_an_option_that_only_some_runs_use_applies_to_these_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option whose values are swept must have an effect in every run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    options = ("optim=adamw,muon", *SMALL, "kernel=conv1d", "logger=csv")
    swept = make_sweep(*options, "optim.matrix_lr=0.1")
    assert {entry.name: "optim.matrix_lr=0.1" in entry.arguments for entry in swept.entries} == {
        "optim=adamw": False, "optim=muon": True}
    with pytest.raises(UserError, match=r"optim\.matrix_lr requires optim=muon"):
        make_sweep(*options, "optim.matrix_lr=0.1,0.2")
    with pytest.raises(UserError, match=r"tune\.rank requires tune=lora"):
        make_sweep(*options, "tune.rank=4")


def test_an_option_of_one_generation_applies_to_the_runs_of_this_generation(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    options = ("data=text", "data.path=text.txt", "logger=csv")
    swept = make_sweep("model=tiny,rwkv7_tiny", *options, "model.head_size=32", "optim.time_first_lr_scale=2")
    assert {entry.name: {argument.partition("=")[0] for argument in entry.arguments} & {
        "model.head_size", "optim.time_first_lr_scale"} for entry in swept.entries} == {
            "model=tiny": {"optim.time_first_lr_scale"}, "model=rwkv7_tiny": {"model.head_size"}}
    assert swept.configs["model=rwkv7_tiny"].model.head_size == 32
    with pytest.raises(UserError, match=r"model\.n_att is an option of rwkv4"):
        make_sweep("model=rwkv7_tiny,rwkv7_small", *options, "model.n_att=32")
    with pytest.raises(UserError, match=r"model\.head_size is an option of rwkv7"):
        make_sweep("model=tiny,rwkv7_tiny", *options, "model.head_size=32,64")


def test_a_recipe_that_has_more_values_than_when_the_sweep_began_is_named(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("hydra: {sweeper: {params: {seed: '0,1'}}}")
    first = make_sweep(f"experiment={recipe}", *SMALL, "kernel=conv1d", "logger=csv", f"out_dir={tmp_path / 'swept'}")
    first.folder.mkdir()
    first.save()
    assert {*make_sweep("resume=auto", f"out_dir={first.folder}").configs} == {"seed=0", "seed=1"}
    recipe.write_text("hydra: {sweeper: {params: {seed: '0,1', optim.lr: '1e-3,2e-3'}}}")
    with pytest.raises(UserError, match=r"seed=0 .*optim\.lr"):
        make_sweep("resume=auto", f"out_dir={first.folder}")


def test_a_long_name_is_shortened_for_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    folder = Path("a folder with a long name " * 9)
    folder.mkdir()
    for name in ("one.yaml", "two.yaml"):
        (folder / name).write_text("seed: 3")
    swept = make_sweep(f"experiment={folder}/one.yaml,{folder}/two.yaml", *SMALL, "kernel=conv1d", "logger=csv")
    names = {entry.name for entry in swept.entries}
    assert len(names) == 2
    for name in names:
        (tmp_path / f"{name}.reason.txt").touch()


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"runs": 3}', '{"runs": [{"name": "a"}]}', '{"runs": [{"w": 3}]}'])
def test_a_damaged_list_of_runs_is_named(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "sweep.json").write_text(damaged)
    with pytest.raises(UserError, match=r"sweep\.json is damaged"):
        make_sweep("resume=auto", f"out_dir={tmp_path}")
    assert (tmp_path / "sweep.json").read_text() == damaged


def test_more_runs_at_a_time_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"sweep\.jobs must be at most 2"):
        Processes(3, threads=8, gpus=2)


@NEEDS_SUBMITIT
@pytest.mark.parametrize(("argument", "words"), [
    ("cluster=moon", ("moon", "slurm, local")), ("nonsense=1", ("nonsense",)), ("timeout_min=soon", ("timeout_min", "soon")),
    ("timeout_min", ("NAME=VALUE",)), ("timeout_min=[", ("NAME=VALUE",))])
def test_mistakes_in_submitit_s_arguments_are_reported_in_one_sentence(argument: str, words: tuple[str, ...],
                                                                       tmp_path: Path) -> None:
    arguments = ["cluster=local"] * ("cluster" not in argument) + [argument]
    with pytest.raises(UserError) as error:
        launcher_for(SweepConfig(launcher="submitit", arguments=arguments), 2, tmp_path / "logs", 0)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@NEEDS_SUBMITIT
def test_a_job_that_slurm_rejects_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("srun", "exit 0"), ("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = launcher_for(SweepConfig(launcher="submitit", arguments=["slurm_partition=gpu"]), 2, tmp_path / "logs", 0)
    with pytest.raises(JobRejected, match="invalid partition specified: gpu") as error:
        jobs.start(Task("seed=0", [], tmp_path, [], tmp_path / "log.txt"), None)
    assert "\n" not in str(error.value)


def test_a_limit_of_jobs_limits_the_runs_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher imitates a batch system that takes one job at a time. Each run ends immediately."""
    class Limited(Launcher):
        places = 3
        running: str | None = None

        def start(self, task: Task, earlier_job: str | None) -> str | None:
            if self.running:
                raise JobRejected("no more jobs")
            self.running = task.name
            return None

        def ends(self) -> list[End]:
            name, self.running = self.running, None
            return [End(str(name), 0)]

        def stop(self, number: int) -> None: ...

        def close(self) -> None: ...

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    swept = make_sweep("seed=0,1,2", *SMALL, "kernel=conv1d", "logger=csv")
    swept.folder.mkdir(parents=True)
    assert not sweep.train_all(swept, Limited())
    assert {entry.status for entry in swept.entries} == {"finished"}


def test_a_program_without_m_has_no_options_of_sweeps(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, error = run("train", "sweep.jobs=2")
    assert (status, error.count("\n")) == (2, 1)
    assert "add -m" in error


def test_several_values_of_a_list_reach_every_run() -> None:
    """Options such as logger.arguments may be set several times."""
    line = cli.split(["-m", "seed=0,1", "logger=mlflow", "logger.arguments=a=1", "logger.arguments=b=2"], TrainConfig)
    jobs = cli.jobs(line, TrainConfig, "train")
    assert [cli.split(job.arguments, TrainConfig).verbatim["logger.arguments"] for job in jobs] == [["a=1", "b=2"]] * 2
    assert [job.config.logger.arguments for job in jobs] == [["a=1", "b=2"]] * 2
