"""Launches the runs of a sweep as local processes, or through submitit as jobs of a batch system.

Both launchers start rwkv/training/sweep/child.py in a new session, so Ctrl-C in a terminal reaches only the sweep. The sweep
passes the signal on to the runs. The standard error of a run is written to a log file. The sweep also prints the standard error
of local processes.
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
from rwkv.io.lines import wrap_labelled
from rwkv.io.signals import POLL_SECONDS
from rwkv.training.sweep import child

DAY = 24 * 60                            # the default time limit of a job, in minutes
CANCEL_SECONDS = 60                      # after this many seconds a cancelled job counts as ended even without SLURM accounting
CLUSTERS = {"slurm": "SlurmJob", "local": "LocalJob"}    # maps clusters to submitit's job classes


@dataclass(frozen=True)
class Task:
    """A run to start.

    Args:
        program: the command line of child.py, without options.
        arguments: the options of train.py, which follow `program`.
        number: the run's position in the order of starts, which is printed before the run's output.
    """

    name: str
    program: list[str]
    folder: Path
    arguments: list[str]
    log_file: Path
    number: int = 1


@dataclass(frozen=True)
class End:
    """The end of a run.

    Args:
        status: the exit status, which is negative for a signal.
        reason: the error of a job that has no exit status.
    """

    name: str
    status: int
    reason: str | None = None


class JobRejected(UserError):
    """Raised if the batch system rejects a job, because it never accepts such a job or accepts no more jobs at present."""


class Launcher(ABC):
    """Starts runs and waits for their end. At most `places` runs may run at a time."""

    places: int

    @abstractmethod
    def start(self, task: Task, earlier_job: str | None) -> str | None:
        """Starts a run, or attaches to the run's earlier job if that job still runs. Returns the id of the job, if any.

        Raises JobRejected if the batch system rejects the job.
        """

    @abstractmethod
    def ends(self) -> list[End]:
        """Returns the runs that have ended since the last call. Without such a run, waits up to POLL_SECONDS for an end."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """Passes the signal on to all runs. Signal handlers call this method."""

    @abstractmethod
    def close(self) -> None:
        """Stops all runs after an error in the sweep."""


class Processes(Launcher):
    """Launches runs as local processes. Concurrent runs divide the threads, and each run has a GPU to itself.

    Args:
        threads: the number of threads of all concurrent runs together.
        gpus: the number of GPUs, or 0 if the runs need no GPU.
    """

    def __init__(self, jobs: int, threads: int, gpus: int) -> None:
        if gpus and jobs > gpus:
            raise UserError(f"sweep.jobs must be at most {gpus}, the number of GPUs, because each run needs a GPU; got {jobs}")
        self.places = jobs
        self.threads = max(1, threads // jobs)
        self._free_gpus = [*range(gpus)]
        self._running: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        self._ended: queue.SimpleQueue[tuple[End, int | None]] = queue.SimpleQueue()
        self._printing = threading.Lock()

    def start(self, task: Task, earlier_job: str | None) -> str | None:
        gpu = self._free_gpus.pop(0) if self._free_gpus else None
        share = [f"{child.SHARE}{self.threads},{'' if gpu is None else gpu}"] if self.places > 1 else []
        merged = _streams_share_output()
        output = None if merged or self.places == 1 else \
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")         # noqa: SIM115
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
        if sys.platform != "win32":      # Windows already sends Ctrl-C to all processes of a console
            for process, _ in list(self._running.values()):
                process.send_signal(number)

    def close(self) -> None:
        for process, thread in self._running.values():
            process.terminate()
            thread.join()

    def _follow(self, task: Task, process: subprocess.Popen[str], output: IO[str] | None, gpu: int | None) -> None:
        """Prints and logs the output of a run until the run ends."""
        prefix = f"[{task.number}] " if self.places > 1 else ""
        try:
            with process:
                for line in _tee(process.stdout or process.stderr or (), task.log_file):
                    if not prefix or line.strip():
                        self._print(prefix + wrap_labelled(line.rstrip("\n"), sys.stderr), sys.stderr)
                process.wait()           # leaving the block closes standard input, which would stop the run
            if output is not None:
                output.seek(0)
                self._print(output.read().rstrip("\n"), sys.stdout)
                output.close()
        finally:                         # the sweep waits for this end, even if the output cannot be printed
            self._ended.put((End(task.name, process.wait()), gpu))

    def _print(self, text: str, stream: TextIO) -> None:
        with self._printing:
            try:
                print(text, file=stream, flush=True)
            except BrokenPipeError:      # the reader of the output has closed the pipe
                abandon(stream)


class SubmititJobs(Launcher):
    """Launches runs as SLURM jobs, or with cluster=local as local processes of submitit. The runs survive this process."""

    def __init__(self, jobs: int, arguments: Iterable[str], folder: Path) -> None:
        try:
            self._submitit = importlib.import_module("submitit")
            importlib.import_module("cloudpickle").register_pickle_by_value(child)
        except ImportError as error:
            raise UserError(f"sweep.launcher=submitit requires the package submitit ({error}). Install the package with pip "
                            "install 'timemix[slurm]'") from None
        self.places = jobs
        self._arguments = _parse_arguments(arguments)
        self.cluster = str(self._arguments.pop("cluster", "slurm"))
        if self.cluster not in CLUSTERS:
            raise UserError(f"cluster= in sweep.arguments= must be one of {', '.join(CLUSTERS)}; got {self.cluster}")
        try:
            with tempfile.TemporaryDirectory() as scratch:       # submitit creates the folder even if the check fails
                self._executor_in(Path(scratch))
        except RuntimeError as error:    # this machine has no srun
            raise UserError(f"sweep.launcher=submitit requires SLURM, but this machine does not have SLURM ({error}). To run "
                            "on this machine, use sweep.jobs=K or sweep.arguments=cluster=local") from None
        except Exception as error:       # submitit raises AssertionError, NameError and others
            raise UserError(f"submitit rejected sweep.arguments=: {str(error).partition(chr(10))[0]}") from None
        self._folder = folder / "%j"
        self._jobs: dict[str, Any] = {}
        self._stopped: float | None = None               # the time at which the jobs were cancelled

    def _executor_in(self, folder: Path) -> Any:
        executor = self._submitit.AutoExecutor(folder, cluster=self.cluster)
        executor.update_parameters(**{"name": "timemix", "timeout_min": DAY, **self._arguments})
        return executor

    def start(self, task: Task, earlier_job: str | None) -> str | None:
        job = self._running_job(earlier_job) if earlier_job is not None else None
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
            self.stop(signal.SIGTERM)    # a requeued job may have missed the first cancellation
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

    def _running_job(self, job_id: str) -> Any:
        job = getattr(self._submitit, CLUSTERS[self.cluster])(self._folder, job_id)
        return None if self._has_ended(job) else job

    def _has_ended(self, job: Any) -> bool:
        if self.cluster == "local" and job._process is None:     # submitit checks only the result of an earlier job
            return job.paths.result_pickle.exists() or not _is_running(int(job.job_id))
        return bool(job.done())

    def _end(self, name: str, job: Any) -> End:
        try:
            return End(name, int(job.result()))
        except Exception as error:       # the job was cancelled, or the job's machine has failed
            lines = [line for line in str(error).splitlines() if line.strip()]
            return End(name, 1, f"job {job.job_id} ({job.state}): {lines[-1].strip() if lines else type(error).__name__}")


def launcher_for(config: SweepConfig, runs: int, folder: Path, gpus: int) -> Launcher:
    """Returns the launcher that the options choose. Raises UserError for options that this machine does not support.

    Args:
        runs: the number of unfinished runs.
        folder: the folder for submitit's files.
        gpus: the number of local GPUs, or 0 if the runs use no GPU.
    """
    if config.launcher == "submitit":
        return SubmititJobs(config.jobs or max(1, runs), config.arguments, folder)
    import torch

    return Processes(config.jobs or 1, torch.get_num_threads(), gpus)


def _parse_arguments(arguments: Iterable[str]) -> JsonObject:
    """Parses arguments of the form NAME=VALUE with YAML values. Raises UserError for any other argument."""
    values = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not name or not equals:
            raise UserError(f"sweep.arguments= must have the form NAME=VALUE, such as timeout_min=60; got {text!r}")
    return values


def _tee(lines: Iterable[str], path: Path) -> Iterable[str]:
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


def _streams_share_output() -> bool:
    try:                                 # both streams may be the same terminal, file or pipe
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:                      # one of the two is closed or is not a file
        return False


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
