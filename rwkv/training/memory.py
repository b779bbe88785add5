"""How much memory training takes, from sizes alone: known before anything is built.

N = tokens of one batch of one process, C = n_embd, A = n_att, F = n_ffn, V vocabulary, L layers, P parameters.

    weights, gradients, and Adam's two moments         4 P floats, exactly
    activations that wait for the backward pass        N L (10 C + 5 A + 2 F), in half precision N L (7 C + 2.5 A + F)
      with activation checkpointing                    N L C, and those of one block at a time
  with tbptt=K                                     those of one segment, N/K tokens, K states of L (2 C + 3 A) a row,
                                                   and what the head reads and its gradient, 2 N C
    the loss                                           its chunk of logits three times, and the head's gradient

The counts per token are of the tensors that rwkv/{model,time_mix,channel_mix,fused,loss}.py keep; a test compares the sum with
the measured peak. Gradients of the step before live until the backward pass begins (Lightning's order).

What cannot fit is refused before it is begun: memory that training needs, and the disk that its checkpoints need.

What a machine has to spare: memory that a program may still take, and room on a disk.

A container's limit counts as well as the machine's memory, which most libraries report alone. Sources: the Linux kernel's
documentation, proc_meminfo, proc_pid_statm, cgroup-v1/memory and cgroup-v2.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.registry import names
from rwkv.config import TrainConfig
from rwkv.distributed import world_size
from rwkv.errors import UserError
from rwkv.model.base import generation, n_parameters, state_nbytes
from rwkv.model.loss import rows_at_once
from rwkv.training.checkpoints import FOLDER
from rwkv.training.run import Run

FLOAT = 4                                # bytes
MOMENTS = 2                              # of Adam
LOGITS = 3                               # of a chunk of the loss at a time: logits, their gradient, and that of the one before
SCAN_WORK, CONVOLUTION_WORK = 8, 16      # tensors (B,T,n_att) within one layer's WKV at its peak: kernels/wkv4/README.md
WORKER = 100 * 2 ** 20                   # a process that loads data, without what it shares with this one


@dataclass(frozen=True)
class Memory:
    """Bytes that a process of a run takes while it trains, beside what its programs take."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    loss: int
    workers: int

    @property
    def certain(self) -> int:
        """What no option makes smaller but fsdp."""
        return self.weights + self.gradients + self.optimiser

    @property
    def total(self) -> int:
        return self.certain + self.activations + self.loss + self.workers


def memory(config: TrainConfig, vocab_size: int, kernel: str, processes: int = 1) -> Memory:
    """Of one of `processes` that together read data.batch_size; with fsdp each has a share of the weights."""
    trainer, half = config.trainer, config.trainer.precision != "32-true"
    shards = processes if trainer.strategy == "fsdp" else 1
    weights = FLOAT * n_parameters(config.model, vocab_size) // shards
    N = config.tokens_per_step // trainer.accumulate // processes
    head, logits = FLOAT * vocab_size * config.model.n_embd, FLOAT * vocab_size * min(N, rows_at_once(vocab_size))
    loss = LOGITS * logits + (2 if half else 1) * head
    forward, backward = _activations(config, kernel, N // max(1, trainer.tbptt), half)
    activations = max(forward, backward + 2 * head - loss - weights) + (weights // 2 if half else 0) + _between(config, N)
    return Memory(weights, weights, MOMENTS * weights, activations, loss, config.data.num_workers * WORKER)


def _activations(config: TrainConfig, kernel: str, N: int, half: bool) -> tuple[int, int]:
    """When the forward pass ends, and when the backward pass is in its first layer, whose inner ones are there again."""
    model = generation(config.model)
    block = int(FLOAT * N * model.kept_for_backward(config.model, half))
    work = FLOAT * N * model.operator_width(config.model) * (CONVOLUTION_WORK if kernel in names("timex") else SCAN_WORK)
    if not config.trainer.activation_checkpointing:
        return config.model.n_layer * block, config.model.n_layer * block + work
    inputs = config.model.n_layer * FLOAT * N * config.model.n_embd
    return inputs, inputs + block + work


def _between(config: TrainConfig, N: int) -> int:
    """What there is of all segments at a time: the states between them, and the head's input with its gradient."""
    if not config.trainer.tbptt:
        return 0
    return N // config.model.ctx_len * state_nbytes(config.model) + FLOAT * 2 * N * config.model.n_embd


SURE = 0.75                              # of an estimate, that much is needed for certain
BEST, BEING_WRITTEN = 1, 1               # checkpoints beside the last ones


def require_room(run: Run, device: torch.device, kernel: str, vocab_size: int) -> None:
    """Raises ValueError, one sentence, where memory or disk cannot hold what the run is certain to need."""
    here = world_size() // run.config.trainer.num_nodes
    if device.type == "cuda":            # where it is built, each process has all of it in the machine's own memory
        _require_memory(here * FLOAT * n_parameters(run.config.model, vocab_size), torch.device("cpu"), here,
                        "take a smaller model=")
    share = 1 if device.type == "cuda" else here
    need = memory(run.config, vocab_size, kernel, world_size())
    _require_memory(share * _at_least(need), device, share, _remedy(run.config, vocab_size, kernel, device, share))
    _require_disk(run, vocab_size)


def n_checkpoints(config: TrainConfig) -> int:
    return config.trainer.keep_last + BEST + BEING_WRITTEN


def disk(config: TrainConfig, vocab_size: int) -> int:
    """Of all checkpoints that are there at a time: weights and moments in each."""
    return n_checkpoints(config) * (1 + MOMENTS) * FLOAT * n_parameters(config.model, vocab_size)


def with_options(config: TrainConfig, **options: Any) -> TrainConfig:
    return replace(config, trainer=replace(config.trainer, **options))


def in_words(size: int | None) -> str:
    if size is None:
        return "an unknown amount"
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.{1 if size < 100 * unit else 0}f} {name}"


def _require_memory(need: int, device: torch.device, processes: int, remedy: str) -> None:
    """`need`: of all `processes` on the device, beside what their programs take, which is free no longer."""
    free = free_memory(device)
    if free is not None and need > free:
        where = "the GPU" if device.type == "cuda" else "this machine"
        programs = _of_programs(device, processes)
        already = f", {in_words(programs)} of which the programs take already," if programs else ""
        raise UserError(f"training needs at least {in_words(need + programs)} of memory{already} and {where} has "
                        f"{in_words(free)} free: {remedy}")


def _of_programs(device: torch.device, processes: int) -> int:
    """What the processes take by now; nothing of a GPU, where free memory is all that can be told."""
    return processes * resident_memory() if device.type == "cpu" else 0


def _require_disk(run: Run, vocab_size: int) -> None:
    """The room that checkpoints of this run have already is theirs."""
    there = sum(path.stat().st_size for path in (run.out_dir / FOLDER).glob("*.ckpt"))
    need, free = disk(run.config, vocab_size), free_disk(run.out_dir)
    if need > free + there:
        raise UserError(f"{n_checkpoints(run.config)} checkpoints need {in_words(need)} of disk, and {in_words(free + there)} "
                        f"is free at {run.out_dir}: make room, name another disk with out_dir=, or take trainer.keep_last=1")


def _at_least(need: Memory) -> int:
    return need.certain + round(SURE * (need.total - need.certain))


def _remedy(config: TrainConfig, vocab_size: int, kernel: str, device: torch.device, share: int) -> str:
    """The first change that would make it fit, from the one that costs least."""
    free = free_memory(device)
    for options, changed in _smaller(config):
        need = share * memory(changed, vocab_size, kernel, world_size()).total
        if free is not None and need <= free:
            return f"with {options} it would be {in_words(need + _of_programs(device, share))}"
    return "take a smaller model=" + (", or several GPUs with trainer=fsdp" if device.type == "cuda" else "")


def _smaller(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """The same steps in less memory: blocks computed twice, in half precision, in smaller batches."""
    recomputed = with_options(config, activation_checkpointing=True)
    halves = with_options(recomputed, precision="bf16-mixed")
    yield "trainer.activation_checkpointing=true", recomputed
    yield "trainer.activation_checkpointing=true trainer.precision=bf16-mixed", halves
    batch, least = config.data.batch_size, world_size()
    while batch % 2 == 0 and batch // 2 % least == 0:
        batch //= 2
        times = config.trainer.accumulate * config.data.batch_size // batch
        yield (f"trainer.activation_checkpointing=true data.batch_size={batch} trainer.accumulate={times}",
               replace(with_options(recomputed, accumulate=times), data=replace(config.data, batch_size=batch)))


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")       # control groups' files, by version
V2 = ("memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes that can be had on `device`; None where the system does not tell. `root`: of the file system that says it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [*_unused(root), *_left_by_groups(root)]
    return min(found) if found else _installed()


def resident_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process takes by now, its programs included; 0 where the system does not tell."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def free_disk(folder: Path) -> int:
    """Bytes that can be written into `folder`, which need not be there yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _unused(root: Path) -> Iterator[int]:
    """Linux's own estimate: what is free, and what caches would give up."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Of the limit of each control group that this process is in, inside of one another."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified") if not controllers else ("sys/fs/cgroup/memory",)
            for mount in mounts:
                for folder in _upwards(root / mount, path):
                    yield from _left(folder, *(V1 if controllers else V2))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder, its parent's, ... and the mount; inside a container the first may be out of sight."""
    folder = mount / path.lstrip("/")
    yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(mount))


def _left(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit less use, where pages of files that nobody reads do not count."""
    limits, used = list(_lines(folder / limit)), list(_lines(folder / usage))
    if limits and used and limits[0].isdigit():
        reclaimable = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache)
        yield max(0, int(limits[0]) - int(used[0]) + reclaimable)


def _installed() -> int | None:
    """Where there is no better answer: all the memory of the machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
