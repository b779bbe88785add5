"""Reads files of torch.save without executing the pickle, and writes them one tensor at a time.

Since torch 1.6 they are zips of uncompressed entries. data.pkl has the structure and refers to storages by number. data/0,
data/1, ... are the storages, aligned to 64 bytes so that they can be mapped. version and byteorder follow. Source: PyTorch,
torch/serialization.py and caffe2/serialize/inline_container.cc.
"""

import errno
import io
import math
import pickle
import struct
import sys
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor, _utils

from rwkv.checkpoint.formats import first_bytes
from rwkv.checkpoint.formats._packed import SCALE
from rwkv.checkpoint.lazy_tensors import Stored, bytes_view, is_counter
from rwkv.checkpoint.mapping import torch_maps_large_files
from rwkv.errors import CheckpointError

ZIP = b"PK"
PICKLES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
ALIGNMENT = 64
PADDING_ID = 0x4246                      # "FB" marks the zip extra field that pads to a multiple of ALIGNMENT
LOCAL_HEADER = 30                        # zip's local file header has this many bytes before the name
LENGTHS = struct.Struct("<HH")           # the header's last fields are the lengths of the name and of the extra fields
READ_BYTES = 1 << 20                     # a checksum is computed over this many bytes at a time
FIELD_HEADER = 4                         # an extra field's header has this many bytes
EPOCH = (1980, 1, 1, 0, 0, 0)            # this is zip's earliest date, fixed so that equal weights give equal files
OTHER_OBJECTS = "Unsupported"            # torch's message contains this if it refuses to execute a class or operation
LATER_PROTOCOL = "Unsupported operand"   # torch's message contains this if the operation is from a later protocol than 2
Dictionary = dict[Any, Any]              # the content of a file written by torch.save
STORAGES = {torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage, torch.bfloat16: torch.BFloat16Storage}


def recognises(path: Path) -> bool:
    """Returns True if the file is a zip, or a pickle as torch.save wrote it before version 1.6."""
    return path.is_file() and first_bytes(path, 2) in (ZIP, *PICKLES)


def load(path: Path) -> Dictionary:
    """Reads the file's dictionary, and executes nothing; a zip's tensors are mapped. Raises CheckpointError for other files."""
    if path.suffix == ".safetensors":    # torch.load would read it with the library safetensors
        raise CheckpointError(f"{path} is not a safetensors file, but one of torch.save: rename it to .pth, or in a Hugging "
                              "Face directory to pytorch_model.bin")
    mapped = first_bytes(path, 2) == ZIP
    if mapped:
        _check_zip(path)
        _require_plain(path)
    try:
        with warnings.catch_warnings(), torch_maps_large_files():
            warnings.simplefilter("ignore")      # torch warns about pickles of other programs; the error below suffices
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except Exception as error:                   # torch raises no common error class for damaged files
        _raise_system_error(error)
        if LATER_PROTOCOL in str(error):
            raise CheckpointError(f"{path} must be written with pickle protocol 2, the default of torch.save: load the file in "
                                  "the program that wrote it, and save the tensors again without pickle_protocol=") from error
        if OTHER_OBJECTS in str(error):          # _require_plain cannot inspect files from before zip
            raise CheckpointError(f"{path} contains objects other than tensors, and loading such objects would execute code. "
                                  "Save only the tensors: torch.save(model.state_dict(), FILE)") from error
        raise CheckpointError(f"{path} cannot be read as a checkpoint: the file is truncated, damaged, or not made of plain "
                              "tensors written by torch.save. Other objects are rejected, because loading them would "
                              "execute code") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint: the file contains a {type(content).__name__}, not a dictionary of "
                              "tensors")
    return content


def _raise_system_error(error: Exception) -> None:
    """Raises an error of the system, such as a lost connection to a network file system: the file may be undamaged."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:       # EINVAL: a damaged file names a negative position
        raise error


def _require_plain(path: Path) -> None:
    """Raises CheckpointError if the file contains objects other than tensors and plain containers. Ignores damaged files."""
    try:
        others = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:                    # torch.load reports a damaged pickle
        return
    if others:
        raise CheckpointError(f"{path} contains objects of {', '.join(others[:3])}, and loading such objects would execute "
                              "code. Save only the tensors: torch.save(model.state_dict(), FILE)")


def weights_in(path: Path, content: Mapping[object, object]) -> Mapping[object, object]:
    """Returns the dictionary of tensors in a loaded file: `content` itself, or a dictionary nested in it.

    For {"model": weights, "step": 7} and {**weights, "step": 7}, for example, returns `weights`. Raises CheckpointError if
    several nested dictionaries contain tensors.
    """
    if any(map(_is_weight, content.items())):
        return {name: value for name, value in content.items() if not _is_trainer_value(name, value)}
    nested = {name: value for name, value in content.items() if isinstance(value, Mapping) and _holds_weights(value)}
    if len(nested) > 1:
        raise CheckpointError(f"{path} has several sets of weights ({', '.join(map(str, nested))}): save each set in its own "
                              "file")
    return weights_in(path, *nested.values()) if nested else content


def _holds_weights(content: Mapping[object, object]) -> bool:
    """Returns True if a dictionary, or one nested in it, contains tensors whose names have a dot."""
    return any(_is_weight(item) or (isinstance(item[1], Mapping) and _holds_weights(item[1])) for item in content.items())


def _is_trainer_value(name: object, value: object) -> bool:
    """Returns True for a value that a trainer saves beside weights, such as the step or its configuration."""
    has_weights = isinstance(value, Mapping) and _holds_weights(value)
    return isinstance(name, str) and "." not in name and not isinstance(value, Tensor) and not has_weights


def _is_weight(item: tuple[object, object]) -> bool:
    name, value = item
    return isinstance(name, str) and "." in name and isinstance(value, Tensor)


def stored_tensors(path: Path, content: Mapping[object, object]) -> dict[str, Stored]:
    """Returns the tensors in a loaded dictionary, without counters. Raises CheckpointError if a value is not a plain tensor."""
    mapped = first_bytes(path, 2) == ZIP
    result = {}
    packed = next((name for name, tensor in content.items() if f"{name}{SCALE}" in content and isinstance(tensor, Tensor)
                   and not tensor.is_floating_point()), None)
    if packed is not None:
        raise CheckpointError(f"{path} has quantised matrices, such as {packed}, as in the state_dict() of a model in int8 or "
                              "int4: load the file by torch.load and load_state_dict(), into a model in the same dtype. For "
                              "from_pretrained, write a .safetensors file with save_pretrained or timemix convert")
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path} is not a checkpoint: the names of tensors must be strings; got {name!r}")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} is not a checkpoint: {name} is a {type(tensor).__name__}, not a tensor")
        if is_counter(name, tensor.shape):
            continue
        if not _is_plain(tensor):
            raise CheckpointError(f"{path}: {name} must be a plain tensor that stores all values of its shape "
                                  f"{tuple(tensor.shape)}. Sparse, quantised and expanded tensors are not supported")
        result[name] = Stored.of(name, str(path), tensor, mapped)
    return result


def save(file: BinaryIO, content: object) -> None:
    """Writes nested dicts and lists, whose tensors are `Stored` objects, with one tensor in memory at a time."""
    structure, tensors = pickle_structure(content)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _add_bytes(archive, "data.pkl", structure)
        _add_bytes(archive, "byteorder", sys.byteorder.encode())
        for key, tensor in enumerate(tensors):
            with _open_entry(archive, f"data/{key}", tensor.nbytes) as entry:
                tensor.pass_on(lambda data, entry=entry: entry.write(bytes_view(data)))  # type: ignore[misc]
        _add_bytes(archive, "version", b"3\n")


def pickle_structure(content: object) -> tuple[bytes, list[Stored]]:
    """Returns the content of data.pkl, and the tensors that data.pkl refers to by number."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=2)
    pickler.dump(content)
    return buffer.getvalue(), pickler.tensors


class _Storage:
    """Represents a tensor's data inside data.pkl."""

    def __init__(self, tensor: Stored) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Pickles Stored tensors as torch does: as a call of _rebuild_tensor_v2 on a storage with a persistent id."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Stored] = []

    def persistent_id(self, item: object) -> object:
        if not isinstance(item, _Storage):
            return None
        self.tensors.append(item.tensor)
        kind = STORAGES[item.tensor.dtype]
        elements = math.prod(item.tensor.shape)
        return ("storage", kind, str(len(self.tensors) - 1), "cpu", elements)

    def reducer_override(self, item: object) -> Any:
        if not isinstance(item, Stored):
            return NotImplemented
        strides = torch.empty(item.shape, device="meta").stride()
        return _utils._rebuild_tensor_v2, (_Storage(item), 0, item.shape, strides, False, OrderedDict())


def _add_bytes(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _open_entry(archive, name, len(data)) as entry:
        entry.write(data)


def _open_entry(archive: zipfile.ZipFile, name: str, size: int) -> IO[bytes]:
    entry = zipfile.ZipInfo(f"archive/{name}", EPOCH)
    entry.file_size = size
    large = FIELD_HEADER + 16 if entry.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0     # zipfile adds this for 64-bit sizes
    assert archive.fp is not None
    start = archive.fp.tell() + LOCAL_HEADER + len(entry.filename) + large + FIELD_HEADER
    padding = -start % ALIGNMENT
    entry.extra = struct.pack("<HH", PADDING_ID, padding) + bytes(padding)
    return archive.open(entry, "w")


def _check_zip(path: Path) -> None:
    """Raises CheckpointError if an entry is incomplete, has a wrong checksum or is compressed.

    torch.load checks neither length nor checksum, and a flipped bit would change a weight. torch never compresses entries,
    because it maps them. A compressed entry could be an attack, since it may expand to far more memory than the file's size.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                raise CheckpointError(f"{path} is a zip archive that torch.save did not write: unpack the archive, and pass "
                                      "the checkpoint in it")
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise CheckpointError(f"{path} is a TorchScript program, which contains code. Save only the weights: "
                                      "torch.save(model.state_dict(), FILE)")
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise CheckpointError(f"{path} is a compressed zip archive, which torch.save does not write: unpack the "
                                          "archive, and pass the checkpoint in it")
                archive.open(entry).close()              # compares the entry's header with the directory
            entries = [entry for entry in archive.infolist() if entry.CRC]       # a CRC of 0 means that torch wrote none
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                are_right = list(pool.map(partial(_has_checksum, file, Lock()), entries))
        if False in are_right:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {entries[are_right.index(False)].filename!r}")
    except CheckpointError:
        raise
    except Exception as error:           # zipfile raises many error classes for damaged files
        _raise_system_error(error)
        raise CheckpointError(f"{path} cannot be read as a checkpoint: the file is truncated or damaged ({error}). Copy or "
                              "download the file again") from error


def _has_checksum(file: io.BufferedReader, lock: Lock, entry: zipfile.ZipInfo) -> bool:
    """Returns True if the data of an uncompressed entry matches the entry's checksum.

    All threads read from one open file, under a lock, because opening the path again might open a file that has replaced it.
    """
    buffer = memoryview(bytearray(READ_BYTES))
    header_end = entry.header_offset + LOCAL_HEADER
    with lock:
        file.seek(header_end - LENGTHS.size)
        start = header_end + sum(LENGTHS.unpack(file.read(LENGTHS.size)))
    checksum = done = 0
    while done < entry.file_size:
        with lock:
            file.seek(start + done)
            count = file.readinto(buffer[:entry.file_size - done])
        if not count:
            return False
        checksum = zlib.crc32(buffer[:count], checksum)
        done += count
    return checksum == entry.CRC


def _is_plain(tensor: Tensor) -> bool:
    """Returns True if the tensor is dense, in memory, and no larger than its storage.

    A tensor with strides of 0 is larger than its storage, and could claim terabytes.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
