"""Checks before a run starts that the run fits into this machine's free memory and onto the disk."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.machine.memory import available_memory, resident_memory
from rwkv.checkpoint.location import FOLDER
from rwkv.config import TrainConfig
from rwkv.distributed import world_size
from rwkv.errors import UserError
from rwkv.io.atomic import size_on_disk
from rwkv.model.base import n_parameters
from rwkv.training.memory.estimate import (
    FLOAT,
    Memory,
    checkpoint_bytes,
    estimate,
    format_bytes,
    frozen_bytes,
    n_checkpoints,
)
from rwkv.training.memory.remedies import remedies


class Needs(NamedTuple):
    """A run's configuration, and the memory that each of its processes needs on `device`."""

    config: TrainConfig
    vocab_size: int
    device: torch.device
    memory: Memory

    @property
    def sharing(self) -> int:
        """Returns the number of processes that share the memory of `device`: all of this machine on a CPU, one on a GPU."""
        return world_size() // self.config.trainer.num_nodes if self.device.type == "cpu" else 1


def needs_here(config: TrainConfig, vocab_size: int, device: torch.device) -> Needs:
    return Needs(config, vocab_size, device, estimate(config, vocab_size, world_size()))


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Returns the bytes that can still be allocated on `device`, or None if the number is unknown.

    The number respects the memory limit of a container. `root` is the folder that contains proc/ and sys/.
    """
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory(root)


def free_disk(folder: Path) -> int:
    """Returns the bytes that can be written into `folder`. The folder need not exist."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_capacity(needs: Needs, out_dir: Path, is_fixed: Callable[[str], bool] | None = None) -> None:
    """Raises UserError if the run needs more memory than this machine has free, or more disk space than out_dir has free.

    `is_fixed` returns True for the options that a resumed run must keep. None stands for a new run.
    """
    config, vocab_size, device, memory = needs
    if device.type == "cuda":            # each process builds the whole model in host memory before moving it to a GPU
        processes = world_size() // config.trainer.num_nodes
        weights = FLOAT * n_parameters(config.model, vocab_size)
        _require_memory(processes * weights, torch.device("cpu"), processes, "use a smaller model=")
    _require_memory(needs.sharing * memory.least, device, needs.sharing, _advice(needs, is_fixed))
    _require_disk(config, out_dir, vocab_size)


def _require_memory(need: int, device: torch.device, processes: int, remedy: str) -> None:
    free = free_memory(device)
    if free is not None and need > free:
        where = "the GPU" if device.type == "cuda" else "this machine"
        used = _resident_bytes(device, processes)
        already = f", {format_bytes(used)} of it already in use" if used else ""
        raise UserError(f"training needs at least {format_bytes(need + used)} of memory{already}, but {where} has only "
                        f"{format_bytes(free)} free: {remedy}")


def _resident_bytes(device: torch.device, processes: int) -> int:
    return processes * resident_memory() if device.type == "cpu" else 0          # a GPU holds no part of the run yet


def _require_disk(config: TrainConfig, out_dir: Path, vocab_size: int) -> None:
    reusable = sum(map(size_on_disk, (out_dir / FOLDER).glob("*.ckpt")))         # the run replaces earlier checkpoints
    need, free = checkpoint_bytes(config, vocab_size), free_disk(out_dir) + reusable
    if need > free:
        raise UserError(f"{n_checkpoints(config.trainer.keep_last)} checkpoints need {format_bytes(need)} of disk space, but "
                        f"only {format_bytes(free)} is free at {out_dir}. Delete some files, set out_dir= to a folder on "
                        "another disk, or use trainer.keep_last=1")


def _advice(needs: Needs, is_fixed: Callable[[str], bool] | None) -> str:
    """Returns the first remedy with which the run fits, or else an option to reduce."""
    config, vocab_size, device, memory = needs
    free = free_memory(device)
    for options, need in remedies(config, vocab_size, world_size(), device.type, is_fixed=is_fixed):
        total = needs.sharing * need
        if free is not None and total <= free:
            return f"training needs only {format_bytes(total + _resident_bytes(device, needs.sharing))} with {options}"
    if 2 * memory.workers > memory.total:
        return "use a smaller data.num_workers="
    if is_fixed is not None:
        return "resume the run on a machine with more free memory, or start a smaller run with init_from="
    if free is None or needs.sharing * memory.fixed < free:
        return "use a smaller data.batch_size= or model.ctx_len="
    adapters = config.tune.method == "lora" and memory.gradients > frozen_bytes(config, vocab_size)
    return "use a smaller tune.rank=" if adapters else "use a smaller model="
