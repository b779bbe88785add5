"""The header of a GGUF file: metadata by key, and where each tensor's data lies.

    magic "GGUF", version 3, number of tensors, number of metadata                uint32, uint32, uint64, uint64
    metadata    key, type, value        an array is the type of its elements, their number, and the elements
    tensor      name, number of dimensions, dimensions from the innermost, type, place from the start of the data
    data        from the next multiple of general.alignment (32), each tensor at a multiple of it

A string is its length and UTF-8. Everything is little endian. Source: ggml, docs/gguf.md. The package gguf's reader is not
used: it goes on past the end of a damaged file, and takes 15 times as long for the World vocabulary. Types other than those of
PLAIN there are the package's to describe and to dequantise (_gguf_types.py).
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from rwkv.checkpoint.formats._gguf_types import block_of
from rwkv.errors import CheckpointError

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT_KEY, ALIGNMENT = "general.alignment", 32
MOST_DIMENSIONS = 4


class Described(NamedTuple):
    """A tensor's name, shape, type and the bytes of the file that hold it."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    end: int


def read_header(path: Path, data: memoryview) -> tuple[dict[str, Any], list[Described]]:
    """The metadata and the tensors of the file whose bytes are `data`. Raises CheckpointError."""
    cursor = _Cursor(path, data)
    magic, version, n_tensors, n_metadata = cursor.unpack("4sIQQ")
    assert magic == MAGIC
    if version not in VERSIONS:
        raise CheckpointError(f"{path} is a GGUF file of version {version}, expected {VERSIONS[-1]}: it is damaged, big "
                              "endian, or newer than this program")
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path} states {key} twice: the file is damaged")
        metadata[key] = cursor.value(*cursor.unpack("I"))
    return metadata, _tensors(path, cursor, n_tensors, metadata.get(ALIGNMENT_KEY, ALIGNMENT))


def _tensors(path: Path, cursor: "_Cursor", count: int, alignment: Any) -> list[Described]:
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} has {ALIGNMENT_KEY} {alignment!r}, expected a power of two from 8: the file is damaged")
    described = [_tensor(path, cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    placed = [tensor._replace(start=start + tensor.start, end=start + tensor.end) for tensor in described]
    for tensor in placed:
        if tensor.start % alignment or tensor.end > len(cursor.data):
            raise CheckpointError(f"{path} has {len(cursor.data)} bytes, and {tensor.name} {tensor.shape} is said to be in "
                                  f"bytes {tensor.start} to {tensor.end}: it is truncated or damaged; copy it again")
    return placed


def _tensor(path: Path, cursor: "_Cursor") -> Described:
    """The next tensor, its place counted from the start of the data."""
    name = cursor.string()
    (n_dimensions,) = cursor.unpack("I")
    if not 1 <= n_dimensions <= MOST_DIMENSIONS:
        raise CheckpointError(f"{path}: {name} has {n_dimensions} dimensions, expected 1 to {MOST_DIMENSIONS}: the file is "
                              "damaged")
    shape = cursor.unpack(f"{n_dimensions}Q")[::-1]
    number, start = cursor.unpack("IQ")
    type_, elements, nbytes = block_of(number, f"{path}: {name}")
    if shape[-1] % elements or 0 in shape:
        raise CheckpointError(f"{path}: {name} is {shape} in {type_}, expected rows of a multiple of {elements}: the file is "
                              "damaged")
    return Described(name, shape, type_, start, start + math.prod(shape) // elements * nbytes)


class _Cursor:
    """Reads values one after another from `data`, never beyond its end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

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
            raise CheckpointError(f"{self.path} has a text in its header that is not UTF-8 ({error}): the file is "
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
            raise CheckpointError(f"{self.path} has an array of the type {type_} in its header, expected numbers or texts: the "
                                  "file is damaged, or newer than this program")
        return [self.string() for _ in range(count)]
