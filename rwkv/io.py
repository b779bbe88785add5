"""Writing that a crash cannot spoil: beside the target first, on the disk next, in its place last.

Cache files: each appears whole or not at all, however many processes write it, and wherever one of them stops.
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls write(file), and lets the whole file appear at `path`; where that fails, what was there stays."""
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
    path = path.absolute()
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
    """Two renames where `path` exists: between them the old folder has the temporary's name with .old."""
    if not path.exists():
        temporary.rename(path)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old)


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


def write_checked(path: Path, put: Callable[[BinaryIO], None]) -> None:
    """Writes `path` by put(file). Raises ValueError where it cannot be written; what was there then stays."""
    try:
        write_file(path, put)
    except OSError as error:
        raise ValueError(cannot_write(path, error)) from None


def cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}; data.cache_dir must be a folder with room"


def write_bytes(path: Path, content: bytes) -> None:
    def put(file: BinaryIO) -> None:
        file.write(content)

    write_checked(path, put)


def write_json(path: Path, content: Any) -> None:
    """With a checksum, by which read_json knows a damaged file."""
    write_bytes(path, json.dumps({"crc32": _checksum(content), "content": content}).encode())


def read_json(path: Path) -> Any:
    """What write_json wrote; None where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["content"] if found["crc32"] == _checksum(found["content"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())
