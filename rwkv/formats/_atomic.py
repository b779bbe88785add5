"""Writing that a crash cannot spoil: beside the target first, on the disk next, in its place last.

A symbolic link stays one: what it points to is replaced.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

AT_FDCWD, RENAME_EXCHANGE = -100, 2      # linux/fcntl.h, linux/fs.h


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls write(file), and lets the whole file appear at `path`; where that fails, what was there stays."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            _to_disk(file)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Calls write(folder), and lets the whole folder appear at `path`, in exchange for what was there."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        write(temporary)
        _sync_folder(temporary)
        _put(temporary, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, path: Path) -> None:
    """One step on Linux; elsewhere two, between which the old folder has the temporary's name with .old."""
    if not path.exists():
        temporary.rename(path)
    elif not _exchanged(temporary, path):
        old = temporary.with_name(f"{temporary.name}.old")
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old)


def _exchanged(one: Path, other: Path) -> bool:
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:               # glibc before 2.28
        return False
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The names in it reach the disk too, where the system lets a folder be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
