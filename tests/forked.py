"""Runs train.py in a process that is forked from a process with torch and Lightning imported, so that it starts immediately.

The process has its own id, signals and exit status, and saves the seconds that imports take. multiprocessing starts the server
process, from which the others are forked, when the first process is requested. Each process imports this file, so it has no
slow imports.
"""

import multiprocessing.context
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
METHOD = "forkserver"                    # start method of multiprocessing


def preloaded() -> multiprocessing.context.BaseContext:
    """Returns the multiprocessing context whose processes are forked from a process that has imported what training needs."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["rwkv.training.fit", "hydra.compose", "hydra.utils"])
    return context


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


class Forked:
    """Runs train.py in a forked process, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: dict[str, str], largest: int | None) -> None:
        """Starts the process. `largest` is the maximum size of a file in bytes, to simulate a full disk."""
        self._logs = [folder / f".{name}-{os.urandom(4).hex()}" for name in ("output", "error")]
        self._process = preloaded().Process(target=_work, args=(folder, arguments, environment, largest, self._logs))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        assert self.returncode is not None, "it takes too long"
        output, error = (path.read_text(encoding="utf-8") for path in self._logs)
        for path in self._logs:
            path.unlink()
        return output, error


def _work(folder: Path, arguments: tuple[str, ...], environment: dict[str, str], largest: int | None, logs: list[Path]) -> None:
    import resource

    import torch

    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for number, path in enumerate(logs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    multiprocessing.set_start_method(None, force=True)           # train.py starts its own processes with the system's method
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
