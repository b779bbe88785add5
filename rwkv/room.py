"""What cannot fit is refused before it is begun: memory that training needs, and the disk that its checkpoints need."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rwkv.config import TrainConfig
from rwkv.machine import free_disk, free_memory, resident_memory
from rwkv.memory import FLOAT, MOMENTS, Memory, memory, n_parameters
from rwkv.processes import world_size
from rwkv.run import Run
from rwkv.saving import FOLDER

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
        raise ValueError(f"training needs at least {in_words(need + programs)} of memory{already} and {where} has "
                         f"{in_words(free)} free: {remedy}")


def _of_programs(device: torch.device, processes: int) -> int:
    """What the processes take by now; nothing of a GPU, where free memory is all that can be told."""
    return processes * resident_memory() if device.type == "cpu" else 0


def _require_disk(run: Run, vocab_size: int) -> None:
    """The room that checkpoints of this run have already is theirs."""
    there = sum(path.stat().st_size for path in (run.out_dir / FOLDER).glob("*.ckpt"))
    need, free = disk(run.config, vocab_size), free_disk(run.out_dir)
    if need > free + there:
        raise ValueError(f"{n_checkpoints(run.config)} checkpoints need {in_words(need)} of disk, and {in_words(free + there)} "
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
