"""Two programs in turns: a machine that slows down for a minute slows down both.

Not on Windows, which cannot hold a process.
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
    """Runs `command` to its end, and `other` in turns with it, one held while the other runs; what the other has printed.

    seconds: of a turn; many steps, so that a median does not see the one that a pause falls into. Ends the program where
    command fails, or the other before it.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _started(other, other_folder, printed, errors) as peer, _started(command, folder, errors, errors) as main:
            _hold(peer)
            while not _ended(main, seconds):
                _hold(main)
                _go_on(peer)
                if _ended(peer, seconds):
                    _fail(other, errors)
                _hold(peer)
                _go_on(main)
            if main.returncode:
                _fail(command, errors)
        printed.seek(0)
        return printed.read()


def alone(command: list[str], folder: Path) -> str:
    """Runs `command` to its end; what it has printed. Ends the program where it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with _started(command, folder, printed, errors) as process:
            process.wait()
        if process.returncode:
            _fail(command, errors)
        printed.seek(0)
        return printed.read()


@contextmanager
def _started(command: list[str], folder: Path, out: IO[str], errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """`command`, which ends with this process, however that ends."""
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
    """A process of its own kills `process` and all of its group, held or not, once this one is gone and its pipe is closed."""
    command = [sys.executable, "-c", GUARD, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _ended(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it does within a turn."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _hold(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGSTOP)


def _go_on(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGCONT)


def _fail(command: list[str], errors: IO[str]) -> None:
    errors.seek(0)
    sys.exit(f"{' '.join(command)} failed:\n{errors.read()}")
