"""A sweep: `python train.py -m kernel=conv1d,taichi_v3 seed=0,1`, each run in a process of its own, one after the other.

    DIR/sweep.json       what there is to train and what became of it, rewritten after each run
    DIR/NAME/            a run's directory, by the options in which the runs differ: kernel=conv1d,seed=0
    DIR/logs/NAME.txt    what it wrote to standard error
    DIR/report.html      of all of them, and report.csv (rwkv/report/)

Runs come in an order shuffled with ORDER_SEED, so that what the machine does in an hour is not one kernel's alone. A kernel
that cannot run here, and a run that fails, are lines of the report; the others go on. Ctrl-C is passed on to the run at hand,
which saves. `python train.py -m resume=auto out_dir=DIR` keeps what is finished and goes on with the rest, each run from its
last checkpoint; further options name further runs.
"""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from kernels.registry import KernelUnavailable
from rwkv import cli, report
from rwkv.config import TrainConfig
from rwkv.formats._atomic import write_file
from rwkv.lock import RunLock
from rwkv.run import CONFIG_FILE, new_folder, require_unused
from rwkv.scale import device_for
from rwkv.tracking import log_report
from rwkv.training import kernel_for, say

PROGRAM = cli.ROOT / "train.py"
FILE, LOGS = "sweep.json", "logs"
ORDER_SEED = 0
FINISHED, FAILED, UNAVAILABLE, STOPPED, WAITING = "finished", "failed", "unavailable", "stopped", "waiting"
RESUME = "-m resume=auto"
OF_A_SWEEP = ("out_dir", "resume")       # options that the runs have from the sweep
IGNORED = ("hydra/launcher", "hydra.launcher", "hydra/sweeper")      # of Hydra's own way to sweep
SOME_FAILED, NONE_RAN = 1, 2             # exit status


@dataclass
class Entry:
    """One run of a sweep: its name, command line, and what became of it. order: its place among all, from 1."""

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
    """What sweep.json holds. Entries stand as the command line names them."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)
    configs: dict[str, TrainConfig] = field(default_factory=dict)

    def save(self) -> None:
        content = {"order_seed": ORDER_SEED, "runs": [asdict(entry) for entry in self.entries]}
        write_file(self.folder / FILE, lambda file: file.write(json.dumps(content, indent=1).encode()))

    def to_do(self) -> list[Entry]:
        return sorted((entry for entry in self.entries if entry.status != FINISHED), key=lambda entry: entry.order)

    def count(self, status: str) -> int:
        return sum(entry.status == status for entry in self.entries)


class Stop:
    """`with Stop() as stop:` Ctrl-C and SIGTERM set `asked` and are passed on to stop.process, which is not among theirs."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, process: subprocess.Popen[str]) -> None:
        """What is asked from now on is passed on to `process`, and what was asked while it was started."""
        self.process = process
        if self.asked:
            self._pass_on(signal.SIGINT)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.process is not None:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self.process is not None and sys.platform != "win32":     # there Ctrl-C reaches all processes of a console
            self.process.send_signal(number)


def run(line: cli.CommandLine, jobs_of: cli.Jobs) -> None:
    """Trains all that is not finished, and writes the report. Raises ValueError where the directory is not this sweep's.

    Exit status: 0; 1 where a run failed; 2 where none could run; 130 after Ctrl-C.
    """
    sweep, lock = opened(line, jobs_of), RunLock()
    sweep.folder.mkdir(parents=True, exist_ok=True)
    lock.hold(sweep.folder)
    if "resume" not in line.verbatim:
        require_unused(sweep.folder, RESUME)     # asked before, but another process may have begun and ended a sweep since
    sweep.save()
    try:
        asked = train_all(sweep)
    finally:
        lock.release()
    conclude(sweep)
    sys.exit(status_of(sweep, asked))


def train_all(sweep: Sweep) -> bool:
    """Whether it was asked to stop."""
    to_do = sweep.to_do()
    say(f"sweep      {sweep.folder}: {len(sweep.entries)} runs, {len(to_do)} to do, in an order "
        f"shuffled with seed {ORDER_SEED}")
    with Stop() as stop:
        for number, entry in enumerate(to_do, start=1):
            say(f"\n[{number}/{len(to_do)}] {entry.name}")
            train(sweep, entry, stop)
            sweep.save()
            if stop.asked or entry.status == STOPPED:
                break
    return stop.asked


def opened(line: cli.CommandLine, jobs_of: cli.Jobs) -> Sweep:
    """A new sweep, or one that goes on: its entries, with those that the command line adds."""
    _require_ours(line)
    own = {key: value for key, value in line.verbatim.items() if key in OF_A_SWEEP}
    rest = cli.CommandLine(line.overrides, {key: value for key, value in line.verbatim.items() if key not in own}, [])
    folder, goes_on = Path(str(own.get("out_dir") or new_folder("sweep_"))), "resume" in own
    if goes_on and (own["resume"] != "auto" or "out_dir" not in own):
        raise ValueError("a sweep is continued with resume=auto out_dir=DIR, where DIR is the directory of the sweep")
    found = read(folder) if goes_on else []
    if not goes_on:
        require_unused(folder, RESUME)
    if goes_on and not found and not rest.keys:
        raise ValueError(f"no sweep to continue in {folder}: it has no {FILE}")
    jobs = [job for entry in found for job in jobs_of(cli.split(entry.arguments, TrainConfig))]
    sweep = Sweep(folder, found, {entry.name: job.config for entry, job in zip(found, jobs, strict=True)})
    if rest.keys or not found:
        _add(sweep, jobs_of(rest))
    return sweep


def _require_ours(line: cli.CommandLine) -> None:
    """Raises ValueError for an option of Hydra's own way to sweep, which is not this one."""
    theirs = [key for key in line.keys if key.startswith(IGNORED)]
    if theirs:
        raise ValueError(f"{theirs[0]} has no effect here: each run of a sweep is a process of its own, one after the other; "
                         "leave it out")


def read(folder: Path) -> list[Entry]:
    """The entries in a sweep's directory; none where it is not one. What is not finished is to be done."""
    if not (folder / FILE).is_file():
        return []
    entries = [Entry(**entry) for entry in json.loads((folder / FILE).read_text(encoding="utf-8"))["runs"]]
    for entry in entries:
        if entry.status == FINISHED or report.is_finished(folder / entry.name):
            entry.status, entry.reason = FINISHED, None
    return entries


def _add(sweep: Sweep, jobs: list[cli.Job]) -> None:
    """The jobs that the sweep does not have yet. Raises ValueError for one that it has with other options."""
    known, added = {entry.name: entry for entry in sweep.entries}, []
    for job in jobs:
        if job.config.plan:
            raise ValueError("plan=true trains nothing, and a sweep is of runs that train: leave out -m to see the plan of one "
                             "run, or plan=true to train")
        entry = Entry(name_of(job), job.swept, job.arguments, job.config.kernel.name, job.config.seed)
        before = known.setdefault(entry.name, entry)
        if sorted(before.arguments) != sorted(entry.arguments):
            raise ValueError(f"the sweep in {sweep.folder} has {entry.name} with other options: give the same, or another "
                             "out_dir")
        if before is entry:
            added.append(entry)
            sweep.configs[entry.name] = job.config
    for place, entry in enumerate(random.Random(ORDER_SEED).sample(added, len(added)), start=len(sweep.entries) + 1):
        entry.order = place
    sweep.entries += added


def name_of(job: cli.Job) -> str:
    """Also a directory's: whatever a path cannot hold becomes an underscore."""
    text = ",".join(f"{key}={value}" for key, value in job.swept.items())
    return re.sub(r"[^\w.,=+-]", "_", text) or f"kernel={job.config.kernel.name}"


def train(sweep: Sweep, entry: Entry, stop: Stop) -> None:
    """One run, in a process of its own; what became of it is in the entry."""
    config, since = sweep.configs[entry.name], time.monotonic()
    try:
        kernel_for(config, device_for(config.trainer.accelerator))
    except KernelUnavailable as reason:
        entry.status, entry.reason = UNAVAILABLE, str(reason).split("; on ")[0]       # without what else there is
        say(f"cannot run here: {reason}")
        return
    status, error = _process(command(sweep, entry), sweep.folder / LOGS / f"{entry.name}.txt", stop)
    entry.seconds = time.monotonic() - since
    entry.status = FINISHED if status == 0 else STOPPED if stop.asked or _was_interrupted(status) else FAILED
    entry.reason = reason_of(status, error) if entry.status == FAILED else None
    if entry.reason:
        say(f"failed: {entry.reason}")


def command(sweep: Sweep, entry: Entry) -> list[str]:
    """What trains one run, or goes on with it."""
    folder, config = sweep.folder / entry.name, sweep.configs[entry.name]
    begun = (folder / CONFIG_FILE).is_file()
    arguments = [argument for argument in entry.arguments if not (begun and argument.startswith("init_from="))]
    given = {argument.partition("=")[0] for argument in arguments}
    ours = {"out_dir": str(folder), "logger.group": sweep.folder.name, "logger.run_name": _run_name(entry, config),
            "trainer.probe": "true"} | ({"resume": "auto"} if begun else {})
    return [sys.executable, str(PROGRAM), *arguments,
            *(f"{key}={value}" for key, value in ours.items() if key not in given)]


def _run_name(entry: Entry, config: TrainConfig) -> str:
    others = [f"{key}={value}" for key, value in entry.swept.items() if key not in ("kernel", "seed")]
    return "-".join([config.kernel.name, f"seed{config.seed}", *others])


def _process(arguments: list[str], log: Path, stop: Stop) -> tuple[int, str]:
    """Exit status and standard error, which is passed on and kept in `log`."""
    log.parent.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(
            arguments, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", start_new_session=True) as process:
        stop.watch(process)
        for said in process.stderr or ():
            sys.stderr.write(said)
            file.write(said)
    stop.process = None
    return process.returncode, log.read_text(encoding="utf-8")


def _was_interrupted(status: int) -> bool:
    return status in (cli.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


def reason_of(status: int, error: str) -> str:
    """The line that says why: of the last traceback, else of our own sentence, else the last one."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}" + (": out of memory?" if status == -signal.SIGKILL else "")
    lines = [line for line in error.splitlines() if line.strip()]
    raised = [_first_unindented(lines[place + 1:]) for place, line in enumerate(lines) if line.startswith("Traceback (most ")]
    sentences = [line for line in lines if line.startswith("error: ")]
    return next(iter([*raised[-1:], *sentences[-1:], *lines[-1:]]), f"exit status {status}")


def _first_unindented(lines: Iterable[str]) -> str:
    return next((line for line in lines if not line.startswith((" ", "\t"))), "an error that was not said to its end")


def conclude(sweep: Sweep) -> None:
    """The report, in the directory and in W&B, and what to do about what is missing."""
    written = report.write(sweep.folder)
    counts = [f"{sweep.count(status)} {word}" for status, word in (
        (FINISHED, "finished"), (FAILED, "failed"), (UNAVAILABLE, "cannot run here"), (STOPPED, "stopped"), (WAITING, "to do"))
        if sweep.count(status)]
    say(f"\nsweep      {', '.join(counts)}")
    say(f"report     {written}")
    if sweep.count(STOPPED) + sweep.count(WAITING) + sweep.count(FAILED):
        say(f"continue with: python train.py -m resume=auto out_dir={sweep.folder}")
    config = next(iter(sweep.configs.values()))
    if config.logger.name == "wandb" and sweep.count(FINISHED):
        log_report(config.logger, sweep.folder, *report.table(sweep.folder))


def status_of(sweep: Sweep, asked: bool) -> int:
    if asked or sweep.count(STOPPED):
        return cli.INTERRUPTED
    return SOME_FAILED if sweep.count(FAILED) else 0 if sweep.count(FINISHED) else NONE_RAN
