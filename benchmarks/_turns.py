"""Runs two programs alternately, so that a slow minute of the machine affects both.

Does not work on Windows, which cannot suspend a process.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

GUARD = """\
import contextlib, os, signal, sys
sys.stdin.read()
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


def run_alternately(command: list[str], folder: Path, other: list[str], other_folder: Path, seconds: float) -> str:
    """Runs `command` to its end, alternating with `other`. Returns the output of `other`.

    Each program is suspended while the other runs. `seconds` is the length of a turn, which should cover many steps, so that
    the step interrupted by a suspension does not change the median. Exits with the standard error of `command` if `command`
    fails, or of `other` if `other` ends first.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _start(other, other_folder, printed, errors) as peer, _start(command, folder, errors, errors) as main:
            _suspend(peer)
            while not _ends_within(main, seconds):
                _suspend(main)
                _continue(peer)
                if _ends_within(peer, seconds):
                    _fail(other, errors)
                _suspend(peer)
                _continue(main)
            if main.returncode:
                _fail(command, errors)
        printed.seek(0)
        return printed.read()


def run_to_end(command: list[str], folder: Path) -> str:
    """Runs `command` to its end and returns its output. Exits with its standard error if the command fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _start(command, folder, printed, errors) as process:
            process.wait()
        if process.returncode:
            _fail(command, errors)
        printed.seek(0)
        return printed.read()


@contextmanager
def _start(command: list[str], folder: Path, out: IO[str], errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts `command` as a process that is killed when this process ends, even if this process is killed by SIGKILL."""
    with subprocess.Popen(command, cwd=folder, stdout=out, stderr=errors, text=True, start_new_session=True) as process, \
            _guard(process):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _guard(process: subprocess.Popen[str]) -> Iterator[None]:
    """Starts a guard process that kills `process` and its group when the current process dies and closes the pipe.

    The guard is needed because a suspended process cannot end itself.
    """
    command = [sys.executable, "-c", GUARD, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _suspend(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGSTOP)


def _continue(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGCONT)


def _fail(command: list[str], errors: IO[str]) -> None:
    errors.seek(0)
    sys.exit(f"{' '.join(command)} failed:\n{errors.read()}")
