"""Writes a checkpoint of trainer=fsdp (rwkv/checkpoint/formats/_fsdp_folder.py) while training continues.

Each process writes a file into a folder with a temporary name. Then rank 0 marks the folder as complete and renames the folder.
If the run is killed before the mark, the previous checkpoint remains. After the mark, the new checkpoint remains.
"""

import errno
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch
from torch import distributed, futures
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from rwkv.checkpoint.formats._fsdp_folder import REST, SHARDED, Place, name_of, size_and_checksum, write_complete
from rwkv.checkpoint.location import LAST
from rwkv.distributed import fail_together, rank
from rwkv.errors import UserError, memory_message
from rwkv.io.atomic import replace_folder, write_file
from rwkv.io.json_types import StateDict

ROOM = "Make room on the disk"
REMEDIES = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM,
            errno.EFBIG: "Raise the limit on the size of a file (ulimit -f; a FAT32 disk allows 4 GB)"}


class Saving:
    """A checkpoint that is being written to `path`. The constructor copies the content and starts the writing.

    Args:
        content: a dictionary of DTensors, and of other values that are equal in all processes.
        group: a process group of all processes, for the writer threads.
        completed: a function that a writer thread of rank 0 calls after renaming the folder.
    """

    def __init__(self, content: StateDict, path: Path, group: distributed.ProcessGroup,
                 completed: Callable[[], None]) -> None:
        self.path = path
        tensors: dict[Place, DTensor] = {}
        rest = _without_shards(content, tensors)
        assert isinstance(rest, dict)
        folder = path.with_name(f".{path.name}.{content['global_step']}")
        buffer = io.BytesIO()            # training changes the content, so it is serialised now
        if rank() == 0:
            torch.save(rest | {SHARDED: list(tensors)}, buffer)

        def complete(sums: dict[str, tuple[int, int]]) -> None:
            write_file(folder / REST, lambda file: file.write(buffer.getbuffer()))
            write_complete(folder, sums | {REST: size_and_checksum(folder / REST)})
            replace_folder(folder, path)
            completed()

        copies = {name_of(place): _copy_to_host(tensor) for place, tensor in tensors.items()}
        self._future: Future[object] = dcp.async_save(       # type: ignore[assignment]
            copies, storage_writer=_Writer(folder, complete), async_stager=_NoStaging(), process_group=group)

    def wait_alone(self) -> None:
        """Waits until the writing has succeeded or failed. Call this method in a process that exits with an error."""
        self._future.exception()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. Raises UserError if writing fails. This is a collective operation."""
        try:
            self._future.result()
        except CheckpointException as error:
            problem = next(iter(error.failures.values()))[0]
            if "peer" in str(problem):   # gloo reports that another process has ended
                raise RuntimeError(str(problem)) from None
            fail_together(write_error(self.path, problem))


def _copy_to_host(tensor: DTensor) -> DTensor:
    # Muon's momenta are views of one storage, and torch's own copy of a view would include the whole storage
    on_cpu = tensor.to_local().device.type == "cpu"
    copied = tensor.detach().clone() if on_cpu else tensor.detach().cpu()
    assert isinstance(copied, DTensor)
    return copied


class _NoStaging(AsyncStager):
    """A stager for torch's async_save that copies nothing, because the tensors are copies already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: StateDict) -> StateDict:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class _Writer(HuggingFaceStorageWriter):
    """Writes the shards. After all processes have written, rank 0 calls complete(sums).

    `sums` maps the name of each file to the result of size_and_checksum.
    """

    def __init__(self, folder: Path, complete: Callable[[dict[str, tuple[int, int]]], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self._complete = complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        sums = {name: size_and_checksum(self._folder / name) for name in names}
        done: futures.Future[list[WriteResult]] = futures.Future()
        done.set_result([replace(result, storage_data=sums) for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._complete({name: size for written in results for result in written for name, size in result.storage_data.items()})


def _without_shards(content: object, tensors: dict[Place, DTensor], place: Place = ()) -> object:
    """Moves the DTensors of nested dictionaries and lists into `tensors`, and returns a copy of `content` without them."""
    if isinstance(content, dict):
        return {key: _without_shards(value, tensors, (*place, key)) for key, value in _move_tensors(content, tensors, place)}
    if isinstance(content, list):
        return [_without_shards(value, tensors, (*place, number)) for number, value in enumerate(content)]
    return content


def _move_tensors(content: dict[str | int, object], tensors: dict[Place, DTensor],
                  place: Place) -> Iterator[tuple[str | int, object]]:
    for key, value in content.items():
        if isinstance(value, DTensor):
            tensors[*place, key] = value
        else:
            yield key, value


def write_error(path: Path, error: BaseException) -> UserError:
    """Returns the error for a checkpoint that cannot be written."""
    cause = _root_cause(error)
    no_memory = memory_message(cause)
    reason = no_memory or getattr(cause, "strerror", None) or str(error).splitlines()[0]
    remedy = "Free memory" if no_memory else ROOM
    if isinstance(cause, OSError):
        remedy = REMEDIES.get(cause.errno or 0, "Fix this error")
    intact = " Earlier checkpoints are intact." if any(path.parent.glob("*.ckpt")) else ""
    return UserError(f"the checkpoint {path.parent / LAST.name} cannot be written: {reason}.{intact} {remedy}, then continue "
                     f"with resume=auto {quote(f'out_dir={path.parent.parent}')}")


def _root_cause(error: BaseException) -> BaseException:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
