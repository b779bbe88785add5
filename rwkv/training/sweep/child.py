"""Trains one run of a sweep in a separate process: `python rwkv/training/sweep/child.py REASON_FILE OPTION ...`.

This program runs train.py with the options. If the first option is --share=THREADS,GPU, it sets the process's number of threads
and GPU, either of which may be empty. If an error ends the run, the program writes the error in one line to REASON_FILE, for
the sweep's report. If the run has several processes, the first process that fails writes the error. Standard input is a pipe
from the sweep. When the pipe is closed, the run saves and stops, so that no run outlives a killed sweep.

This file does not import torch, because train.py must first set variables that torch reads at import. Outside of functions this
file imports no other module of timemix, because submitit pickles the class `Submitted` by value for other machines.
"""

import _thread
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "train.py"              # exists only in a clone; an installed package runs rwkv.programs.train
USER_ERROR = 2                           # a program that has printed a UserError exits with this status
SHARE = "--share="
CONFIG_FILE = "config.yaml"              # exists in the directory of a run that has started
POLL_SECONDS = 0.2


def run(reason_file: Path) -> None:
    """Runs train.py in this process. Raises every exception that train.py raises, including SystemExit."""
    try:
        if PROGRAM.is_file():
            runpy.run_path(str(PROGRAM), run_name="__main__")
        else:
            runpy.run_module("rwkv.programs.train", run_name="__main__")
    except BaseException as error:
        reason = reason_of(error)
        if reason and not reason_file.exists():
            reason_file.write_text(reason, encoding="utf-8", errors="backslashreplace")
        raise


def reason_of(error: BaseException) -> str | None:
    """Returns the error in one line, or None for an exit without an error. The error behind a SystemExit is its context."""
    if not isinstance(error, SystemExit):
        return _one_line(f"{type(error).__name__}: {error}")
    cause = error.__context__
    if cause is None:
        return None
    return _one_line(str(cause) if error.code == USER_ERROR else f"{type(cause).__name__}: {cause}")


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def run_options(folder: Path, arguments: list[str]) -> list[str]:
    """Returns the options of train.py that start the run in `folder`, or that resume a run that has started."""
    started = (folder / CONFIG_FILE).is_file()
    # A started run has saved its base, whose path on the command line may be relative to another directory
    options = [argument for argument in arguments if not (started and argument.startswith("init_from="))]
    keys = {argument.partition("=")[0] for argument in options}
    defaults = {"out_dir": str(folder), "trainer.probe": "true"} | ({"resume": "auto"} if started else {})
    return [*options, *(f"{key}={value}" for key, value in defaults.items() if key not in keys)]


def stop_with_parent() -> None:
    """Sends SIGTERM to this process when standard input is closed."""
    def watch() -> None:
        while os.read(0, 1):
            pass
        if sys.platform == "win32":
            _thread.interrupt_main()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Submitted:
    """A run as a submitit job. A call trains the run in a process and returns the exit status of the process.

    Shortly before the job's time limit, submitit calls checkpoint(), which stops the run cleanly and requeues the job.
    `program` is the command line that starts this file.
    """

    def __init__(self, program: list[str], folder: Path, arguments: list[str], log_file: Path) -> None:
        self.program = program
        self.folder = folder
        self.arguments = arguments
        self.log_file = log_file
        self._log_mode = "w"
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None

    def __call__(self) -> int:
        self._status = None
        with self.log_file.open(self._log_mode, encoding="utf-8") as log, subprocess.Popen(
                [*self.program, *run_options(self.folder, self.arguments)], stdin=subprocess.PIPE, stderr=log,
                start_new_session=True) as self._process:
            threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()
            try:
                while self._status is None:
                    time.sleep(POLL_SECONDS)
            finally:
                self._stop()
        return self._status

    def checkpoint(self) -> Any:
        import submitit

        self._stop()
        again = type(self)(self.program, self.folder, self.arguments, self.log_file)
        again._log_mode = "a"
        return submitit.helpers.DelayedSubmission(again)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        self._status = process.wait()

    def _stop(self) -> None:
        # This method may interrupt __call__ anywhere, so it must not acquire a lock that __call__ uses
        if self._status is None:
            assert self._process is not None
            with suppress(ProcessLookupError):           # the process may have ended already
                os.kill(self._process.pid, signal.SIGTERM)
        while self._status is None:
            time.sleep(POLL_SECONDS)


def main() -> None:
    sys.path[0] = str(ROOT)              # as if train.py were started directly
    reason_file, *sys.argv[1:] = sys.argv[1:]
    if sys.argv[1:] and sys.argv[1].startswith(SHARE):
        from kernels.machine import shares

        threads, gpu = (int(text) if text else None for text in sys.argv.pop(1).removeprefix(SHARE).split(","))
        shares.limit_process(threads, gpu)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        stop_with_parent()
    run(Path(reason_file))


if __name__ == "__main__":
    main()
