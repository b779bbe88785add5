"""Reads and writes cache files. Concurrent processes may write them, and reading verifies their checksums."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from rwkv.errors import UserError
from rwkv.io.atomic import write_file


def write(path: Path, write_to: Callable[[BinaryIO], object]) -> None:
    """Writes a file as write_file does, but raises UserError if it cannot be written."""
    try:
        write_file(path, write_to)
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None


def cannot_write(path: Path, error: OSError) -> str:
    """Returns the message for a UserError about a path in data.cache_dir that cannot be written."""
    return f"cannot write {path}: {error.strerror}. data.cache_dir must be a writable folder with free space"


def write_bytes(path: Path, content: bytes) -> None:
    write(path, lambda file: file.write(content))


def write_json(path: Path, content: object) -> None:
    """Writes `content` as JSON, with a checksum for read_json."""
    write_bytes(path, json_bytes(content))


def json_bytes(content: object) -> bytes:
    """Returns the bytes of the file that write_json writes."""
    return json.dumps({"crc32": _checksum(content), "content": content}).encode()


def read_json(path: Path) -> Any:
    """Returns the content that write_json wrote; None if the file is missing or damaged."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return entry["content"] if entry["crc32"] == _checksum(entry["content"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sha256(parts: Iterable[str]) -> str:
    """Returns the SHA-256 of strings, encoded as UTF-8 and joined by zero bytes."""
    hashed = hashlib.sha256()
    separator = b""
    for part in parts:
        hashed.update(separator + part.encode(errors="surrogateescape"))
        separator = b"\0"
    return hashed.hexdigest()


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content).encode())
