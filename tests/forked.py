"""Runs a program in a process that is forked from a process with torch and Lightning imported, so that it starts immediately.

The process has its own id, signals and exit status, and saves the seconds that imports take. multiprocessing starts the server
process, from which the others are forked, when the first process is requested. Each process imports this file, so it has no
slow imports.
"""

import multiprocessing.context
import os
import runpy
import signal
import socket
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
METHOD = "forkserver"                    # start method of multiprocessing


def preloaded_context() -> multiprocessing.context.BaseContext:
    """Returns the multiprocessing context whose processes are forked from one that has imported the programs' libraries."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["rwkv.training.fit", "hydra.compose", "hydra.utils", "rwkv.serving.server",
                                    "rwkv.serving.engine.worker", "rwkv.programs.draft", "rwkv.programs.adapters"])
    return context


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


class Forked:
    """Runs a program in a forked process, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, folder: Path, command: tuple[str, ...], environment: dict[str, str], largest: int | None = None,
                 input: str = "", log: Path | None = None) -> None:
        """Starts the process.

        Args:
            command: arguments of the interpreter, such as ("train.py", "plan=true"), ("-m", "rwkv.tools", "list") or
                ("-c", "print(1)").
            environment: all variables of the process.
            largest: the maximum size of a file in bytes, to simulate a full disk.
            input: the standard input.
            log: a file for the output and the errors; by default `communicate` returns them.
        """
        self._files = [folder / f".{name}-{os.urandom(4).hex()}" for name in ("input", "output", "error")]
        self._files[0].write_text(input, encoding="utf-8")
        if log is not None:
            self._files[1:] = log, log
        self._process = preloaded_context().Process(target=_work, args=(folder, command, environment, largest, self._files))
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

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, "it takes too long"
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        _, output, error = (path.read_text(encoding="utf-8") for path in self._files)
        for path in self._files:
            path.unlink()
        return output, error


def _work(folder: Path, command: tuple[str, ...], environment: dict[str, str], largest: int | None, files: list[Path]) -> None:
    import resource

    import torch

    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")                   # multiprocessing has replaced it
    multiprocessing.set_start_method(None, force=True)           # train.py starts its own processes with the system's method
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    program, *arguments = command
    if program == "serve.py":
        _fork_the_engine()
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [str(ROOT / program), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _fork_the_engine() -> None:
    """Makes serve.py fork its engine, instead of starting it as a new interpreter, which imports torch."""
    from rwkv.serving.engine import remote

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_Engine)
    remote.multiprocessing = SimpleNamespace(get_context=lambda method: context)     # type: ignore[assignment]


class _Engine(multiprocessing.context.ForkProcess):
    """A forked process that, like a spawned one, inherits only its connection, standard output and pipes."""

    def run(self) -> None:
        connection, *_ = self._args      # type: ignore[attr-defined]
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):                         # noqa: PTH208  numbers, not paths
            if number > 2 and number != connection.fileno() and _is_socket_or_file(number):
                os.dup2(nothing, number)
        super().run()


def _is_socket_or_file(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:                      # the descriptor of the listed folder is closed already
        return False
    return stat.S_ISSOCK(mode) or stat.S_ISREG(mode)
