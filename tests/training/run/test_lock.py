"""Tests that one process at a time locks a run's directory, until that process ends."""

import errno
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from programs import Run as Program
from programs import one_sentence

from rwkv.config import TrainConfig
from rwkv.errors import UserError
from rwkv.training.run import lock
from rwkv.training.run.directory import Run, create, run_folder
from rwkv.training.run.lock import RunLock
from rwkv.training.run.opening import open_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these tests fork")


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.2)


def fork(do: Callable[[], object]) -> int:
    """Calls `do` in a forked process and returns the process id. The process exits with status 0, or 1 if `do` fails."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            do()
            status = 0
        finally:
            os._exit(status)
    return process


@contextmanager
def lock_by_another(folder: Path) -> Iterator[None]:
    """Makes another process hold the lock. That process has a child, such as a data loader.

    At the end the process is killed, and the lock must be free although the child is still alive.
    """
    read_end, write_end = os.pipe()
    own_lock = RunLock()

    def hold() -> None:
        try:
            own_lock.hold(folder)
            os.write(write_end, f"{fork(signal.pause)}\n".encode())
        finally:
            os.close(write_end)
        signal.pause()

    process = fork(hold)
    os.close(write_end)
    child = int(os.read(read_end, 20) or 0)
    os.close(read_end)
    try:
        assert child, "the other process could not hold the lock"
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        try:
            RunLock().hold(folder)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_killed_process_holds_nothing_whatever_its_children_do(tmp_path: Path) -> None:
    with lock_by_another(tmp_path), pytest.raises(UserError):
        RunLock().hold(tmp_path)
    RunLock().hold(tmp_path)


def test_only_one_lock_holds_a_directory(tmp_path: Path) -> None:
    one, other = RunLock(), RunLock()
    one.hold(tmp_path)
    one.hold(tmp_path)
    with pytest.raises(UserError):
        other.hold(tmp_path)
    one.release()
    other.hold(tmp_path)
    del other
    pickle.loads(pickle.dumps(one)).hold(tmp_path)


@pytest.mark.programs
@pytest.mark.parametrize("arguments", [("resume=auto", "out_dir=mine"), ("resume=mine",),
                                       ("resume=mine/checkpoints/last.ckpt",)])
def test_a_second_process_is_refused_before_any_work(run: Program, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The second process ends before it reads last.ckpt, which is empty here."""
    checkpoint = tmp_path / "mine" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"")
    with lock_by_another(tmp_path / "mine"):
        one_sentence(run("train", *arguments), "mine", "out_dir")
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]


def test_of_two_new_runs_in_one_directory_the_second_stops(tmp_path: Path) -> None:
    run = Run(tmp_path / "new", TrainConfig())
    run.out_dir.mkdir()
    with lock_by_another(run.out_dir), pytest.raises(UserError):
        create(run, {})
    assert [path.name for path in run.out_dir.iterdir()] == [lock.NAME]


def test_a_new_run_stops_where_another_has_begun_and_ended_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs found the directory unused when they opened it."""
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(out_dir=str(tmp_path / "new"))
    first, second = open_run(config), open_run(config)
    create(first, {"seed": 1})
    first.lock.release()
    with pytest.raises(UserError):
        create(second, {"seed": 2})
    assert (tmp_path / "new" / "config.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize("out_dir", [".", "inner/.."])
def test_a_run_in_the_current_directory_has_the_name_of_that_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       out_dir: str) -> None:
    """Loggers, cards and reports name a run by its directory."""
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert run_folder(out_dir) == tmp_path / "mine"
    assert run_folder("inner/a b") == Path("inner/a b")


def test_runs_of_the_same_second_have_different_directories() -> None:
    assert open_run(TrainConfig()).out_dir != open_run(TrainConfig()).out_dir


@pytest.mark.thorough
def test_latest_is_replaced_while_others_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link points to a run at any moment, and no process fails."""
    monkeypatch.chdir(tmp_path)
    create(Run(Path("runs/0"), TrainConfig()), {})
    running = [fork(partial(begin_runs, f"runs/{name}", 60)) for name in "abc"]
    while running:
        assert Path("runs/latest/config.yaml").is_file()
        pid, status = os.waitpid(running[-1], os.WNOHANG)
        if pid:
            running.remove(pid)
            assert status == 0


@pytest.mark.parametrize("obstacle", ["runs/latest/mine", "runs"])
def test_an_obstacle_to_latest_is_reported_and_does_not_end_the_run(tmp_path: Path, obstacle: str,
                                                                    monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path(obstacle).parent.mkdir(parents=True, exist_ok=True)
    Path(obstacle).write_text("something")
    create(Run(Path("new"), TrainConfig()), {})
    assert "out_dir=new" in capsys.readouterr().err
    assert Path(obstacle).read_text() == "something"


def begin_runs(prefix: str, count: int) -> None:
    for number in range(count):
        create(Run(Path(f"{prefix}{number}"), TrainConfig()), {})


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EROFS])
def test_a_folder_without_locks_is_reported(tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.flock" if error != errno.EROFS else "os.open", refuse)
    RunLock().hold(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"files cannot be locked in {tmp_path} (")
    monkeypatch.undo()
    RunLock().hold(tmp_path)
    assert not capsys.readouterr().err, "no file may be left that looks like a lock"
