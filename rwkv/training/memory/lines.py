"""Formats the plan's lines on the run's memory and on the options that would make the run fit."""

import re
from collections.abc import Iterable, Iterator

from rwkv.distributed import world_size
from rwkv.training.memory.capacity import Needs, free_memory
from rwkv.training.memory.estimate import format_bytes
from rwkv.training.memory.remedies import RECOMPUTED, Remedy, Variant, remedies


def memory_lines(needs: Needs, programs: int) -> Iterator[tuple[str, str]]:
    """Yields the plan's lines on the memory of one process, each as (subject, text).

    `programs` is the bytes in use by the program and libraries, or 0 on a GPU.
    """
    config, vocab_size, device, need = needs
    free = free_memory(device)
    already = f", {format_bytes(programs)} of it already in use" if programs else ""
    yield "memory", f"about {format_bytes(programs + need.total)} for each process{already}; {format_bytes(free)} is free"
    yield "", ((f"program and libraries {format_bytes(programs)}, " if programs else "")
               + f"weights {format_bytes(need.weights)}, gradients {format_bytes(need.gradients)}, "
               + f"optimiser {format_bytes(need.optimiser)}, loss {format_bytes(need.loss)}"
               + (f", data workers {format_bytes(need.workers)}" if need.workers else ""))
    option, = RECOMPUTED
    value = not config.trainer.activation_checkpointing
    alternative = Variant.of(config, {option: value}, vocab_size, world_size()).memory
    yield "", (f"activations {format_bytes(need.activations)}; {format_bytes(alternative.activations)} with "
               f"{option}={str(value).lower()}")
    if free is not None and need.total > free:
        yield from fitting_remedy_lines(remedies(config, vocab_size, world_size(), device.type), free, programs)


def fitting_remedy_lines(candidates: Iterable[Remedy], free: int, programs: int) -> Iterator[tuple[str, str]]:
    """Yields a line for each remedy that fits into `free` bytes, with the memory, `programs` included, and the options.

    If several remedies differ only in numbers, only the first gets a line.
    """
    subject, kinds = "would fit", set()
    for options, need in candidates:
        kind = re.sub(r" data.batch_size=.*|\d+", "", options)
        if need <= free and kind not in kinds:
            yield subject, f"{format_bytes(programs + need)} with {options}"
            kinds.add(kind)
            subject = ""
