"""Whether the server starts where a system is not Linux: no call that Windows lacks, and no need for uvloop."""

import ast
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving_runs import Running

ROOT = Path(__file__).parents[2]
STARTS = ("rwkv.programs.serve", "rwkv.serving.worker")
# What Python's documentation says is there on Unix alone.
LACKING = {
    "os": {"chown", "fork", "fstatvfs", "geteuid", "getgid", "getloadavg", "getuid", "killpg", "lockf", "mkfifo", "nice",
           "posix_fallocate", "pread", "pwrite", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sendfile",
           "setpriority", "setsid", "statvfs", "sysconf", "uname", "wait", "wait4"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "pause",
               "pthread_kill", "pthread_sigmask", "setitimer", "sigtimedwait", "sigwait"},
    "socket": {"AF_UNIX", "SO_REUSEADDR", "SO_REUSEPORT", "send_fds", "recv_fds"},        # SO_REUSEADDR means something else
    "loop": {"add_signal_handler", "add_reader", "add_writer", "create_unix_server"},
}
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop"}
CAUGHT = {"AttributeError", "ImportError", "ModuleNotFoundError", "NotImplementedError", "OSError", "TypeError"}


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def served() -> dict[str, ast.Module]:
    """The modules of the project that the server imports, at once or later."""
    found: dict[str, ast.Module] = {}
    waiting = list(STARTS)
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if path is not None and module not in found:
            found[module] = ast.parse(path.read_text(encoding="utf-8"))
            waiting += imported(found[module])
    return found


def lacking(tree: ast.AST) -> list[str]:
    """What the code uses that Windows lacks, unless it asks for the system first or catches that it is missing."""
    return [name for node in _unguarded(tree) for name in _lacking(node)]


def _lacking(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in MODULES]
    if isinstance(node, ast.ImportFrom):
        names = LACKING.get(node.module or "", set())
        return [alias.name for alias in node.names if node.module in MODULES or alias.name in names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in LACKING.get(node.value.id, ()):
        return [f"{node.value.id}.{node.attr}"]
    return ["ctypes.CDLL(None)"] if isinstance(node, ast.Call) and ast.unparse(node) == "ctypes.CDLL(None)" else []


def _unguarded(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, ast.If) and _asks(part.test):
                if _leaves(part):        # what follows is for the other systems
                    break
                continue
            if isinstance(part, ast.AST) and not (isinstance(node, ast.Try) and name == "body" and _catches(node)):
                yield from _unguarded(part)


def _asks(test: ast.expr) -> bool:
    return "sys.platform" in ast.unparse(test) or "hasattr(" in ast.unparse(test)


def _leaves(branch: ast.If) -> bool:
    return isinstance(branch.body[-1], ast.Return | ast.Raise)


def _catches(node: ast.Try) -> bool:
    return any(name in ast.unparse(handler.type) for handler in node.handlers if handler.type for name in CAUGHT)


@pytest.mark.thorough
def test_no_module_of_the_server_needs_what_windows_lacks() -> None:
    modules = served()
    assert {"rwkv.serving.http", "rwkv.generation.engine", "kernels.machine.memory", "kernels.native"} <= set(modules)
    assert {name: found for name, tree in modules.items() if (found := lacking(tree))} == {}


@pytest.mark.parametrize(("code", "found"), [
    ("import os\nos.fork()", ["os.fork"]), ("import fcntl", ["fcntl"]), ("from signal import SIGHUP", ["SIGHUP"]),
    ("def f(loop):\n    loop.add_signal_handler(1, f)", ["loop.add_signal_handler"]),
    ("if sys.platform == 'linux':\n    os.fork()", []),
    ("def f():\n    if sys.platform != 'linux':\n        return\n    os.fork()", []),
    ("try:\n    import uvloop\nexcept ImportError:\n    pass", []), ("try:\n    os.fork()\nexcept KeyError:\n    os.getuid()",
                                                                       ["os.fork", "os.getuid"]),
    ("import ctypes\nctypes.CDLL(None).f()", ["ctypes.CDLL(None)"])])
def test_the_test_finds_them(code: str, found: list[str]) -> None:
    assert lacking(ast.parse(code)) == found


@pytest.mark.programs
def test_without_uvloop_it_serves_and_stops(start: Callable[..., Running], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200
    assert "asyncio" in server.log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
