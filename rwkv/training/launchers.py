"""What trains the runs of a sweep: processes of this machine, or jobs of a batch system, through submitit.

Both start rwkv/training/sweep_child.py in a session of its own: a terminal's Ctrl-C reaches the sweep alone, which passes it
on. The run's standard error goes to its log file; that of a process is shown too.
"""

import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

import yaml

from rwkv import cli
from rwkv.config import SweepConfig
from rwkv.errors import UserError
from rwkv.io.lines import broken
from rwkv.io.signals import POLL_SECONDS
from rwkv.io.unread import abandon
from rwkv.training import sweep_child

DAY = 24 * 60                            # minutes: the time of a job, unless sweep.arguments has another
CANCEL_SECONDS = 60                      # after which a cancelled job counts as ended, as where SLURM has no accounting
CLUSTERS = {"slurm": "SlurmJob", "local": "LocalJob"}    # the classes of submitit's jobs


@dataclass(frozen=True)
class Task:
    """What a launcher starts. program: the command line of sweep_child.py. arguments: those of train.py after it. folder: the
    run's. number: of the run in the order of starts, which stands before its output.
    """

    name: str
    program: list[str]
    folder: Path
    arguments: list[str]
    log_file: Path
    number: int = 1


@dataclass(frozen=True)
class End:
    """How a run has ended. status: its exit status, negative for a signal. reason: why there is no status that says so."""

    name: str
    status: int
    reason: str | None = None


class Launcher(ABC):
    """Starts runs and waits for them. places: how many at a time."""

    places: int

    @abstractmethod
    def start(self, task: Task, earlier_job: str | None) -> str | None:
        """Starts a run; or waits for the job that an earlier process has started, if that goes on. Returns the job's id."""

    @abstractmethod
    def ends(self) -> list[End]:
        """The runs that have ended since the last call. Waits for one, for POLL_SECONDS at most."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """Passes the signal on to all runs. Signal handlers call it."""

    @abstractmethod
    def close(self) -> None:
        """Stops all runs, after an error of the sweep itself."""


class Processes(Launcher):
    """Processes of this machine. Of several at a time each has its share of the threads, and a GPU of its own.

    threads: those that all runs use together. gpus: their number, of which each run needs one; 0 if none needs one.
    """

    def __init__(self, jobs: int, threads: int, gpus: int) -> None:
        if gpus and jobs > gpus:
            raise UserError(f"sweep.jobs must be at most {gpus}, the number of GPUs, of which each run needs one; got {jobs}")
        self.places = jobs
        self.threads = max(1, threads // jobs)
        self._gpus = [*range(gpus)]      # those that are free
        self._running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        self._ended: queue.SimpleQueue[tuple[End, int | None]] = queue.SimpleQueue()
        self._printing = threading.Lock()

    def start(self, task: Task, earlier_job: str | None) -> str | None:
        gpu = self._gpus.pop(0) if self._gpus else None
        share = [f"{sweep_child.SHARE}{self.threads},{'' if gpu is None else gpu}"] if self.places > 1 else []
        both = _one_output()
        own = None if both or self.places == 1 else tempfile.TemporaryFile("w+", encoding="utf-8")       # noqa: SIM115
        process = subprocess.Popen(
            [*task.program, *share, *sweep_child.options_of(task.folder, task.arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE if both else own,
            stderr=subprocess.STDOUT if both else subprocess.PIPE, encoding="utf-8", errors="replace", start_new_session=True)
        thread = threading.Thread(target=self._follow, args=(task, process, own, gpu), daemon=True)
        self._running[task.name] = (process, thread)
        thread.start()
        return None

    def ends(self) -> list[End]:
        try:
            end, gpu = self._ended.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return []
        self._running.pop(end.name)[1].join()
        if gpu is not None:
            self._gpus.append(gpu)
        return [end]

    def stop(self, number: int) -> None:
        if sys.platform != "win32":      # Windows sends Ctrl-C to all processes of a console
            for process, _ in list(self._running.values()):
                process.send_signal(number)

    def close(self) -> None:
        for process, thread in self._running.values():
            process.terminate()
            thread.join()

    def _follow(self, task: Task, process: subprocess.Popen[str], own: IO[str] | None, gpu: int | None) -> None:
        """Shows and logs the output of a run until its end."""
        before = f"[{task.number}] " if self.places > 1 else ""
        with process:
            for line in _logged(process.stdout or process.stderr or (), task.log_file):
                if not before or line.strip():
                    self._print(before + broken(line.rstrip("\n"), sys.stderr), sys.stderr)
            status = process.wait()      # before its standard input is closed, which would stop it
        if own is not None:
            own.seek(0)
            self._print(own.read().rstrip("\n"), sys.stdout)
            own.close()
        self._ended.put((End(task.name, status), gpu))

    def _print(self, text: str, stream: TextIO) -> None:
        with self._printing:
            try:
                print(text, file=stream, flush=True)
            except BrokenPipeError:      # nobody reads the samples any more
                abandon(stream)


class SubmititJobs(Launcher):
    """Jobs of SLURM, or with cluster=local of submitit's own processes. They go on when this process is killed."""

    def __init__(self, jobs: int, arguments: Iterable[str], folder: Path) -> None:
        try:
            self._submitit = importlib.import_module("submitit")
            importlib.import_module("cloudpickle").register_pickle_by_value(sweep_child)
        except ImportError as error:
            raise UserError(f"sweep.launcher=submitit needs the package submitit ({error}): pip install "
                            "'timemix[slurm]'") from None
        self.places = jobs
        self._arguments = _values(arguments)
        self.cluster = str(self._arguments.pop("cluster", "slurm"))
        if self.cluster not in CLUSTERS:
            raise UserError(f"sweep.arguments=cluster=NAME must be one of {', '.join(CLUSTERS)}; got {self.cluster}")
        try:
            with tempfile.TemporaryDirectory() as elsewhere:     # submitit makes its folder at once
                self._executor_in(Path(elsewhere))
        except RuntimeError as error:    # there is no srun
            raise UserError(f"sweep.launcher=submitit finds no SLURM here ({error}); without one use sweep.jobs=K, or "
                            "sweep.arguments=cluster=local") from None
        except Exception as error:       # AssertionError, NameError and others
            raise UserError(f"submitit refuses sweep.arguments: {str(error).partition(chr(10))[0]}") from None
        self._folder = folder / "%j"
        self._jobs: dict[str, Any] = {}
        self._stopped: float | None = None               # when the jobs were cancelled

    def _executor_in(self, folder: Path) -> Any:
        executor = self._submitit.AutoExecutor(folder, cluster=self.cluster)
        executor.update_parameters(**{"name": "timemix", "timeout_min": DAY, **self._arguments})
        return executor

    def start(self, task: Task, earlier_job: str | None) -> str | None:
        job = self._earlier(earlier_job) if earlier_job is not None else None
        if job is None:
            run = sweep_child.Submitted(task.program, task.folder, task.arguments, task.log_file)
            job = self._executor_in(self._folder).submit(run)
        self._jobs[task.name] = job
        return str(job.job_id)

    def ends(self) -> list[End]:
        over = {name: job for name, job in self._jobs.items() if self._is_over(job)}
        if not over:
            time.sleep(POLL_SECONDS)
        if self._stopped is not None and time.monotonic() - self._stopped > CANCEL_SECONDS:
            self.stop(signal.SIGTERM)    # again: a job that was being queued again has not heard it
            ends = [End(name, cli.INTERRUPTED) for name in self._jobs]
            self._jobs.clear()
            return ends
        for name in over:
            del self._jobs[name]
        return [self._end(name, job) for name, job in over.items()]

    def stop(self, number: int) -> None:
        self._stopped = self._stopped or time.monotonic()
        for job in list(self._jobs.values()):
            job.cancel(check=False)

    def close(self) -> None:
        self.stop(signal.SIGTERM)

    def _earlier(self, job_id: str) -> Any:
        """The job of that id; None if it has ended."""
        job = getattr(self._submitit, CLUSTERS[self.cluster])(self._folder, job_id)
        return None if self._is_over(job) else job

    def _is_over(self, job: Any) -> bool:
        if self.cluster == "local" and job._process is None:     # of an earlier process: submitit asks only for the result
            return job.paths.result_pickle.exists() or not _is_running(int(job.job_id))
        return bool(job.done())

    def _end(self, name: str, job: Any) -> End:
        try:
            return End(name, int(job.result()))
        except Exception as error:       # the job was cancelled, or its machine has failed
            lines = [line for line in str(error).splitlines() if line.strip()]
            return End(name, 1, f"job {job.job_id} ({job.state}): {lines[-1].strip() if lines else type(error).__name__}")


def launcher_for(config: SweepConfig, runs: int, folder: Path, gpus: int) -> Launcher:
    """The launcher that the options choose. runs: the number of runs to do. folder: for submitit's files. gpus: the number of
    GPUs here, if the runs use them. Raises UserError for options that cannot be had here.
    """
    if config.launcher == "submitit":
        return SubmititJobs(config.jobs or max(1, runs), config.arguments, folder)
    import torch

    return Processes(config.jobs or 1, torch.get_num_threads(), gpus)


def _values(arguments: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE, by name, with values as in YAML. Raises UserError for another form."""
    values = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not name or not equals:
            raise UserError(f"sweep.arguments must be NAME=VALUE, as timeout_min=60; got {text!r}")
    return values


def _logged(lines: Iterable[str], path: Path) -> Iterable[str]:
    """The lines, which it writes to a file too. A full disk costs lines of the file, and not the run."""
    file: IO[str] | None = None
    with suppress(OSError):
        file = path.open("w", encoding="utf-8", buffering=1)
    for line in lines:
        if file is not None:
            with suppress(OSError):
                file.write(line)
        yield line
    with suppress(OSError):
        if file is not None:
            file.close()


def _one_output() -> bool:
    """Whether standard output and standard error go to the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:                      # one of them is closed, or is no file
        return False


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
