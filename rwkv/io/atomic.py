"""Atomic writes: write a file beside its target, flush it to the disk, and rename it to the target.

After a crash the target is the complete old or the complete new file. Follows symbolic links, and writes to devices and pipes
directly.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes `path` with write(file), atomically: a failure keeps the old file. Creates missing parent folders."""
    if path.exists() and not path.is_file():             # a rename would replace /dev/null
        with path.open("wb") as file:
            write(file)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):     # a write to a full disk names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Appends to a file. An OSError names the file."""
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        error.filename = str(path)       # a write to a full disk names no file
        raise


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Creates the folder `path` with write(folder), and replaces an old one once the new one is complete."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)         # left by a killed process with the same pid
    temporary.mkdir()
    try:
        write(temporary)
        sync_folder(temporary)
        if path.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(folder: Path, path: Path) -> None:
    """Renames a finished folder to `path`, replacing an old file or folder.

    A kill in between leaves both, the old one named replaced_by(path).
    """
    sync_folder(folder)
    old = replaced_by(path)
    remove(old)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    sync_folder(path.parent)
    remove(old)


def replaced_by(path: Path) -> Path:
    """The name of the old file or folder during replace_folder."""
    return path.with_name(f".{path.name}.old")


def remove(path: Path) -> None:
    """Deletes a file or folder, if it exists. Renames a folder first, so that a kill leaves no partial folder."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    deleted = path.with_name(f".{path.name.strip('.')}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    path.rename(deleted)
    shutil.rmtree(deleted)


def size_on_disk(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def sync_folder(folder: Path) -> None:
    """Flushes the folder's entries to the disk, so that a rename survives a crash. No-op on Windows."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
