"""Reads the header of a GGUF file: the metadata (rwkv/gguf.py), and the offset of each tensor's data.

    tensor      name, number of dimensions, dimensions from the innermost, type, offset from the start of the data
    data        at the next multiple of general.alignment (32), each tensor at a multiple of it

Source: ggml, docs/gguf.md. _gguf_types.py describes the types.
"""

import math
from pathlib import Path
from typing import NamedTuple

from rwkv.checkpoint.formats._gguf_types import block_type
from rwkv.errors import CheckpointError
from rwkv.gguf import Cursor, gguf_header
from rwkv.io.json_types import JsonObject

ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
MOST_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """A tensor's name, shape and type. The tensor's data is the file's bytes from `start` to `end`."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    end: int


def read_header(path: Path, data: memoryview) -> tuple[JsonObject, list[TensorInfo]]:
    """Reads the metadata and the tensors' headers from the file's bytes. Raises CheckpointError if the header is damaged."""
    metadata, n_tensors, end = gguf_header(path)
    alignment = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} is damaged: {ALIGNMENT_KEY} must be a power of two >= 8; got {alignment!r}")
    cursor = Cursor(path, data, end)
    relative = [_read_tensor(path, cursor) for _ in range(n_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors = [tensor._replace(start=start + tensor.start, end=start + tensor.end) for tensor in relative]
    for tensor in tensors:
        if tensor.start % alignment or tensor.end > len(cursor.data):
            raise CheckpointError(f"{path} has {len(cursor.data)} bytes, but its header places {tensor.name} {tensor.shape} at "
                                  f"bytes {tensor.start} to {tensor.end}: the file is truncated or damaged. Copy the "
                                  "file again")
    return metadata, tensors


def _read_tensor(path: Path, cursor: Cursor) -> TensorInfo:
    """Reads the next tensor's header. The start and end are relative to the start of the data."""
    name = cursor.string()
    (n_dimensions,) = cursor.unpack("I")
    if not 1 <= n_dimensions <= MOST_DIMENSIONS:
        raise CheckpointError(f"{path} is damaged: {name} must have 1 to {MOST_DIMENSIONS} dimensions; got "
                              f"{n_dimensions}")
    shape = cursor.unpack(f"{n_dimensions}Q")[::-1]
    number, start = cursor.unpack("IQ")
    type_, elements, nbytes = block_type(number, f"{path}: {name}")
    if shape[-1] % elements or 0 in shape:
        raise CheckpointError(f"{path} is damaged: {name} has shape {shape} and type {type_}, which requires a row length that "
                              f"is a multiple of {elements}")
    return TensorInfo(name, shape, type_, start, start + math.prod(shape) // elements * nbytes)
