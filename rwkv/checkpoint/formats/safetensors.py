""".safetensors: official names, and our entry as JSON in the metadata; _int4.py describes matrices in int4.

    8 bytes: N, little endian      N bytes: JSON {name: {dtype, shape, data_offsets}}      the data, in that order

Source: huggingface/safetensors, README. Its library reads files and checks the header; this module writes them, one tensor at a
time.
"""

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from rwkv.checkpoint.content import ENTRY, Content, Outgoing, entry_in
from rwkv.checkpoint.formats import _int4, first_bytes
from rwkv.checkpoint.stored import Stored, raw
from rwkv.errors import CheckpointError
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject

SUFFIXES = (".safetensors",)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def recognises(path: Path) -> bool:
    return path.is_file() and first_bytes(path, 9)[8:] == b"{"


def read(path: Path) -> Content:
    try:
        file = safe_open(path, "pt")
        metadata = file.metadata() or {}
        tensors = {name: _stored(path, file, name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except CheckpointError:
        raise
    except Exception as error:           # the library raises its own and other errors
        raise CheckpointError(f"{path} cannot be read as .safetensors: it is truncated, damaged or of a newer version "
                              f"({error}); copy or download it again") from error
    tensors, packed = _int4.joined(tensors)
    return Content(path, tensors, entry_in(path, metadata), packed=packed)


def write(path: Path, outgoing: Outgoing) -> None:
    floats, packed = _int4.outgoing(outgoing) if outgoing.quantised else (list(outgoing.tensors.values()), [])
    metadata = {ENTRY: json.dumps(outgoing.entry)}
    write_file(path, lambda file: write_tensors(file, floats, metadata, packed))


def write_tensors(file: BinaryIO, tensors: Iterable[Stored], metadata: dict[str, str], packed: Iterable[Stored] = ()) -> None:
    """Writes the widest dtypes first, so that each tensor is aligned to its element size, and `packed` last."""
    ordered = [*sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize), *packed]
    header: JsonObject = {"__metadata__": {"format": "pt"} | metadata}
    end = 0
    for tensor in ordered:
        start = end
        end += tensor.nbytes
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in ordered:
        tensor.pass_on(lambda data: file.write(raw(data)))


def _stored(path: Path, file: Any, name: str) -> Stored:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    dtype = part.get_dtype()
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: the dtype of {name} must be one of {', '.join(DTYPES)}; got {dtype}")
    return Stored(name, str(path), shape, DTYPES[dtype], _reader(path, file, name), mapped=True)


def _reader(path: Path, file: Any, name: str) -> Callable[[], Tensor]:
    def tensor() -> Tensor:
        try:
            return file.get_tensor(name)
        except Exception as error:       # the library detects some damage only now
            raise CheckpointError(f"{path}: {name} cannot be read: the file is damaged ({error})") from error

    return tensor
