"""Reads and writes .safetensors: tensors by official name, and the entry `timemix` as JSON in the metadata.

    8 bytes: N, little endian      N bytes: JSON {name: {dtype, shape, data_offsets}}      the data, in that order

_packed.py describes int8 and int4. Source: huggingface/safetensors, README. That library reads files and checks the header.
This module writes them, one tensor at a time.
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
from rwkv.checkpoint.formats import _packed, first_bytes, require_no_pointer
from rwkv.checkpoint.lazy_tensors import Stored, bytes_view, is_counter
from rwkv.checkpoint.mapping import torch_maps_large_files
from rwkv.errors import CheckpointError
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject

SUFFIXES = (".safetensors",)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
          "I8": torch.int8, "I16": torch.int16}
LENGTH = struct.Struct("<Q")             # the header's length
ALIGNMENT = 64                           # a cache line and the widest vector register have this many bytes
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def recognises(path: Path) -> bool:
    return path.is_file() and first_bytes(path, 9)[8:] == b"{"


def read(path: Path) -> Content:
    require_no_pointer(path)
    try:
        with torch_maps_large_files():
            file = safe_open(path, "pt")
        metadata = file.metadata() or {}
        names = [name for name in file.keys() if not is_counter(name, file.get_slice(name).get_shape())]  # noqa: SIM118
        tensors = {name: _stored_tensor(path, file, name) for name in names}
    except (CheckpointError, OSError):   # OSError: the file system cannot map files into memory, for example
        raise
    except Exception as error:           # the library raises exceptions of many classes
        raise CheckpointError(f"{path} cannot be read as .safetensors: the file is truncated, damaged or in a newer format "
                              f"({error}). Copy or download the file again") from error
    entry = entry_in(path, metadata)
    _packed.require_known_version(path, entry)
    tensors, packed = _packed.join_packed(_packed.by_output(tensors))
    return Content(path, tensors, entry, packed=packed)


def write(path: Path, outgoing: Outgoing) -> None:
    tensors, entry = list(outgoing.tensors.values()), outgoing.entry
    format = outgoing.quantised or ("bfloat16" if outgoing.by_input else None)
    if format is not None:
        tensors = _packed.packed_tensors(outgoing) if outgoing.quantised else _packed.tensors_by_input(outgoing)
        entry = entry | {"packed": {"form": format, "version": _packed.version(outgoing)}}
    write_file(path, lambda file: write_tensors(file, tensors, {ENTRY: json.dumps(entry)}))


def write_tensors(file: BinaryIO, tensors: Iterable[Stored], metadata: dict[str, str]) -> None:
    """Writes tensors so that as many as possible begin at a multiple of ALIGNMENT, although the format allows no gaps.

    Tensors whose size is not a multiple of ALIGNMENT are last, the widest dtypes first, so that each tensor is aligned to its
    element size.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.nbytes % ALIGNMENT and ALIGNMENT - tensor.dtype.itemsize)
    header: JsonObject = {"__metadata__": {"format": "pt"} | metadata}
    end = 0
    for tensor in ordered:
        start = end
        end += tensor.nbytes
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH.size + len(text)) % ALIGNMENT)
    file.write(LENGTH.pack(len(text)) + text)
    for tensor in ordered:
        tensor.pass_on(lambda data: file.write(bytes_view(data)))


def _stored_tensor(path: Path, file: Any, name: str) -> Stored:
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
        except Exception as error:       # the library detects some kinds of damage only here
            raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error})") from error

    return tensor
