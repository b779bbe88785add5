"""A sweep: `python train.py -m kernel=conv1d,taichi_v3 seed=0,1`, each run in a process of its own, one after the other.

    DIR/sweep.json            all runs, with the status of each; rewritten after each run
    DIR/NAME/                 the directory of a run, named by the options in which the runs differ: kernel=conv1d,seed=0
    DIR/logs/NAME.txt         the standard error of the run
    DIR/logs/NAME.reason.txt  the error that ended it, if one did (sweep_child.py)
    DIR/report.html           the report on all runs, and report.csv (rwkv/report/)

The runs are trained in an order shuffled with ORDER_SEED, so that a slow hour of the machine does not hit only one kernel. The
report names kernels that cannot run here and runs that failed; the other runs are trained nevertheless. Ctrl-C is passed on to
the current run, which saves. `python train.py -m resume=auto out_dir=DIR` keeps the finished runs and continues each of the
others from its last checkpoint; more options add runs.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote

from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv import cli, report
from rwkv.checkpoint.location import follow
from rwkv.config import LATEST, TrainConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file
from rwkv.io.lines import broken, counted, labelled
from rwkv.io.signals import STOPPING, StopRequest, end_of
from rwkv.report import reading
from rwkv.training import sweep_child
from rwkv.training.run.directory import CONFIG_FILE, new_folder, require_unused
from rwkv.training.run.lock import RunLock
from rwkv.training.run.options import check_new_run

CHILD = Path(sweep_child.__file__)       # the program that trains one run
LOGS = "logs"
ORDER_SEED = 0
FINISHED = "finished"
FAILED = "failed"
UNAVAILABLE = "unavailable"
STOPPED = "stopped"
WAITING = "waiting"
RESUME = "-m resume=auto"
SWEEP_OPTIONS = ("out_dir", "resume")    # options of the sweep; each run gets its own values
UNSUPPORTED = ("hydra/launcher", "hydra.launcher", "hydra/sweeper")
SOME_FAILED = 1                          # exit statuses
NONE_RAN = 2


@dataclass
class Entry:
    """A run of a sweep. swept: the options in which runs differ. order: its place in the shuffled order, from 1."""

    name: str
    swept: dict[str, str]
    arguments: list[str]
    kernel: str
    seed: int
    order: int = 0
    status: str = WAITING
    reason: str | None = None
    seconds: float | None = None


@dataclass
class Sweep:
    """The content of sweep.json: its entries, in the order of the command line, and each run's configuration by name."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)
    configs: dict[str, TrainConfig] = field(default_factory=dict)

    def save(self) -> None:
        content = {"order_seed": ORDER_SEED, "runs": [asdict(entry) for entry in self.entries]}
        write_file(self.folder / reading.SWEEP, lambda file: file.write(json.dumps(content, indent=1).encode()))

    def count(self, status: str) -> int:
        return sum(entry.status == status for entry in self.entries)


class Stop(StopRequest):
    """`with Stop() as stop:` passes Ctrl-C, SIGTERM and the like on to stop.process, which is in another session."""

    def __init__(self) -> None:
        super().__init__(on_signal=self._pass_on, every_signal=True)
        self.process: subprocess.Popen[str] | None = None

    def watch(self, process: subprocess.Popen[str]) -> None:
        """Passes signals on to `process` from now on, and Ctrl-C at once if a stop was requested before."""
        self.process = process
        if self.requested:
            self._pass_on(signal.SIGINT)

    def _pass_on(self, number: int) -> None:
        if self.process is not None and sys.platform != "win32":     # Windows sends Ctrl-C to all processes of a console
            self.process.send_signal(number)


def run(line: cli.CommandLine, jobs_of: cli.Jobs) -> None:
    """Trains all unfinished runs and writes the report. Exit status: 0, 1 if a run failed, 2 if no kernel can run here, 130
    after Ctrl-C.
    """
    sweep = opened(line, jobs_of)
    lock = RunLock()
    sweep.folder.mkdir(parents=True, exist_ok=True)
    lock.hold(sweep.folder)
    if "resume" not in line.verbatim:
        require_unused(sweep.folder, RESUME)     # again: another process may have used the folder before the lock was held
    sweep.save()
    try:
        stopped = train_all(sweep)
    finally:
        lock.release()
    conclude(sweep)
    sys.exit(status_of(sweep, stopped))


def train_all(sweep: Sweep) -> bool:
    """Trains the unfinished runs one after the other. Returns whether a signal stopped it."""
    to_do = sorted((entry for entry in sweep.entries if entry.status != FINISHED), key=lambda entry: entry.order)
    log(labelled("sweep", f"{sweep.folder}: {counted(len(sweep.entries), 'run')}, {len(to_do)} to do, in an order shuffled "
                 f"with seed {ORDER_SEED}", sys.stderr))
    with Stop() as stop:
        for number, entry in enumerate(to_do, start=1):
            log(f"\n[{number}/{len(to_do)}] {entry.name}")
            train(sweep, entry, stop)
            sweep.save()
            if stop.requested or entry.status == STOPPED:
                break
    return stop.requested


def opened(line: cli.CommandLine, jobs_of: cli.Jobs) -> Sweep:
    """A new sweep, or the one that `resume` continues, with the runs that the command line adds."""
    unsupported = [key for key in line.keys if key.startswith(UNSUPPORTED)]
    if unsupported:
        raise UserError(f"{unsupported[0]} has no effect here: each run of a sweep is a process of its own, one after the "
                        "other; leave it out")
    own = {key: value for key, value in line.verbatim.items() if key in SWEEP_OPTIONS}
    rest = cli.CommandLine(line.overrides, {key: value for key, value in line.verbatim.items() if key not in own}, [])
    folder = Path(str(own.get("out_dir") or new_folder("sweep_")))
    entries: list[Entry] = []
    if "resume" not in own:
        require_unused(folder, RESUME)
    elif own["resume"] != "auto" or "out_dir" not in own:
        raise UserError("a sweep is continued with resume=auto out_dir=DIR, where DIR is the directory of the sweep")
    else:
        entries = read(folder)
        if not entries and not rest.keys:
            raise UserError(f"no sweep to continue in {folder}: it has no {reading.SWEEP}")
        if not entries:
            require_unused(folder, RESUME)
    jobs = [job for entry in entries for job in jobs_of(cli.split(entry.arguments, TrainConfig))]
    sweep = Sweep(folder, entries, {entry.name: job.config for entry, job in zip(entries, jobs, strict=True)})
    if rest.keys or not entries:
        _add(sweep, jobs_of(rest))
    return sweep


def read(folder: Path) -> list[Entry]:
    """The entries of DIR/sweep.json; none without that file. A run may have finished after the file was written."""
    if not (folder / reading.SWEEP).is_file():
        return []
    entries = [Entry(**entry) for entry in json.loads((folder / reading.SWEEP).read_text(encoding="utf-8"))["runs"]]
    for entry in entries:
        if entry.status == FINISHED or reading.is_finished(folder / entry.name):
            entry.status = FINISHED
            entry.reason = None
    return entries


def _add(sweep: Sweep, jobs: list[cli.Job]) -> None:
    """Adds the jobs that the sweep does not have yet. Raises UserError for one that it has with other options."""
    known = {entry.name: entry for entry in sweep.entries}
    added = []
    for job in jobs:
        if job.config.only_plans:
            raise UserError("plan=true trains nothing, and a sweep trains each of its runs: leave out -m to see the plan of "
                            "one run, or plan=true to train")
        entry = Entry(name_of(job), job.swept, job.arguments, job.config.kernel.name, job.config.seed)
        if entry.name not in known:
            try:
                check_new_run(job.config, cli.split(job.arguments, TrainConfig).keys)
            except UserError as error:
                raise UserError(f"{entry.name}: {error}") from None
            known[entry.name] = entry
            added.append(entry)
            sweep.configs[entry.name] = job.config
        elif sorted(known[entry.name].arguments) != sorted(entry.arguments):
            raise UserError(f"the sweep in {sweep.folder} has {entry.name} with other options: give the same options, or "
                            "another out_dir")
    _require_possible([sweep.configs[entry.name] for entry in added])
    shuffled = random.Random(ORDER_SEED).sample(added, len(added))
    for order, entry in enumerate(shuffled, start=len(sweep.entries) + 1):
        entry.order = order
    sweep.entries += added


def _require_possible(configs: list[TrainConfig]) -> None:
    """Raises UserError or UnknownKernel for a run with a kernel or an option of another generation. A kernel that only this
    machine cannot run is accepted; its run's turn reports it.
    """
    if not configs:
        return
    log("loading    PyTorch, then the kernels of all runs")
    from rwkv.training.run.opening import require_own_options

    for config in configs:
        if config.init_from is None:
            require_own_options(config)
        with suppress(KernelUnavailable):
            _require_kernel(config)


def _require_kernel(config: TrainConfig) -> None:
    """Raises the errors of kernel_for and, for the file of init_from, which gives the generation, those of read_checkpoint."""
    from rwkv.checkpoint.files import read_checkpoint
    from rwkv.training.device import device_for, resolved_precision
    from rwkv.training.setup import kernel_for

    if config.init_from is not None:
        config = replace(config, model=read_checkpoint(config.init_from).config)
    precision = resolved_precision(config.trainer.precision, config.trainer.accelerator)
    kernel_for(config.model, config.kernel.name, device_for(config.trainer.accelerator), precision)


def name_of(job: cli.Job) -> str:
    """The name of the run and of its directory; characters other than letters, digits and .,=+- become _."""
    text = ",".join(f"{key}={value}" for key, value in job.swept.items())
    return re.sub(r"[^\w.,=+-]", "_", text) or f"kernel={job.config.kernel.name}"


def train(sweep: Sweep, entry: Entry, stop: Stop) -> None:
    """Trains one run in a process of its own, and stores its status in the entry."""
    config = sweep.configs[entry.name]
    try:
        with suppress(CheckpointError):  # a begun run no longer needs the file; a new run reports the error itself
            _require_kernel(config)
    except (KernelUnavailable, UnknownKernel) as error:
        entry.status = UNAVAILABLE
        entry.reason = getattr(error, "reason", str(error))
        log(f"cannot run here: {error}")
        return
    start = time.monotonic()
    log_file = sweep.folder / LOGS / f"{entry.name}.txt"
    reason_file = sweep.folder / LOGS / f"{entry.name}.reason.txt"
    log_file.parent.mkdir(exist_ok=True)
    reason_file.unlink(missing_ok=True)
    status = run_process([sys.executable, str(CHILD), str(reason_file), *options_of(sweep, entry)], log_file, stop)
    entry.seconds = time.monotonic() - start
    entry.reason = None
    if status == 0:
        entry.status = FINISHED
    elif stop.requested or status in (cli.INTERRUPTED, *(-number for number in STOPPING)):
        entry.status = STOPPED
    else:
        entry.status = FAILED
        entry.reason = reason_of(status, reason_file, log_file)
        log(f"failed: {entry.reason}")


def options_of(sweep: Sweep, entry: Entry) -> list[str]:
    """The command line that trains one run, or continues it if its directory exists."""
    folder = sweep.folder / entry.name
    begun = (folder / CONFIG_FILE).is_file()
    arguments = [argument for argument in entry.arguments if not (begun and argument.startswith("init_from="))]
    given = {argument.partition("=")[0] for argument in arguments}
    ours = {"out_dir": str(folder), "trainer.probe": "true"} | ({"resume": "auto"} if begun else {})
    return [*arguments, *(f"{key}={value}" for key, value in ours.items() if key not in given)]


def run_process(command: list[str], log_file: Path, stop: Stop) -> int:
    """Runs a command in a session of its own and returns its exit status. Its standard error is shown, and kept in log_file.

    So is its standard output where both go to the same place, so that they keep their order.
    """
    both = _one_output()
    with log_file.open("w", encoding="utf-8") as file, subprocess.Popen(
            command, stdout=subprocess.PIPE if both else None, stderr=subprocess.STDOUT if both else subprocess.PIPE,
            encoding="utf-8", errors="replace", start_new_session=True) as process:
        stop.watch(process)
        for line in process.stdout or process.stderr or ():
            print(broken(line.rstrip("\n"), sys.stderr), file=sys.stderr)
            file.write(line)
    stop.process = None
    return process.returncode


def _one_output() -> bool:
    """Whether standard output and standard error go to the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:                      # one of them is closed, or is no file
        return False


def reason_of(status: int, reason_file: Path, log_file: Path) -> str:
    """Why a run failed: the signal that ended it, the error that it wrote to reason_file, or the last line of its log."""
    if status < 0:
        return f"ended by {end_of(status)}"
    if reason_file.is_file():
        return reason_file.read_text(encoding="utf-8")
    lines = [line for line in log_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"


def conclude(sweep: Sweep) -> None:
    """Writes the report, into the directory and to the logger, and prints how to continue an unfinished sweep."""
    written = report.write(sweep.folder)
    counts = [f"{sweep.count(status)} {word}" for status, word in (
        (FINISHED, "finished"), (FAILED, "failed"), (UNAVAILABLE, "cannot run here"), (STOPPED, "stopped"), (WAITING, "to do"))
        if sweep.count(status)]
    log("\n" + labelled("sweep", ", ".join(counts), sys.stderr))
    for sentence in written.sentences:
        log(labelled("", sentence, sys.stderr))
    _say_best(sweep.folder, written.best)
    log(labelled("report", str(written.page), sys.stderr))
    if sweep.count(STOPPED) + sweep.count(WAITING) + sweep.count(FAILED):
        log(f"continue with: {cli.command('train')} -m resume=auto {quote(f'out_dir={sweep.folder}')}")
    if sweep.count(FINISHED):
        from rwkv.training.loggers import log_report

        log_report(next(iter(sweep.configs.values())).logger, sweep.folder, *report.table(sweep.folder))


def _say_best(folder: Path, best: tuple[str, float] | None) -> None:
    """The run with the lowest validation loss, and which run runs/latest is: the one that was trained last."""
    if best is not None:
        name, loss = best
        more = f"{cli.command('generate')} {quote(f'checkpoint={folder / name}')} prompt=..."
        log(labelled("best", f"{name} has the lowest val/loss, {loss:.4f}: {more}", sys.stderr))
    latest = follow(LATEST).resolve()
    if latest.parent == folder.resolve():
        log(labelled("latest", f"{LATEST} is the run that was trained last, {latest.name}", sys.stderr))


def status_of(sweep: Sweep, stopped: bool) -> int:
    if stopped or sweep.count(STOPPED):
        return cli.INTERRUPTED
    if sweep.count(FAILED):
        return SOME_FAILED
    return 0 if sweep.count(FINISHED) else NONE_RAN


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
