"""What a run will do and what it takes, said before it begins; what cannot fit is refused before anything long is begun.

Sizes come from formulas (rwkv/memory.py), so that a model that is too large is never built, nor its data tokenised; the time
comes from two steps, which leave nothing behind.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import torch

from kernels import threads
from rwkv import lanes, processes
from rwkv.config import TrainConfig
from rwkv.machine import free_disk, free_memory, resident_memory
from rwkv.memory import FLOAT, memory, n_parameters
from rwkv.model import Block
from rwkv.processes import rank, world_size
from rwkv.room import disk, in_words, n_checkpoints, require_room, with_options
from rwkv.run import Run
from rwkv.task import LanguageModel
from rwkv.tokens import Corpus, prepare
from rwkv.training import dtype_for, say

ESTIMATED_STEPS = 2                      # timed before a run, after one that warms up
EXCESS = 0.1                             # of the text in validation beyond data.val_fraction: more is worth a warning
FORWARD = 1 / 3                          # of a step's time: what a step of validation takes
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))       # the first of which there are two


def data_for(run: Run, device: torch.device, kernel: str) -> Corpus:
    """The run's data, tokenised once it is clear that the model fits, whatever its vocabulary will be.

    Raises ValueError where it does not, or its checkpoints do not, and as rwkv.tokens.prepare does.
    """
    least = run.tokenizer.vocab_size if run.tokenizer else 1
    processes.agreed(lambda: require_room(run, device, kernel, least))
    data = processes.in_turn(lambda: prepare(run.config.data, run.config.model.ctx_len, run.tokenizer))
    processes.agreed(lambda: require_room(run, device, kernel, data.tokenizer.vocab_size))
    return data


def announce(run: Run, kernel: str, device: torch.device, task: LanguageModel, data: Corpus) -> None:
    """What will happen, on standard error; ends the program there where plan=true."""
    if rank() == 0:
        if run.config.resume == "auto" and run.resume_from is None:
            say("resume=auto: no run to continue, starting a new one")
        for subject, what in _lines(run, kernel, device, task, data):
            say(f"{subject:<11}{what}")
    if run.config.plan:
        sys.exit(0)


def _lines(run: Run, kernel: str, device: torch.device, task: LanguageModel, data: Corpus) -> Iterator[tuple[str, str]]:
    config, model, V = run.config, run.config.model, task.model.vocab_size
    taken = resident_memory() if device.type == "cpu" else 0     # before the data are read, whose pages would count
    yield "data", data.describe()
    if data.val_share > config.data.val_fraction + EXCESS:
        yield "WARNING", (f"validation has {100 * data.val_share:.3g} % of the text, and data.val_fraction asks for "
                          f"{100 * config.data.val_fraction:g} %: whole documents are chosen, whatever their length; split the "
                          "longest ones, or change their order or names")
    if config.trainer.tbptt:
        yield "lanes", lanes.describe(config, data)
    yield "model", (f"RWKV-4, {model.n_layer} layers, {model.n_embd} wide, {n_parameters(model, V):,} parameters, "
                    f"vocabulary {V}")
    if run.beginning is not None and run.resume_from is None:
        yield "weights", f"from {run.beginning.path}, which gives the sizes and the tokenizer; the optimiser begins anew"
    yield "kernel", (f"{kernel} on {device.type}, precision {config.trainer.precision}, processes {world_size()}, "
                     f"{', '.join([f'threads of each {torch.get_num_threads()}', *threads.settings()])}")
    yield from _memory(config, V, cast(Block, task.model.blocks[0]).att.wkv.name, device, taken)
    yield "disk", (f"{in_words(disk(config, V))} for {n_checkpoints(config)} checkpoints; "
                   f"{in_words(free_disk(run.out_dir))} is free")
    yield "training", _training(run, device, task, data)
    yield "run", f"{run.out_dir}" + (f", continued from {run.resume_from}" if run.resume_from else "")


def _memory(config: TrainConfig, vocab_size: int, kernel: str, device: torch.device,
            taken: int) -> Iterator[tuple[str, str]]:
    """What one process needs, and what is free. `taken`: what it has of the device by now, programs and weights."""
    need, free = memory(config, vocab_size, kernel, world_size()), free_memory(device)
    checkpointing = config.trainer.activation_checkpointing
    other = memory(with_options(config, activation_checkpointing=not checkpointing), vocab_size, kernel, world_size())
    programs = max(0, taken - FLOAT * n_parameters(config.model, vocab_size))
    already = f", {in_words(taken)} of which it takes already" if taken else ""
    yield "memory", f"about {in_words(programs + need.total)} for each process{already}; {in_words(free)} is free"
    yield "", ((f"programs {in_words(programs)}, " if programs else "")
               + f"weights {in_words(need.weights)}, gradients {in_words(need.gradients)}, "
               + f"optimiser {in_words(need.optimiser)}, loss {in_words(need.loss)}"
               + (f", data workers {in_words(need.workers)}" if need.workers else ""))
    yield "", (f"activations {in_words(need.activations)}; {in_words(other.activations)} with "
               f"trainer.activation_checkpointing={str(not checkpointing).lower()}")


def _training(run: Run, device: torch.device, task: LanguageModel, data: Corpus) -> str:
    config, tokens = run.config, run.config.tokens_per_step
    steps = config.trainer.max_steps - (run.resume_step or 0)
    epochs = steps * tokens * _not_padding(config, data) / data.sizes.train_tokens
    through = f"{epochs:.1f} times the training data" if epochs >= 1 else f"{100 * epochs:.2g} % of the training data"
    return (f"{steps:,} steps of {tokens:,} tokens: {steps * tokens:,} tokens, {_duration(config, steps, device, task, data)}; "
            f"{through}")


def _not_padding(config: TrainConfig, data: Corpus) -> float:
    """Of the positions that a step reads, those that hold a token."""
    return 1 - lanes.pieces_of(config, data).padding() if config.trainer.tbptt else 1.0


def _duration(config: TrainConfig, steps: int, device: torch.device, task: LanguageModel, data: Corpus) -> str:
    """Of all steps and validations. A model that lies in shares is not timed: one process may have no room for all of it."""
    if config.trainer.strategy == "fsdp":
        return "for a time that will be seen"
    validation = FORWARD * data.sizes.val_tokens / config.tokens_per_step
    whole = steps * (1 + FORWARD * _twice(config)) + validation * -(-steps // config.trainer.val_every)
    seconds = _seconds_per_step(task, config, device) * whole
    name, unit = next(((name, unit) for name, unit in UNITS if seconds >= 2 * unit), UNITS[-1])
    return f"about {seconds / unit:.1f} {name}"


def _twice(config: TrainConfig) -> float:
    """Of the segments, those that go forward twice: all but the last."""
    return 1 - 1 / max(1, config.trainer.tbptt)


def _seconds_per_step(task: LanguageModel, config: TrainConfig, device: torch.device) -> float:
    """Forward and backward of one batch, timed; it compiles the kernels on the way and leaves nothing behind."""
    x = torch.zeros(config.data.batch_size // world_size(), config.model.ctx_len, dtype=torch.long, device=device)
    task.to(device)
    since = 0.0
    for step in range(1 + ESTIMATED_STEPS):
        if step == 1:
            since = time.perf_counter()
        dtype = dtype_for(config.trainer.precision)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.loss(x, x)
        loss.backward()
    _: Any = loss.item()                 # waits for the device
    task.zero_grad(set_to_none=True)
    return (time.perf_counter() - since) / ESTIMATED_STEPS * config.tokens_per_step / (x.numel() * world_size())
