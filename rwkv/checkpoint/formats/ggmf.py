"""Reads and writes ggmf, rwkv.cpp's format, in FP32 and FP16: versions 100 and 101, which differ only in quantised tensors.

    header    magic 0x67676d66, version, n_vocab, n_embed, n_layer, data_type                    int32 each
    tensor    dim_count, key_length, data_type, the shape with its dimensions reversed, key, data        until the end

FP16 files store vectors, and RWKV-7's r_k, in FP32. RWKV-4's vectors are [C]. RWKV-7's vectors have the shapes of RWKV-LM's
.pth files; rwkv/checkpoint/rwkv7.py describes other differences of RWKV-7's files. time_decay is stored as -exp(time_decay),
rounded to float32 by torch.exp. Reading a file and writing it again preserves these values bit for bit. Writing time_decay and
reading it again may change it by less than 1e-7 (relative to values above 1), to a number with the same float32 exponential.
Integers and floats are little endian. Source: RWKV/rwkv.cpp, docs/FILE_FORMAT.md and python/convert_pytorch_to_ggml.py.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from rwkv.checkpoint.content import Content, Outgoing
from rwkv.checkpoint.formats import first_bytes
from rwkv.checkpoint.generations import generation_of
from rwkv.checkpoint.lazy_tensors import DTYPES as DTYPES_BY_NAME
from rwkv.checkpoint.lazy_tensors import Stored, bytes_view, release
from rwkv.checkpoint.mapping import map_file
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file

SUFFIXES = (".ggmf", ".bin")
MAGIC = 0x67676D66
VERSIONS = (100, 101)
HEADER = struct.Struct("<6I")
TENSOR = struct.Struct("<3I")
DTYPES = (torch.float32, torch.float16)
BLOCK_TYPES = {2: "Q4_0", 3: "Q4_1", 4: "Q4_1_O", 5: "Q4_2", 6: "Q4_3", 7: "Q5_0", 8: "Q5_1", 9: "Q8_0"}
LONGEST_KEY = 256
DECAY = ".time_decay"


def recognises(path: Path) -> bool:
    return path.is_file() and first_bytes(path, 4) == struct.pack("<I", MAGIC)


def read(path: Path) -> Content:
    with path.open("rb") as file:
        declared = _read_header(path, file)
        length = path.stat().st_size
        bytes_ = map_file(path)
        tensors: dict[str, Stored] = {}
        while file.tell() < length:
            tensor = _read_tensor(path, file, bytes_)
            if tensor.name in tensors:
                raise CheckpointError(f"{path} contains the tensor {tensor.name} twice: the file is ambiguous")
            tensors[tensor.name] = tensor
    return Content(path, tensors, declared=declared)


def dtype_for(tensor: Stored, group: str, dtype: str | None) -> torch.dtype:
    """Returns the dtype to write a tensor of this group in; only matrices may be FP16. Raises UserError for other dtypes."""
    if group == "vector":
        return torch.float32
    chosen = DTYPES_BY_NAME[dtype] if dtype else tensor.dtype
    if chosen not in DTYPES:
        raise UserError("the dtype of a ggmf file must be float32 or float16; got "
                        f"{dtype or str(tensor.dtype).removeprefix('torch.')}")
    return chosen


def write(path: Path, outgoing: Outgoing) -> None:
    write_file(path, lambda file: _write(file, outgoing))


def _write(file: BinaryIO, outgoing: Outgoing) -> None:
    config = outgoing.config
    dtype = outgoing.tensors["emb.weight"].dtype
    file.write(HEADER.pack(MAGIC, VERSIONS[-1], outgoing.vocab_size, config.n_embd, config.n_layer, DTYPES.index(dtype)))
    for tensor in generation_of(config).to_format_layout(outgoing.tensors, "ggmf").values():
        shape = tensor.shape[-1:] if ".time_" in tensor.name else tensor.shape           # RWKV-4's [1,1,C] becomes [C]
        key = tensor.name.encode()
        file.write(TENSOR.pack(len(shape), len(key), DTYPES.index(tensor.dtype)))
        file.write(struct.pack(f"<{len(shape)}I", *reversed(shape)) + key)
        is_decay = tensor.name.endswith(DECAY)
        tensor.pass_on(lambda data, is_decay=is_decay: file.write(bytes_view(stored_decay(data) if is_decay else data)))


def stored_decay(decay: Tensor) -> Tensor:
    """Returns the values that rwkv.cpp stores for time_decay."""
    return -torch.exp(decay)


def raw_decay(stored: Tensor) -> Tensor:
    """Returns the float32 time_decay whose stored_decay is closest to `stored`, and usually equal.

    The rounded logarithm may be off by one or two steps, so the two floats on each side are tried, too.
    """
    logarithm = torch.log(-stored.double()).float()
    candidates = [logarithm]
    for direction in (math.inf, -math.inf):
        neighbour = logarithm
        for _ in range(2):
            neighbour = torch.nextafter(neighbour, torch.full_like(neighbour, direction))
            candidates.append(neighbour)
    candidate = torch.stack(candidates)
    distance = (stored_decay(candidate).double() - stored.double()).abs()
    return candidate.gather(0, distance.argmin(0, keepdim=True))[0]


def _read_header(path: Path, file: BinaryIO) -> dict[str, int]:
    magic, version, n_vocab, n_embd, n_layer, dtype = HEADER.unpack(_read(path, file, HEADER.size))
    assert magic == MAGIC
    if version not in VERSIONS:
        raise CheckpointError(f"{path} is a ggmf file with version {version}, but this program reads versions {VERSIONS[0]} "
                              f"and {VERSIONS[1]}: the file is damaged, or newer than this program")
    _dtype(path, dtype, "the header")
    return {"vocab_size": n_vocab, "n_embd": n_embd, "n_layer": n_layer}


def _read_tensor(path: Path, file: BinaryIO, bytes_: Tensor) -> Stored:
    """Reads the header of the next tensor and skips its data, which stays in the mapping `bytes_`."""
    dim_count, key_length, dtype_index = TENSOR.unpack(_read(path, file, TENSOR.size))
    if not 1 <= dim_count <= 3 or not 1 <= key_length <= LONGEST_KEY:
        raise CheckpointError(f"{path} is damaged: the tensor header at byte {file.tell() - TENSOR.size} is invalid ("
                              f"{dim_count} dimensions, a name of {key_length} bytes)")
    shape = struct.unpack(f"<{dim_count}I", _read(path, file, 4 * dim_count))[::-1]
    name = _read(path, file, key_length).decode("utf-8", "backslashreplace")
    dtype = _dtype(path, dtype_index, name)
    start = file.tell()
    end = start + math.prod(shape) * dtype.itemsize
    if end > len(bytes_) or end == start:
        raise CheckpointError(f"{path} has {len(bytes_) - start} bytes left, but {name} {shape} requires {end - start}: the "
                              "file is truncated or damaged. Copy or download the file again")
    file.seek(end)
    data = bytes_[start:end]
    return Stored(name, str(path), shape, dtype, lambda: _copy_data(str(path), name, data, dtype))


def _copy_data(path: str, name: str, mapped: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies the tensor's data, because it may not be aligned in the file."""
    copy = mapped.clone().view(dtype)
    release(mapped)
    if not name.endswith(DECAY):
        return copy
    if not bool((copy < 0).all()):
        raise CheckpointError(f"{path}: all values of {name} must be negative, because they are -exp(time_decay). The file is "
                              "damaged, or was converted incorrectly")
    return raw_decay(copy.float()).to(dtype)


def _dtype(path: Path, index: int, subject: str) -> torch.dtype:
    if index < len(DTYPES):
        return DTYPES[index]
    kind = f"quantised ({BLOCK_TYPES[index]})" if index in BLOCK_TYPES else f"of the unknown type {index}"
    raise CheckpointError(f"{path}: {subject} is {kind}, but must be FP32 or FP16: use the FP32 or FP16 file that this file "
                          "was made from")


def _read(path: Path, file: BinaryIO, count: int) -> bytes:
    read = file.read(count)
    if len(read) < count:
        raise CheckpointError(f"{path} is truncated: the file ends in the middle of a header. Copy or download the file again")
    return read
