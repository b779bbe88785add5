"""Reads a checkpoint of trainer=fsdp, which is a folder with one file per process, written by torch.distributed.checkpoint.

    shard-00001-....safetensors, ...     rows of the weights and of the optimiser's state, one file per process
    rest.pt                              the rest of a .ckpt's dictionary; "sharded" lists the places of the sharded tensors
    complete.json                        size and CRC-32 of every other file; written last

A place is a tuple of keys into the nested dictionary, such as ("optimizer_states", 0, "state", 3, "exp_avg"). The shards store
the tensor of that place as "optimizer_states/0/state/3/exp_avg". Reading executes no pickle.
"""

import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rwkv.checkpoint.formats import _torch_file
from rwkv.checkpoint.formats._torch_file import READ_BYTES, Dictionary
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.checkpoint.location import COMPLETE, is_sharded
from rwkv.errors import CheckpointError
from rwkv.io.atomic import write_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

REST = "rest.pt"
SHARDED = "sharded"                      # REST has the list of places under this key
WEIGHTS = "state_dict"                   # a weight's place begins with this key

Place = tuple[str | int, ...]


def recognises(path: Path) -> bool:
    return is_sharded(path)


def name_of(place: Place) -> str:
    return "/".join(map(str, place))


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Returns the size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum


def write_complete(folder: Path, sums: Mapping[str, tuple[int, int]]) -> None:
    """Writes complete.json. `sums` has the result of size_and_checksum for each other file, by name."""
    write_file(folder / COMPLETE, lambda file: file.write(json.dumps(sums).encode()))


def read_rest(folder: Path) -> Dictionary:
    """Reads the dictionary without the sharded tensors. Raises CheckpointError if a file is missing or damaged."""
    try:
        sums = json.loads((folder / COMPLETE).read_bytes())
        damaged = [name for name, expected in sums.items() if list(size_and_checksum(folder / name)) != list(expected)]
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} lacks {Path(error.filename).name}: the folder was only partly copied, or partly "
                              "deleted. Copy the checkpoint again") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / COMPLETE} is damaged ({error}): copy the checkpoint again") from None
    if damaged or REST not in sums:
        raise CheckpointError(f"{folder / (damaged or [REST])[0]} is truncated or damaged: the checksum differs from the "
                              f"checksum in {COMPLETE}. Copy the checkpoint again")
    return _torch_file.load(folder / REST)


def open_shards(folder: Path) -> "HuggingFaceStorageReader":
    """Returns torch's reader of the folder's shards, changed so that it reads their headers only once."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    headers = reader.read_metadata()
    reader.read_metadata = lambda: headers       # type: ignore[method-assign]  # torch would read them on each call
    return reader


def sizes(reader: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each sharded tensor. The keys are made by name_of."""
    return {name: (tuple(each.size), each.properties.dtype)
            for name, each in reader.read_metadata().state_dict_metadata.items()}


def read_into(reader: "HuggingFaceStorageReader", tensors: Mapping[str, Tensor]) -> None:
    """Reads shards into `tensors`, whose keys are made by name_of. A DTensor receives only this process's shard."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")          # torch warns about the missing process group
        checkpoint.load(dict(tensors), storage_reader=reader, no_dist=True)


def weights(folder: Path, places: Iterable[Place]) -> dict[str, Stored]:
    """Returns the weights among the tensors at `places`, by their names in the state_dict."""
    reader = open_shards(folder)
    shapes = sizes(reader)

    def stored(place: Place) -> Stored:
        name = name_of(place)
        shape, dtype = shapes[name]

        def data() -> Tensor:
            whole = torch.empty(shape, dtype=dtype)
            read_into(reader, {name: whole})
            return whole

        return Stored(str(place[1]), str(folder), shape, dtype, data)

    return {str(place[1]): stored(place) for place in places if place[0] == WEIGHTS}


def read(folder: Path, empty: Callable[[Place, tuple[int, ...], torch.dtype], Tensor]) -> Dictionary:
    """Returns the dictionary that a single process would have written to a .ckpt. Raises CheckpointError as read_rest does.

    `empty(place, shape, dtype)` returns a tensor, possibly a DTensor, to read into.
    """
    content = read_rest(folder)
    reader = open_shards(folder)
    shapes = sizes(reader)
    tensors = {place: empty(place, *shapes[name_of(place)]) for place in content.pop(SHARDED)}
    read_into(reader, {name_of(place): tensor for place, tensor in tensors.items()})
    for place, tensor in tensors.items():
        insert(content, place, tensor)
    return content


def read_whole(folder: Path) -> Dictionary:
    """Reads the dictionary as read() does, into ordinary tensors."""
    return read(folder, lambda place, shape, dtype: torch.empty(shape, dtype=dtype))


def value_at(content: Dictionary, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def insert(content: Any, place: Place, value: Any) -> None:
    """Stores a value in nested dictionaries and lists, and creates missing dictionaries."""
    *path, last = place
    for key in path:
        content = content.setdefault(key, {}) if isinstance(content, dict) else content[key]
    content[last] = value
