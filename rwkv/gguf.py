"""The metadata at the beginning of a GGUF file, llama.cpp's format.

    magic "GGUF", version 3, number of tensors, number of metadata entries        uint32, uint32, uint64, uint64
    metadata    key, type, value        an array is stored as the type of its elements, their number, and the elements

A string is stored as the number of its UTF-8 bytes, and the bytes. All numbers are little endian. Source: ggml, docs/gguf.md.
The reader in the package gguf is not used: that reader reads past the end of a damaged file, and takes 15 times as long for the
World vocabulary.
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
HEADERS = 4                              # number of cached headers: each part of a model has a header


class Header(NamedTuple):
    """A file's header. end: the offset at which the metadata end and the tensor descriptions begin."""

    metadata: dict[str, Any]
    n_tensors: int
    end: int


def header_of(path: Path) -> Header:
    """The header of a GGUF file, cached until the file changes. The metadata are shared: callers must not change them.

    Raises CheckpointError if the file is damaged.
    """
    stat = path.stat()
    return _header(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=HEADERS)
def _header(path: Path, *_version: int) -> Header:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it is damaged, or its download is incomplete")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            cursor = Cursor(path, data)
            metadata, n_tensors = cursor.metadata()
            return Header(metadata, n_tensors, cursor.at)


def parts_of(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The files of a model, in order. path, metadata: any one of its files. Raises CheckpointError if a file is missing."""
    count = metadata.get(SPLIT_COUNT, 1)
    if count in (0, 1):                  # 0 is what llama-gguf-split --merge writes
        return [path]
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or not isinstance(count, int) or int(match["count"]) != count:
        raise CheckpointError(f"{path} is one of {count} parts of a model, which must be named NAME-00001-of-{count:05}.gguf "
                              "and so on: restore these names")
    parts = [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts of a model, and {missing[0]} is not beside it: is the download "
                              "incomplete?")
    return parts


class Cursor:
    """Reads consecutive values from `data`, never beyond its end."""

    def __init__(self, path: Path, data: memoryview, at: int = 0) -> None:
        self.path = path
        self.data = data
        self.at = at

    def metadata(self) -> tuple[dict[str, Any], int]:
        """Reads a file from its beginning: the metadata, and the number of tensors."""
        _, version, n_tensors, n_metadata = self.unpack("4sIQQ")
        if version not in VERSIONS:
            reason = ("it is an early version: convert the model again" if version < VERSIONS[0] else
                      "it is for big-endian machines" if not version % 2**16 else "it is newer than this program, or damaged")
            raise CheckpointError(f"{self.path} is a GGUF file of version {version}, expected {VERSIONS[-1]}: {reason}")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path} states {key} twice: the file is damaged")
            metadata[key] = self.value(*self.unpack("I"))
        return metadata, n_tensors

    def unpack(self, format: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{format}")
        return layout.unpack(self.take(layout.size))

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise CheckpointError(f"{self.path} ends in its header: it is truncated or damaged; copy or download it again")
        self.at += count
        return self.data[self.at - count:self.at]

    def string(self) -> str:
        text = bytes(self.take(*self.unpack("Q")))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} has a string in its header that is not UTF-8 ({error}): the file is "
                                  "damaged") from error

    def value(self, type_: int) -> Any:
        if type_ == STRING:
            return self.string()
        if type_ == ARRAY:
            return self.array(*self.unpack("IQ"))
        if type_ not in SCALARS:
            raise CheckpointError(f"{self.path} has a value of the unknown type {type_} in its header: the file is damaged")
        return self.unpack(SCALARS[type_])[0]

    def array(self, type_: int, count: int) -> list[Any]:
        if type_ in SCALARS:
            size = struct.calcsize(f"<{SCALARS[type_]}")
            return [value for value, in struct.iter_unpack(f"<{SCALARS[type_]}", self.take(size * count))]
        if type_ != STRING:
            raise CheckpointError(f"{self.path} has an array of the type {type_} in its header, expected numbers or strings: "
                                  "the file is damaged, or newer than this program")
        return [self.string() for _ in range(count)]
