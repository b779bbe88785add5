"""A program in a process that is forked from one which has imported torch and Lightning and started nothing: it begins at once.

It is train.py, with a process number, signals and an end of its own, and it does not wait seconds for imports. multiprocessing
starts the first process when it is asked for. This file is imported by each, and imports nothing that takes time.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Forked:
    """What a test uses of a subprocess.Popen."""

    def __init__(self, folder: Path, program: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rwkv.training.fit"])
        self._said = [folder / f".{name}-{os.urandom(4).hex()}" for name in ("output", "error")]
        self._process = context.Process(target=_work, args=(folder, program, arguments, environment, self._said))
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
        output, error = (path.read_text(encoding="utf-8") for path in self._said)
        for path in self._said:
            path.unlink()
        return output, error


def _work(folder: Path, program: str, arguments: tuple[str, ...], environment: dict[str, str], said: list[Path]) -> None:
    import torch

    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    multiprocessing.set_start_method(None, force=True)           # the system's own, for what it starts
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    path = str(ROOT / f"{program}.py")
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
