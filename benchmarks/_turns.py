"""Runs two programs alternately, so that a slow minute of the machine affects both.

Not on Windows, which cannot suspend a process.
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


def beside(command: list[str], folder: Path, other: list[str], other_folder: Path, seconds: float) -> str:
    """Runs `command` to its end, alternating with `other`: one is suspended while the other runs. Returns the output of
    `other`.

    seconds: length of a turn. It should cover many steps, so that the step interrupted by the suspension does not change the
    median. Exits with the standard error of `command` if it fails, or of `other` if that ends first.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _started(other, other_folder, printed, errors) as peer, _started(command, folder, errors, errors) as main:
            _suspend(peer)
            while not _ended(main, seconds):
                _suspend(main)
                _continue(peer)
                if _ended(peer, seconds):
                    _fail(other, errors)
                _suspend(peer)
                _continue(main)
            if main.returncode:
                _fail(command, errors)
        printed.seek(0)
        return printed.read()


def alone(command: list[str], folder: Path) -> str:
    """Runs `command` to its end and returns its output; exits with its standard error if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _started(command, folder, printed, errors) as process:
            process.wait()
        if process.returncode:
            _fail(command, errors)
        printed.seek(0)
        return printed.read()


@contextmanager
def _started(command: list[str], folder: Path, out: IO[str], errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """`command` as a process that is killed when this process ends, even by SIGKILL."""
    with subprocess.Popen(command, cwd=folder, stdout=out, stderr=errors, text=True, start_new_session=True) as process, \
            _guarded(process):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _guarded(process: subprocess.Popen[str]) -> Iterator[None]:
    """Starts a guard that kills `process` and its group, even if suspended, when the current process dies and closes the
    pipe."""
    command = [sys.executable, "-c", GUARD, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _ended(process: subprocess.Popen[str], seconds: float) -> bool:
    """Waits for the length of one turn. Returns whether the process has ended."""
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
