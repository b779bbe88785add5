"""One run of a sweep in a process of its own: `python rwkv/training/sweep_child.py REASON_FILE OPTION ...`.

Runs train.py with the options. --share=THREADS,GPU before them is the process's share of the machine; either may be empty.
When an error ends the run, this program writes the error in one line to REASON_FILE, for the sweep's report; of several
processes, the first that fails writes it. When standard input ends, a pipe from the sweep, the run saves and stops: it ends
with a sweep that is killed. This file does not import torch, since train.py must first set variables that torch reads at its
import, and nothing of ours outside functions, since submitit takes the class `Submitted` to other machines as it stands.
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

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "train.py"              # in a clone; an installed package has rwkv.programs.train
USER_ERROR = 2                           # exit status of a program that has shown the error as a sentence
SHARE = "--share="
CONFIG_FILE = "config.yaml"              # in the directory of a run that has begun
POLL_SECONDS = 0.2


def run(reason_file: Path) -> None:
    """Raises whatever the program raises, SystemExit included."""
    try:
        if PROGRAM.is_file():
            runpy.run_path(str(PROGRAM), run_name="__main__")
        else:
            runpy.run_module("rwkv.programs.train", run_name="__main__")
    except BaseException as error:
        reason = reason_of(error)
        if reason and not reason_file.exists():
            reason_file.write_text(reason, encoding="utf-8")
        raise


def reason_of(error: BaseException) -> str | None:
    """The error in one line; None for an exit without one. A program exits while it handles an error: SystemExit's context."""
    if not isinstance(error, SystemExit):
        return _one_line(f"{type(error).__name__}: {error}")
    cause = error.__context__
    if cause is None:
        return None
    return _one_line(str(cause) if error.code == USER_ERROR else f"{type(cause).__name__}: {cause}")


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def options_of(folder: Path, arguments: list[str]) -> list[str]:
    """The options of train.py that begin the run in `folder`, or continue it if the run has begun."""
    begun = (folder / CONFIG_FILE).is_file()
    own = [argument for argument in arguments if not (begun and argument.startswith("init_from="))]
    stated = {argument.partition("=")[0] for argument in own}
    ours = {"out_dir": str(folder), "trainer.probe": "true"} | ({"resume": "auto"} if begun else {})
    return [*own, *(f"{key}={value}" for key, value in ours.items() if key not in stated)]


def stop_with_parent() -> None:
    """From now on this process is asked to stop, as by SIGTERM, when its standard input ends."""
    def watch() -> None:
        while os.read(0, 1):
            pass
        if sys.platform == "win32":
            _thread.interrupt_main()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Submitted:
    """One run as a job of submitit's: train in a process, and return its exit status.

    When the job's time is nearly over, submitit calls checkpoint(), which lets the run save and stop, and queues the job again.
    """

    def __init__(self, program: list[str], folder: Path, arguments: list[str], log_file: Path) -> None:
        """program: the command line of this file. folder: the run's."""
        self.program = program
        self.folder = folder
        self.arguments = arguments
        self.log_file = log_file
        self._log_mode = "w"
        self._process: Any = None
        self._status: int | None = None

    def __call__(self) -> int:
        self._status = None
        with self.log_file.open(self._log_mode, encoding="utf-8") as log, subprocess.Popen(
                [*self.program, *options_of(self.folder, self.arguments)], stdin=subprocess.PIPE, stderr=log,
                start_new_session=True) as self._process:
            threading.Thread(target=self._wait, daemon=True).start()
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

    def _wait(self) -> None:
        self._status = self._process.wait()

    def _stop(self) -> None:
        """Lets the run save and stop. This may interrupt __call__ anywhere: it takes no lock that __call__ takes."""
        if self._status is None:
            with suppress(ProcessLookupError):           # it has just ended
                os.kill(self._process.pid, signal.SIGTERM)
        while self._status is None:
            time.sleep(POLL_SECONDS)


def main() -> None:
    sys.path[0] = str(ROOT)              # as if train.py had been started
    reason_file, *sys.argv[1:] = sys.argv[1:]
    if sys.argv[1:] and sys.argv[1].startswith(SHARE):
        from kernels.machine import shares

        threads, gpu = (int(text) if text else None for text in sys.argv.pop(1).removeprefix(SHARE).split(","))
        shares.take(threads, gpu)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        stop_with_parent()
    run(Path(reason_file))


if __name__ == "__main__":
    main()
