"""Maps checkpoints into memory, including files that are larger than the memory.

Changes to a mapped tensor stay in memory: the mapping is private. Linux refuses a private mapping that exceeds memory and swap
unless it has the flag MAP_NORESERVE, which torch does not set. Source: the Linux kernel's documentation, overcommit-accounting.
"""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from rwkv.errors import CheckpointError

MAP_NORESERVE = 0x4000                   # Python's mmap has this constant only since 3.12 or 3.13, depending on the system
FROM_FILE = UntypedStorage.from_file
LOCK = RLock()


def map_file(path: str | Path) -> Tensor:
    """Returns the bytes of a non-empty file as a mapped tensor (n,) uint8. Raises CheckpointError if the system refuses."""
    with Path(path).open("rb") as file:
        try:
            if sys.platform == "win32":
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            else:
                flags = mmap.MAP_PRIVATE | (MAP_NORESERVE if sys.platform == "linux" else 0)
                mapped = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:           # ValueError: the file is empty
            raise CheckpointError(f"{path} cannot be mapped into memory: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def part_of(mapped: Tensor, start: int, stop: int) -> Tensor:
    """Returns bytes of a mapped file as a tensor with its own storage, because torch.save and pickle write whole storages."""
    return torch.from_numpy(mapped.numpy()[start:stop])


@contextmanager
def torch_maps_large_files() -> Iterator[None]:
    """Makes torch.load(mmap=True) and the library safetensors map files with map_file."""
    def from_file(filename: str, shared: bool, nbytes: int = 0) -> UntypedStorage:
        return cast(UntypedStorage, FROM_FILE(filename, shared, nbytes)) if shared else map_file(filename).untyped_storage()

    with LOCK:
        UntypedStorage.from_file = staticmethod(from_file)               # type: ignore[method-assign]
        try:
            yield
        finally:
            UntypedStorage.from_file = FROM_FILE                         # type: ignore[method-assign]
