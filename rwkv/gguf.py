"""Reads the metadata at the beginning of a GGUF file, llama.cpp's format. The file begins with

    magic "GGUF", version 3, number of tensors, number of metadata entries        uint32, uint32, uint64, uint64
    the metadata entries: key, type, value

A string is stored as its number of UTF-8 bytes and the bytes. An array is stored as the type of its elements, their number, and
the elements. All numbers are little endian. Source: ggml, docs/gguf.md. The package gguf is not used, because its reader reads
past the end of a damaged file, and takes 15 times as long for the World vocabulary.
"""

import mmap
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rwkv.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
SPLIT_COUNT = "split.count"
SPLIT_NAME = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
HEADERS = 4                              # maximum number of cached headers; each part of a model has a header


class Header(NamedTuple):
    """The header of a GGUF file. `end` is the offset at which the metadata end and the tensor descriptions begin."""

    metadata: dict[str, Any]
    n_tensors: int
    end: int


def gguf_header(path: Path) -> Header:
    """Returns the header of a GGUF file. Raises CheckpointError if the file is damaged.

    Headers are cached until their file changes, so callers must not modify the metadata.
    """
    stat = path.stat()
    return _header(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=HEADERS)
def _header(path: Path, *_version: int) -> Header:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: the file is damaged, or its download is incomplete")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            cursor = Cursor(path, data)
            metadata, n_tensors = cursor.metadata()
            return Header(metadata, n_tensors, cursor.at)


def model_parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """Returns all files of the model to which `path` belongs, in order. Raises CheckpointError if a file is missing.

    `metadata` are those of `path`, which may be any of the files.
    """
    count = metadata.get(SPLIT_COUNT, 1)
    if count in (0, 1):                  # llama-gguf-split --merge writes 0
        return [path]
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or not isinstance(count, int) or int(match["count"]) != count:
        raise CheckpointError(f"{path} is one of {count} parts of a model. The parts must be named "
                              f"NAME-00001-of-{count:05}.gguf and so on. Rename the files to this form")
    parts = [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts of a model, but the part {missing[0]} is missing from its "
                              "folder: download that part too")
    return parts


class Cursor:
    """Reads consecutive values from `data`, never beyond its end."""

    def __init__(self, path: Path, data: memoryview, at: int = 0) -> None:
        self.path = path
        self.data = data
        self.at = at

    def metadata(self) -> tuple[dict[str, Any], int]:
        """Reads the header from the beginning of the file. Returns the metadata and the number of tensors."""
        _, version, n_tensors, n_metadata = self.unpack("4sIQQ")
        if version not in VERSIONS:
            reason = ("this version is too old. Convert the original model to GGUF again" if version < VERSIONS[0] else
                      "the file is for big-endian machines" if not version % 2**16 else
                      "the file is newer than this program, or damaged")
            raise CheckpointError(f"{self.path} must have GGUF version {VERSIONS[0]} or {VERSIONS[-1]}; got {version}: "
                                  f"{reason}")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path} is damaged: its metadata contains {key} twice")
            metadata[key] = self.value(*self.unpack("I"))
        return metadata, n_tensors

    def unpack(self, format: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{format}")
        return layout.unpack(self.take(layout.size))

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise CheckpointError(f"{self.path} is truncated or damaged: the file ends within its header. Copy or download the "
                                  "file again")
        self.at += count
        return self.data[self.at - count:self.at]

    def string(self) -> str:
        text = bytes(self.take(*self.unpack("Q")))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: a string in its header is not UTF-8 ({error})") from error

    def value(self, type_: int) -> Any:
        if type_ == STRING:
            return self.string()
        if type_ == ARRAY:
            return self.array(*self.unpack("IQ"))
        if type_ not in SCALARS:
            raise CheckpointError(f"{self.path} is damaged: a value in its header has the unknown type {type_}")
        return self.unpack(SCALARS[type_])[0]

    def array(self, type_: int, count: int) -> list[Any]:
        if type_ in SCALARS:
            size = struct.calcsize(f"<{SCALARS[type_]}")
            return [value for value, in struct.iter_unpack(f"<{SCALARS[type_]}", self.take(size * count))]
        if type_ != STRING:
            raise CheckpointError(f"{self.path} is damaged, or newer than this program: an array in its header must contain "
                                  f"numbers or strings; got the type {type_}")
        return [self.string() for _ in range(count)]
