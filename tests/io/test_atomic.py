"""Tests how files and folders are replaced: permissions are preserved, and pipes are written to."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rwkv.io.atomic import write_file, write_folder


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Pipes are written to like devices, because replacing /dev/null would harm the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, lambda file: file.write(b"a state"))
    assert pipe.is_fifo()
    assert os.read(reader, 100) == b"a state"
    os.close(reader)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups in a file's mode")
@pytest.mark.parametrize(("mode", "write"), [
    (0o664, lambda path: write_file(path, lambda file: file.write(b"new"))),
    (0o770, lambda path: write_folder(path, lambda folder: (folder / "new").touch()))], ids=["file", "folder"])
def test_a_replaced_file_has_the_permissions_of_the_old_one(mode: int, write: Callable[[Path], object], tmp_path: Path) -> None:
    """A group that may write to a report or a model may still do so after it has been written again."""
    path = tmp_path / "x"
    for _ in range(2):
        write(path)
        path.chmod(mode)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("content", [[], ["old", "both"]])
def test_an_empty_folder_and_the_current_directory_are_filled_and_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                               content: list[str]) -> None:
    """A mounted volume cannot be renamed, and a shell in a replaced folder would be left in a deleted one."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in content:
        (folder / name).write_text(name)
    if content:
        monkeypatch.chdir(folder)
    before = folder.stat().st_ino

    def fail(new: Path) -> None:
        (new / "both").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(folder, fail)
    assert sorted(path.name for path in folder.iterdir()) == sorted(content)

    def write(new: Path) -> None:
        for name in ("both", "new"):
            (new / name).write_text("new")

    write_folder(folder, write)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"both": "new", "new": "new"}
    assert folder.stat().st_ino == before
    assert [*tmp_path.iterdir()] == [folder]


def test_a_failed_rename_in_the_current_directory_leaves_the_old_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    monkeypatch.chdir(tmp_path)

    def write(new: Path) -> None:
        (new / "old").write_text("new")

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path, write)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "old"}
