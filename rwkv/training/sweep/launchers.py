"""Launchers of a sweep's runs: local processes, or jobs of a batch system through submitit.

Both start rwkv/training/sweep/child.py in a new session: a terminal's Ctrl-C reaches only the sweep, which passes it on. A
run's standard error goes to its log file; if the run is a local process, it is also shown.
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
from rwkv.io.broken_pipe import abandon
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import broken
from rwkv.io.signals import POLL_SECONDS
from rwkv.training.sweep import child

DAY = 24 * 60                            # minutes; the default time limit of a job
CANCEL_SECONDS = 60                      # a cancelled job counts as ended after this, even without SLURM accounting
CLUSTERS = {"slurm": "SlurmJob", "local": "LocalJob"}    # the classes of submitit's jobs


@dataclass(frozen=True)
class Task:
    """A run to start. program: the command line of child.py. arguments: train.py's options, which follow `program`. folder: the
    run's directory. number: the run's position in the order of starts, printed before its output.
    """

    name: str
    program: list[str]
    folder: Path
    arguments: list[str]
    log_file: Path
    number: int = 1


@dataclass(frozen=True)
class End:
    """The end of a run. status: exit status, negative for a signal. reason: the error of a job without an exit status."""

    name: str
    status: int
    reason: str | None = None


class JobRejected(UserError):
    """The batch system rejected a job: it never accepts such a job, or accepts no more jobs at present."""


class Launcher(ABC):
    """Starts runs and waits for them to end. places: the number of runs that may run at a time."""

    places: int

    @abstractmethod
    def start(self, task: Task, earlier_job: str | None) -> str | None:
        """Starts a run, or attaches to its job from an earlier sweep process if the job still runs. Returns the job's id, if
        any.

        Raises JobRejected.
        """

    @abstractmethod
    def ends(self) -> list[End]:
        """The runs that ended since the last call. If there are none, waits up to POLL_SECONDS for one to end."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """Passes the signal on to all runs. Called by signal handlers."""

    @abstractmethod
    def close(self) -> None:
        """Stops all runs, after an error of the sweep itself."""


class Processes(Launcher):
    """Launches runs as local processes. Concurrent runs share out the threads, and each has its own GPU.

    threads: the number of threads of all concurrent runs together. gpus: the number of GPUs, one for each run; 0 if runs need
    none.
    """

    def __init__(self, jobs: int, threads: int, gpus: int) -> None:
        if gpus and jobs > gpus:
            raise UserError(f"sweep.jobs must be at most {gpus}, the number of GPUs, one for each run; got {jobs}")
        self.places = jobs
        self.threads = max(1, threads // jobs)
        self._free_gpus = [*range(gpus)]
        self._running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        self._ended: queue.SimpleQueue[tuple[End, int | None]] = queue.SimpleQueue()
        self._printing = threading.Lock()

    def start(self, task: Task, earlier_job: str | None) -> str | None:
        gpu = self._free_gpus.pop(0) if self._free_gpus else None
        share = [f"{child.SHARE}{self.threads},{'' if gpu is None else gpu}"] if self.places > 1 else []
        merged = _same_output()
        output = None if merged or self.places == 1 else tempfile.TemporaryFile("w+", encoding="utf-8")       # noqa: SIM115
        process = subprocess.Popen(
            [*task.program, *share, *child.run_options(task.folder, task.arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE if merged else output,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE, encoding="utf-8", errors="replace", start_new_session=True)
        thread = threading.Thread(target=self._follow, args=(task, process, output, gpu), daemon=True)
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
            self._free_gpus.append(gpu)
        return [end]

    def stop(self, number: int) -> None:
        if sys.platform != "win32":      # Windows sends Ctrl-C to all processes of a console itself
            for process, _ in list(self._running.values()):
                process.send_signal(number)

    def close(self) -> None:
        for process, thread in self._running.values():
            process.terminate()
            thread.join()

    def _follow(self, task: Task, process: subprocess.Popen[str], output: IO[str] | None, gpu: int | None) -> None:
        """Prints and logs the output of a run until it ends."""
        prefix = f"[{task.number}] " if self.places > 1 else ""
        with process:
            for line in _logged(process.stdout or process.stderr or (), task.log_file):
                if not prefix or line.strip():
                    self._print(prefix + broken(line.rstrip("\n"), sys.stderr), sys.stderr)
            status = process.wait()      # before its standard input is closed, which would stop it
        if output is not None:
            output.seek(0)
            self._print(output.read().rstrip("\n"), sys.stdout)
            output.close()
        self._ended.put((End(task.name, status), gpu))

    def _print(self, text: str, stream: TextIO) -> None:
        with self._printing:
            try:
                print(text, file=stream, flush=True)
            except BrokenPipeError:      # the reader has closed the pipe
                abandon(stream)


class SubmititJobs(Launcher):
    """Launches runs as SLURM jobs, or with cluster=local as submitit's local processes. The runs survive this process."""

    def __init__(self, jobs: int, arguments: Iterable[str], folder: Path) -> None:
        try:
            self._submitit = importlib.import_module("submitit")
            importlib.import_module("cloudpickle").register_pickle_by_value(child)
        except ImportError as error:
            raise UserError(f"sweep.launcher=submitit requires the package submitit ({error}): pip install "
                            "'timemix[slurm]'") from None
        self.places = jobs
        self._arguments = _values(arguments)
        self.cluster = str(self._arguments.pop("cluster", "slurm"))
        if self.cluster not in CLUSTERS:
            raise UserError(f"sweep.arguments=cluster=NAME must be one of {', '.join(CLUSTERS)}; got {self.cluster}")
        try:
            with tempfile.TemporaryDirectory() as scratch:       # submitit would create its folder even if the check fails
                self._executor_in(Path(scratch))
        except RuntimeError as error:    # this machine has no srun
            raise UserError(f"sweep.launcher=submitit finds no SLURM here ({error}); without SLURM use sweep.jobs=K, or "
                            "sweep.arguments=cluster=local") from None
        except Exception as error:       # AssertionError, NameError and others
            raise UserError(f"submitit rejected sweep.arguments: {str(error).partition(chr(10))[0]}") from None
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
            run = child.Submitted(task.program, task.folder, task.arguments, task.log_file)
            try:
                job = self._executor_in(self._folder).submit(run)
            except self._submitit.core.utils.FailedJobError as error:
                raise JobRejected(f"SLURM rejected the job: {' '.join(str(error).split())}") from None
        self._jobs[task.name] = job
        return str(job.job_id)

    def ends(self) -> list[End]:
        ended = {name: job for name, job in self._jobs.items() if self._has_ended(job)}
        if not ended:
            time.sleep(POLL_SECONDS)
        if self._stopped is not None and time.monotonic() - self._stopped > CANCEL_SECONDS:
            self.stop(signal.SIGTERM)    # cancelled again: a job may have missed it while being requeued
            ends = [End(name, cli.INTERRUPTED) for name in self._jobs]
            self._jobs.clear()
            return ends
        for name in ended:
            del self._jobs[name]
        return [self._end(name, job) for name, job in ended.items()]

    def stop(self, number: int) -> None:
        self._stopped = self._stopped or time.monotonic()
        for job in list(self._jobs.values()):
            job.cancel(check=False)

    def close(self) -> None:
        self.stop(signal.SIGTERM)

    def _earlier(self, job_id: str) -> Any:
        """The job with this id; None if it has ended."""
        job = getattr(self._submitit, CLUSTERS[self.cluster])(self._folder, job_id)
        return None if self._has_ended(job) else job

    def _has_ended(self, job: Any) -> bool:
        if self.cluster == "local" and job._process is None:     # of an earlier process: submitit checks only the result
            return job.paths.result_pickle.exists() or not _is_running(int(job.job_id))
        return bool(job.done())

    def _end(self, name: str, job: Any) -> End:
        try:
            return End(name, int(job.result()))
        except Exception as error:       # the job was cancelled, or its machine has failed
            lines = [line for line in str(error).splitlines() if line.strip()]
            return End(name, 1, f"job {job.job_id} ({job.state}): {lines[-1].strip() if lines else type(error).__name__}")


def launcher_for(config: SweepConfig, runs: int, folder: Path, gpus: int) -> Launcher:
    """The launcher that the options choose. runs: the number of runs to do. folder: the folder for submitit's files. gpus: the
    number of local GPUs, 0 if the runs use none. Raises UserError for options that this machine does not support.
    """
    if config.launcher == "submitit":
        return SubmititJobs(config.jobs or max(1, runs), config.arguments, folder)
    import torch

    return Processes(config.jobs or 1, torch.get_num_threads(), gpus)


def _values(arguments: Iterable[str]) -> JsonObject:
    """Parses NAME=VALUE arguments, whose values are YAML. Raises UserError for any other argument."""
    values = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not name or not equals:
            raise UserError(f"sweep.arguments must be NAME=VALUE, such as timeout_min=60; got {text!r}")
    return values


def _logged(lines: Iterable[str], path: Path) -> Iterable[str]:
    """Yields the lines and also writes them to a file. If the disk is full, the file lacks lines, but the run continues."""
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


def _same_output() -> bool:
    """Whether standard output and standard error are the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:                      # one of the two is closed or not a file
        return False


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
