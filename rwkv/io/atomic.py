"""Writes files atomically. A temporary file in the target's folder is written, flushed to the disk, and renamed to the target.

After a crash the target is either the complete old file or the complete new one. Symbolic links are followed. Devices and pipes
are written directly.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls write(file) and puts the result at `path` atomically. Creates missing folders.

    The new file has the permissions of the old one. If writing fails, the old file is unchanged.
    """
    if path.exists() and not path.is_file():             # a rename would replace a device or pipe
        with errors_of(path), path.open("wb") as file:
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
        if path.exists():
            copy_permissions(path, temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):     # a full disk's error names no file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def require_folder(path: Path) -> None:
    """Raises FileNotFoundError if a folder has been deleted, because write_file would create it again, without its files."""
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder has been deleted or moved", str(path))


def copy_permissions(source: Path, target: Path) -> None:
    with suppress(OSError):              # some file systems have no permissions
        shutil.copymode(source, target)


def append(path: Path, content: bytes) -> None:
    """Appends to a file. If this fails, the OSError contains the file's name."""
    with errors_of(path), path.open("ab") as file:
        file.write(content)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Adds the name of the file `path`, which the `with` block writes, to an OSError without one, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, BrokenPipeError):    # standard output's reader has gone
            error.filename = str(path)
        raise


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Creates the folder `path`, which write(folder) fills. An old folder is replaced once the new one is complete.

    The new folder has the permissions of the old one. In an empty folder, a mount and the current directory, only the content
    is replaced.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    stays = path.is_dir() and (not any(path.iterdir()) or os.path.ismount(path) or path in (Path.cwd(), *Path.cwd().parents))
    temporary = (path if stays else path.parent) / f".{path.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)         # may be left from a killed process with the same pid
    temporary.mkdir()
    try:
        write(temporary)
        sync_folder(temporary)
        if stays:
            _replace_content(path, temporary)
        elif path.exists():
            copy_permissions(path, temporary)
            old = temporary.with_name(f"{temporary.name}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_content(folder: Path, new: Path) -> None:
    """Moves the entries of `new`, a folder in `folder`, over those of the same names in `folder`, and then removes all others.

    If this fails or the process is killed meanwhile, the old entries that were not yet replaced remain.
    """
    entries = {entry.name: entry for entry in new.iterdir()}
    for name, entry in entries.items():
        if entry.is_dir() or (folder / name).is_dir():           # only a file can replace a file
            remove(folder / name)
        entry.replace(folder / name)
    for entry in [*folder.iterdir()]:
        if entry.name not in entries:
            remove(entry)
    sync_folder(folder)


def replace_folder(folder: Path, path: Path) -> None:
    """Renames a finished folder to `path`, and replaces an old file or folder.

    If the process is killed meanwhile, both remain, and the old one may be named old_path_during_replace(path).
    """
    sync_folder(folder)
    old = old_path_during_replace(path)
    remove(old)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    sync_folder(path.parent)
    remove(old)


def old_path_during_replace(path: Path) -> Path:
    """Returns the temporary path of the old file or folder during replace_folder."""
    return path.with_name(f".{path.name}.old")


def remove(path: Path) -> None:
    """Deletes a file or folder, if it exists.

    Renames a folder first, so that a kill during the deletion leaves no partial folder under this name.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    deleted = path.with_name(f".{path.name.strip('.')}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    path.rename(deleted)
    shutil.rmtree(deleted)


def size_on_disk(path: Path) -> int:
    """Returns the size in bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def sync_folder(folder: Path) -> None:
    """Flushes the folder's entries to the disk, so that a rename survives a crash. Does nothing on Windows."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
