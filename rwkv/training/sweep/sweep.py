"""Runs a sweep, such as `python train.py -m kernel=conv1d,taichi_v3 seed=0,1`.

Each run has a separate process, and sweep.jobs processes run at a time. A sweep writes these files:

    DIR/sweep.json            all runs with their status; rewritten after each run
    DIR/NAME/                 the directory of a run, named by the options in which the runs differ: kernel=conv1d,seed=0
    DIR/logs/NAME.txt         the standard error of the run
    DIR/logs/NAME.reason.txt  the error that ended the run, if one did (child.py)
    DIR/logs/JOB/             submitit's files, with sweep.launcher=submitit
    DIR/report.html           the report on all runs, and report.csv (rwkv/report/)

The order is shuffled with ORDER_SEED, so that a slow hour of the machine does not affect only one kernel. If a kernel cannot
run here or a run fails, the other runs are trained regardless, and the report names the kernel or the run. Ctrl-C is passed on
to the current runs, which save and stop. The command `python train.py -m resume=auto out_dir=DIR` keeps finished runs and
resumes all other runs from the last checkpoints. Further options on this command line add runs. launchers.py starts the
processes.
"""

import json
import random
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote

from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv import cli, report
from rwkv.checkpoint.location import follow
from rwkv.config import LATEST, SweepConfig, TrainConfig, missing_requirement, require_effect
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file
from rwkv.io.cache import sha256
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of, labelled_line
from rwkv.io.signals import STOPPING, StopRequest, describe_exit
from rwkv.report import run_files
from rwkv.training.run.directory import new_folder, require_unused, run_folder, sampling_command
from rwkv.training.run.lock import RunLock
from rwkv.training.run.options import check_new_run
from rwkv.training.sweep import child
from rwkv.training.sweep.launchers import End, JobRejected, Launcher, Processes, Task, launcher_for

CHILD = Path(child.__file__)       # the program that trains one run
LOGS = "logs"
ORDER_SEED = 0
FINISHED = "finished"
FAILED = "failed"
UNAVAILABLE = "unavailable"
STOPPED = "stopped"
WAITING = "waiting"
SWEEP_OPTIONS = ("out_dir", "resume")    # the sweep has these options, and each run has values of its own
SETTINGS = "sweep."                      # options with this prefix belong to the sweep and are not passed to runs
SOME_FAILED = 1                          # the exit status of a sweep with failed runs
LONGEST = 240                            # bytes of a run's name; file systems allow 255, with the endings of the log files
NONE_RAN = 2                             # the exit status of a sweep of which no run finished or failed


@dataclass
class Entry:
    """A run of a sweep, as stored in sweep.json.

    Args:
        swept: the run's values of the options in which the runs differ.
        order: the run's position in the shuffled order, counted from 1.
        job: the id of the run's submitit job.
    """

    name: str
    swept: dict[str, str]
    arguments: list[str]
    kernel: str
    seed: int
    order: int = 0
    status: str = WAITING
    reason: str | None = None
    seconds: float | None = None
    job: str | None = None


@dataclass
class Sweep:
    """A sweep with the entries of sweep.json and the configuration of each run.

    Args:
        settings: the options sweep.*, by which this process starts runs.
        setting_overrides: the same options as typed on the command line.
        entries: the entries in the order of the command line.
        configs: the configurations by the names of the runs.
    """

    folder: Path
    settings: SweepConfig = field(default_factory=SweepConfig)
    setting_overrides: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    configs: dict[str, TrainConfig] = field(default_factory=dict)

    def save(self) -> None:
        content = {"order_seed": ORDER_SEED, "runs": [asdict(entry) for entry in self.entries]}
        write_file(self.folder / run_files.SWEEP, lambda file: file.write(json.dumps(content, indent=1).encode()))

    def count(self, status: str) -> int:
        return sum(entry.status == status for entry in self.entries)


def run(line: cli.CommandLine, jobs_of: cli.Jobs) -> None:
    """Trains all unfinished runs, writes the report and exits.

    The exit status is 0, or 1 if a run failed, or 2 if no kernel can run here, or 130 after Ctrl-C.
    """
    sweep = open_sweep(line, jobs_of)
    launcher = open_launcher(sweep)
    lock = RunLock()
    sweep.folder.mkdir(parents=True, exist_ok=True)
    lock.hold(sweep.folder)
    if line.verbatim.get("resume", "null") == "null":
        require_unused(sweep.folder)     # another process may have used the folder before the lock
    sweep.save()
    try:
        stopped = train_all(sweep, launcher)
    finally:
        lock.release()
    conclude(sweep)
    sys.exit(status_of(sweep, stopped))


def train_all(sweep: Sweep, launcher: Launcher) -> bool:
    """Trains the unfinished runs, launcher.places at a time. Returns True if a signal stopped the training."""
    to_do = _to_do(sweep)
    log(labelled_line("sweep", f"{sweep.folder}: {count_of(len(sweep.entries), 'run')}, {len(to_do)} unfinished, in random "
                      f"order (seed {ORDER_SEED}){_concurrency(launcher)}", sys.stderr))
    waiting = deque(enumerate(to_do, start=1))
    running: dict[str, tuple[Entry, float]] = {}         # maps names to current runs and start times
    with StopRequest(on_signal=launcher.stop, every_signal=True) as stop:
        try:
            while running or (waiting and not stop.requested):
                while waiting and len(running) < launcher.places and not stop.requested:
                    number, entry = waiting.popleft()
                    log(f"\n[{number}/{len(to_do)}] {entry.name}")
                    if _is_available(sweep, entry):
                        running[entry.name] = (entry, time.monotonic())
                        try:
                            entry.job = launcher.start(_task(sweep, entry, number), entry.job)
                        except JobRejected as error:     # the user may already have as many jobs as allowed
                            del running[entry.name]
                            if not running:
                                raise
                            log(f"{error}\nfrom now on the sweep runs at most {count_of(len(running), 'job')} at a time")
                            launcher.places = len(running)
                            waiting.appendleft((number, entry))
                            break
                        if entry.job is not None:
                            log(f"job {entry.job}")
                    sweep.save()
                    if stop.requested:   # the signal may have come before the launcher had this run
                        launcher.stop(signal.SIGINT)
                for end in launcher.ends() if running else ():
                    entry, start = running.pop(end.name)
                    entry.seconds = time.monotonic() - start
                    _store_result(sweep, entry, end, stop.requested)
                    sweep.save()
                    if entry.status == STOPPED:
                        waiting.clear()
        finally:
            if running:                  # the sweep has failed, for example because the disk is full
                launcher.close()
    return stop.requested


def _to_do(sweep: Sweep) -> list[Entry]:
    return sorted((entry for entry in sweep.entries if entry.status != FINISHED), key=lambda entry: entry.order)


def _concurrency(launcher: Launcher) -> str:
    if launcher.places == 1:
        return ""
    threads = f" with {count_of(launcher.threads, 'thread')} each" if isinstance(launcher, Processes) else ""
    return f", {launcher.places} at a time{threads}"


def open_launcher(sweep: Sweep) -> Launcher:
    """Returns the launcher that the settings name. Raises UserError if settings conflict with the runs or this machine."""
    to_do = [sweep.configs[entry.name] for entry in _to_do(sweep)]
    gpus = 0
    if sweep.settings.launcher == "local" and (sweep.settings.jobs or 1) > 1:
        import torch

        from rwkv.training.device import device_for

        on_gpu = [config for config in to_do if device_for(config.trainer.accelerator).type == "cuda"]
        gpus = torch.cuda.device_count() if on_gpu else 0
        if any(config.trainer.strategy != "single" for config in on_gpu):
            raise UserError("sweep.jobs= conflicts with trainer=ddp and trainer=fsdp, because sweep.jobs= gives each run only "
                            "one GPU: omit sweep.jobs= or trainer=")
    return launcher_for(sweep.settings, len(to_do), sweep.folder / LOGS, gpus)


def open_sweep(line: cli.CommandLine, jobs_of: cli.Jobs) -> Sweep:
    """Returns a new sweep, or the sweep that `resume` continues together with the runs that the command line adds."""
    options = {key: value for key, value in line.verbatim.items() if key in SWEEP_OPTIONS}
    texts: JsonObject = {key: None if value == "null" else value for key, value in options.items()}
    sweep_options = TrainConfig(**texts)         # refuses empty values
    rest = cli.CommandLine(line.overrides, {key: value for key, value in line.verbatim.items() if key not in options}, [])
    new_jobs = jobs_of(rest)
    settings, setting_overrides = _settings(new_jobs, rest)
    adds_runs = any(not key.startswith(SETTINGS) for key in rest.keys)
    folder = run_folder(sweep_options.out_dir) if sweep_options.out_dir else new_folder("sweep_")
    entries: list[Entry] = []
    if sweep_options.resume is None:
        require_unused(folder)
    elif sweep_options.resume != "auto" or sweep_options.out_dir is None:
        raise UserError("resuming a sweep requires resume=auto out_dir=DIR, where DIR is the sweep's directory")
    else:
        entries = read_entries(folder)
        if not entries and not adds_runs:
            raise UserError(f"out_dir={folder} must be the directory of a sweep, but contains no {run_files.SWEEP}")
        if not entries:
            require_unused(folder)
    configs = {entry.name: _config_of(entry, jobs_of) for entry in entries}
    sweep = Sweep(folder, settings, setting_overrides, entries, configs)
    if adds_runs or not entries:
        _add_runs(sweep, new_jobs, jobs_of)
    return sweep


def _config_of(entry: Entry, jobs_of: cli.Jobs) -> TrainConfig:
    """Returns the configuration of a run in sweep.json. Raises UserError if a recipe now has further values to sweep."""
    jobs = jobs_of(cli.split(entry.arguments, TrainConfig))
    if len(jobs) > 1:
        raise UserError(f"the run {entry.name} has become {len(jobs)} runs, because a recipe now has several values of "
                        f"{', '.join(jobs[0].swept)}: restore the recipe, or start another sweep with another out_dir=")
    config: TrainConfig = jobs[0].config
    return config


def _settings(jobs: list[cli.Job], line: cli.CommandLine) -> tuple[SweepConfig, list[str]]:
    """Returns the options sweep.*, both parsed and as typed. Raises UserError if such an option has several values."""
    for key in (key for job in jobs for key in job.swept if key.startswith(SETTINGS)):
        raise UserError(f"{key}= must have a single value, because this option applies to the whole sweep, not to one run")
    require_effect(jobs[0].config, [key for key in line.keys if key.startswith(SETTINGS)])
    arguments = [f"sweep.arguments={value}" for value in line.verbatim.get("sweep.arguments", [])]
    return jobs[0].config.sweep, [text for text in line.overrides if text.startswith(SETTINGS)] + arguments


def read_entries(folder: Path) -> list[Entry]:
    """Reads the entries of DIR/sweep.json, or returns [] without the file. Raises UserError if the file is damaged.

    A run that finished after the file was written gets the status FINISHED.
    """
    if not (folder / run_files.SWEEP).is_file():
        return []
    path = folder / run_files.SWEEP
    try:
        entries = [Entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8-sig"))["runs"]]
        sound = all(isinstance(entry.name, str) and isinstance(entry.swept, dict) and isinstance(entry.arguments, list)
                    and isinstance(entry.order, int) for entry in entries)
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise UserError(f"{path} is damaged, or is from another version of timemix: restore the file, or start the sweep in "
                        "another out_dir=")
    for entry in entries:
        if entry.status == FINISHED or run_files.is_finished(folder / entry.name):
            entry.status = FINISHED
            entry.reason = None
    return entries


def _advice_on_commas(verbatim: Mapping[str, object], error: str) -> str:
    """Returns advice on sweeping over texts and paths, which are taken verbatim, if `error` quotes one with a comma, or ""."""
    for key, text in verbatim.items():
        if isinstance(text, str) and "," in text and text in error and not Path(text).exists():
            return (f". A comma in {key} does not separate values: to sweep {key}, write a recipe for each value and use "
                    "experiment=A.yaml,B.yaml")
    return ""


def _add_runs(sweep: Sweep, jobs: list[cli.Job], jobs_of: cli.Jobs) -> None:
    """Adds new runs to the sweep. Raises UserError if the sweep has a run of the same name with different options."""
    entries = {entry.name: entry for entry in sweep.entries}
    added = []
    without_effect = _without_effect(jobs)
    used = {key for job, unused in zip(jobs, without_effect, strict=True) for key in _keys(job.arguments) if key not in unused}
    for job, unused in zip(jobs, without_effect, strict=True):
        if job.config.only_plans:
            raise UserError("plan=true conflicts with -m, because a sweep always trains: omit -m to plan a single run, or omit "
                            "plan=true to train")
        of_other_runs = (unused & used) - job.swept.keys()
        arguments = [argument for argument, key in zip(job.arguments, _keys(job.arguments), strict=True)
                     if not key.startswith(SETTINGS) and key not in of_other_runs]
        entry = Entry(name_of(job), job.swept, arguments, job.config.kernel.name, job.config.seed)
        if entry.name not in entries:
            line = cli.split(arguments, TrainConfig)
            try:
                check_new_run(job.config, line.keys)
            except UserError as error:
                raise UserError(f"{entry.name}: {error}{_advice_on_commas(line.verbatim, str(error))}") from None
            entries[entry.name] = entry
            added.append(entry)
            sweep.configs[entry.name] = _config_of(entry, jobs_of) if of_other_runs else job.config
        elif sorted(entries[entry.name].arguments) != sorted(entry.arguments):
            raise UserError(f"the sweep in {sweep.folder} already has a run named {entry.name} with different options: use the "
                            "same options, or another out_dir=")
    _require_possible([sweep.configs[entry.name] for entry in added])
    shuffled = random.Random(ORDER_SEED).sample(added, len(added))
    for order, entry in enumerate(shuffled, start=len(sweep.entries) + 1):
        entry.order = order
    sweep.entries += added


def _without_effect(jobs: list[cli.Job]) -> list[set[str]]:
    """Returns, for each job, the options on the command line that have no effect in this job."""
    unused = [{key for key in _keys(job.arguments) if missing_requirement(job.config, key)} for job in jobs]
    if len({job.config.model.generation for job in jobs}) > 1:
        _announce_loading()
        from rwkv.model.base import foreign_options

        for job, keys in zip(jobs, unused, strict=True):
            keys.update(foreign_options(job.config.model, job.config.optim))
    return unused


def _announce_loading() -> None:
    if "torch" not in sys.modules:
        log("loading    PyTorch, then the kernels of all runs")


def _keys(arguments: list[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in arguments]


def _require_possible(configs: list[TrainConfig]) -> None:
    """Raises UserError or UnknownKernel if a run has a kernel or an option of a different model generation.

    This function accepts kernels that this machine cannot run. The start of the run reports such a kernel.
    """
    if not configs:
        return
    _announce_loading()
    from rwkv.model.base import require_own_options

    for config in configs:
        if config.init_from is None:
            require_own_options(config.model, config.optim)
        with suppress(KernelUnavailable):
            _require_kernel(config)


def _require_kernel(config: TrainConfig) -> None:
    """Checks a run's kernel. Raises the errors of kernel_for, and with init_from= the errors of read_checkpoint."""
    from rwkv.checkpoint.files import read_checkpoint
    from rwkv.training.device import device_for
    from rwkv.training.run.resolve import Context, Stage, resolve
    from rwkv.training.setup import kernel_for

    if config.init_from is not None:
        config = replace(config, model=read_checkpoint(config.init_from).config)     # the file determines the generation
    config, _ = resolve(config, Stage.BASE, Context())
    kernel_for(config.model, config.kernel.name, device_for(config.trainer.accelerator), config.trainer.precision)


def name_of(job: cli.Job) -> str:
    """Returns the name of the run and of the run's directory. Characters other than letters, digits and .,=+- become _.

    The end of a name longer than LONGEST bytes is replaced by a hash of the whole name.
    """
    text = ",".join(f"{key}={value}" for key, value in job.swept.items())
    name = re.sub(r"[^\w.,=+-]", "_", text) or f"kernel={job.config.kernel.name}"
    if len(name.encode()) <= LONGEST:
        return name
    return f"{name.encode()[:LONGEST - 9].decode(errors='ignore')}-{sha256([name])[:8]}"


def _is_available(sweep: Sweep, entry: Entry) -> bool:
    """Returns True if this machine can run the kernel. Otherwise stores the reason in the entry."""
    if sweep.settings.launcher == "submitit":
        return True                      # the machine of the job checks the kernel
    try:
        with suppress(CheckpointError):  # a resumed run does not read init_from=; a new run reports the error
            _require_kernel(sweep.configs[entry.name])
    except (KernelUnavailable, UnknownKernel) as error:
        entry.status = UNAVAILABLE
        entry.reason = getattr(error, "reason", str(error))
        log(f"cannot run here: {error}")
        return False
    return True


def _task(sweep: Sweep, entry: Entry, number: int) -> Task:
    log_file, reason_file = _log_files(sweep, entry)
    log_file.parent.mkdir(exist_ok=True)
    if entry.job is None:
        reason_file.unlink(missing_ok=True)
    program = [sys.executable, str(CHILD), str(reason_file.absolute())]
    return Task(entry.name, program, sweep.folder / entry.name, entry.arguments, log_file, number)


def _log_files(sweep: Sweep, entry: Entry) -> tuple[Path, Path]:
    logs = sweep.folder / LOGS
    return logs / f"{entry.name}.txt", logs / f"{entry.name}.reason.txt"


def _store_result(sweep: Sweep, entry: Entry, end: End, stop_requested: bool) -> None:
    entry.reason = entry.job = None
    if end.status == 0:
        entry.status = FINISHED
    elif stop_requested or end.status in (cli.INTERRUPTED, *(-number for number in STOPPING)):
        entry.status = STOPPED
    else:
        entry.status = FAILED
        entry.reason = end.reason or reason_of(end.status, *reversed(_log_files(sweep, entry)))
        log(f"failed: {entry.name}: {entry.reason}")


def reason_of(status: int, reason_file: Path, log_file: Path) -> str:
    """Returns the reason why a run failed: a signal, or else the error in reason_file, or else the last line of the log."""
    if status < 0:
        return f"ended by {describe_exit(status)}"
    if reason_file.is_file():
        return reason_file.read_text(encoding="utf-8")
    text = log_file.read_text(encoding="utf-8", errors="replace") if log_file.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"


def conclude(sweep: Sweep) -> None:
    """Writes and logs the report of a sweep, and prints the command that continues an unfinished sweep."""
    result = report.write(sweep.folder)
    counts = [f"{sweep.count(status)} {word}" for status, word in (
        (FINISHED, "finished"), (FAILED, "failed"), (UNAVAILABLE, "cannot run here"), (STOPPED, "stopped"), (WAITING, "to do"))
        if sweep.count(status)]
    log("\n" + labelled_line("sweep", ", ".join(counts), sys.stderr))
    for sentence in result.sentences:
        log(labelled_line("", sentence, sys.stderr))
    _log_best(sweep, result.best)
    log(labelled_line("report", str(result.page), sys.stderr))
    if sweep.count(STOPPED) + sweep.count(WAITING) + sweep.count(FAILED):
        options = ["resume=auto", quote(f"out_dir={sweep.folder}"), *map(quote, sweep.setting_overrides)]
        log(f"continue with: {cli.command('train')} -m {' '.join(options)}")
    if sweep.count(FINISHED):
        from rwkv.training.loggers import log_report

        log_report(next(iter(sweep.configs.values())).logger, sweep.folder, *report.table(sweep.folder))


def _log_best(sweep: Sweep, best: tuple[str, float] | None) -> None:
    if best is not None:
        name, loss = best
        more = sampling_command(sweep.folder / name, sweep.configs[name].data.name)
        log(labelled_line("best", f"{name} has the lowest val/loss, {loss:.4f}: {more}", sys.stderr))
    latest = follow(LATEST).resolve()
    if latest.parent == sweep.folder.resolve():
        log(labelled_line("latest", f"{LATEST} is the run trained last, {latest.name}", sys.stderr))


def status_of(sweep: Sweep, stopped: bool) -> int:
    if stopped or sweep.count(STOPPED):
        return cli.INTERRUPTED
    if sweep.count(FAILED):
        return SOME_FAILED
    return 0 if sweep.count(FINISHED) else NONE_RAN


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
