"""Finds the files that data.path names, and caches hashes of their contents."""

import glob
import hashlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rwkv.data.documents.copies import Fingerprint
from rwkv.errors import UserError
from rwkv.io.cache import read_json, sha256, write_json
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import chunks, open_file

SETTLED = 2_000_000_000                  # ns; two changes of a file within this time may have the same timestamp
VERSION = "4"                            # version of the cache's format
BLOCK = 1 << 20                          # bytes read at a time for hashing
SLASH = rf"[/{re.escape(os.sep)}]"
ANY_DEPTH = re.compile(rf"(?:^|(?<={SLASH}))\*\*(?:{SLASH}+|$)")       # matches ** between slashes


class Content(NamedTuple):
    """The SHA-256 of a file and, if the file was read as text, the length and the hash of the text.

    `fingerprint` is a hash that ignores white space (documents/copies.py). `characters` and `fingerprint` are 0 for a file that
    was not read as text.
    """

    sha256: str
    characters: int
    fingerprint: int


def find_files(path: str, endings: Sequence[str]) -> list[tuple[str, Path]]:
    """Returns the (name, file) of each file that `path` names, sorted by path.

    Raises UserError if there is no file, or if a link leads to a missing file.

    `path` is a file, a pattern such as books/**/*.md, or a folder. A folder stands for all files in it whose names end in one
    of `endings`. Names are relative to the folder. A file that links lead to is listed once, by its own path if possible.
    """
    if Path(path).is_file():
        return [(Path(path).name, Path(path))]
    patterns = [f"{glob.escape(path)}/**/*{ending}" for ending in endings] if Path(path).is_dir() else [path]
    named = [file for pattern in patterns for file in _glob(pattern)]
    for file in named:
        if file.is_symlink() and not file.exists():
            raise UserError(f"data.path={path} contains {file}, which is a link to a file that does not exist. Restore the "
                            "file or remove the link")
    files = _unique_files(file for file in named if file.is_file())
    if not files:
        raise UserError(_no_files_message(path, endings))
    root = Path(path)                    # becomes the folder, or the part of the pattern before the first wildcard
    while glob.has_magic(str(root)) and not root.exists():
        root = root.parent
    return [(file.relative_to(root).as_posix(), file) for file in files]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders numbers in names by their value, so that part-2 comes before part-10."""
    return [(int(number or 0), text) for text, number in re.findall(r"(\D*)(\d*)", name)]


def contents(paths: Sequence[Path], cache: Path, text: bool = False) -> list[Content]:
    """Returns the Content of each file, from the cache if possible.

    A file is read again if its size or timestamp has changed. A file that changed less than two seconds before the cached
    reading is also read again, because a second change may have left the same timestamp. If `text` is true, files are read as
    UTF-8, and UserError is raised for a file that is not UTF-8.
    """
    cached = cache / f"contents-{sha256([VERSION, str(text), *(str(path.absolute()) for path in paths)])[:16]}.json"
    previous = read_json(cached) or {}
    entries = {str(path): _entry(path, previous.get(str(path)), text) for path in paths}
    if entries != previous:
        with suppress(UserError):        # a cache that cannot be written may still contain the tokenised files
            write_json(cached, entries)
    return [Content(*(entry[name] for name in Content._fields)) for entry in entries.values()]


def names_and_hashes(files: Sequence[tuple[str, Path]], cache: Path, text: bool = False) -> list[str]:
    """Returns the name and the SHA-256 of each file in one list [name, hash, name, hash, ...], which identifies a source."""
    file_contents = contents([path for _, path in files], cache, text)
    return [part for (name, _), content in zip(files, file_contents, strict=True) for part in (name, content.sha256)]


def size_and_mtime(path: Path) -> list[int]:
    """Returns the size of a file in bytes and its modification time in ns. Raises UserError if the file is missing."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"data.path={path} cannot be read: {error.strerror}") from None
    return [status.st_size, status.st_mtime_ns]


def is_unchanged(path: Path, entry: JsonObject) -> bool:
    """Returns True if the size and the timestamps prove that the file has not changed since `entry` was created."""
    return size_and_mtime(path) == entry["stamp"] and entry["stamp"][1] + SETTLED < entry["time"]


def crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _entry(path: Path, previous: JsonObject | None, text: bool) -> JsonObject:
    if previous and is_unchanged(path, previous):
        return previous
    now = time.time_ns()
    return {"stamp": size_and_mtime(path), "time": now, **_read_content(path, text)._asdict()}


def _read_content(path: Path, text: bool) -> Content:
    hashed = hashlib.sha256()
    if not text:
        with open_file(path) as file:
            while block := file.read(BLOCK):
                hashed.update(block)
        return Content(hashed.hexdigest(), 0, 0)
    characters = 0
    hashed_text = Fingerprint()
    for chunk in chunks(path, hashed.update):
        characters += len(chunk)
        hashed_text.update(chunk)
    return Content(hashed.hexdigest(), characters, hashed_text.value())


def _glob(pattern: str) -> Iterator[Path]:
    """Yields what glob.glob(recursive=True) yields, but `**` visits each folder only once, even if links form a cycle."""
    before, *after = ANY_DEPTH.split(pattern, maxsplit=1)
    if not after:
        yield from map(Path, glob.glob(pattern))                     # noqa: PTH207
        return
    for top in glob.glob(before or "."):                             # noqa: PTH207
        for folder in _visible_folders(Path(top)):
            yield from _glob(f"{glob.escape(str(folder))}/{after[0] or '*'}")


def _visible_folders(top: Path) -> Iterator[Path]:
    """Yields `top` and each folder below it that is not hidden, once: by its own path if possible, otherwise by a link's."""
    visited: set[Path] = set()
    pending = [top]
    links: list[Path] = []
    while pending or links:
        folder = (pending or links).pop()
        if folder.resolve() not in visited:
            visited.add(folder.resolve())
            yield folder
            below = [folder / name for name in sorted(glob.glob("*/", root_dir=folder))]              # noqa: PTH207
            pending += [path for path in below if not path.is_symlink()]
            links += [path for path in below if path.is_symlink()]


def _unique_files(files: Iterable[Path]) -> list[Path]:
    unique: dict[Path, Path] = {}
    for file in sorted(set(files), key=lambda file: (file.is_symlink(), file)):
        unique.setdefault(file.resolve(), file)
    return sorted(unique.values())


def _no_files_message(path: str, endings: Sequence[str]) -> str:
    if Path(path).is_dir():
        return (f"the folder data.path={path} contains no {' or '.join(endings)} files. To read other files, pass a pattern, "
                f"data.path={path.rstrip('/')}/**/*.ending")
    if Path(path).exists():
        return f"data.path={path} must be a file or a folder, not a pipe or a device, because the program reads it repeatedly"
    bracket = ". In a pattern, write [[] for the character [" if "[" in path else ""
    return f"no file matches data.path={path}{bracket}"
