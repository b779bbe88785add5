"""Estimates how long a run takes: from two timed training steps, or roughly from the speed of one matrix product."""

import sys
import time
from collections.abc import Iterable
from statistics import mean

import torch

from rwkv import distributed
from rwkv.config import ModelConfig, TrainConfig
from rwkv.data.conversations import Tokenised
from rwkv.data.pairs import rows_of
from rwkv.distributed import log, world_size
from rwkv.io.lines import labelled_line
from rwkv.model.base import n_parameters
from rwkv.training.device import dtype_for
from rwkv.training.task import LanguageModel

TIMED_STEPS = 2                          # this many steps are timed after one warm-up step
LONG_STEP = 5                            # if the first pass takes more seconds, a line shows progress
PATIENCE = 20                            # the timed steps may take this many seconds
OVERHEAD = 2                             # a step takes this many times as long as the step's matrix products
FORWARD = 1 / 3                          # the forward pass takes this fraction of a training step
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))     # a duration uses the first unit that makes it 2 or more


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Prints lines of the plan, each given as (subject, text), on standard error."""
    for subject, text in lines:
        log(labelled_line(subject, text, sys.stderr))


def is_timed(config: TrainConfig, vocab_size: int, device: torch.device) -> bool:
    """Returns True if training steps are timed: with plan=timed, or if timing takes only seconds. All processes agree."""
    if config.trainer.strategy == "fsdp":                # a whole model may not fit into one process
        return False
    if config.plan == "timed":
        return True
    if config.only_plans and config.trainer.compile:     # the first step compiles for minutes
        return False
    seconds = distributed.broadcast_from_rank0(lambda: (1 + TIMED_STEPS) * estimated_seconds(config, vocab_size, device))
    return seconds / config.trainer.accumulate / max(1, config.trainer.tbptt) <= PATIENCE


def format_duration(seconds: float) -> str:
    """Returns a duration in words, such as "about 40 s" or "about 1.5 minutes"."""
    if seconds < 60:
        return f"about {max(1, round(seconds))} s"
    name, unit = next(((name, unit) for name, unit in UNITS if seconds >= 2 * unit), UNITS[-1])
    return f"about {seconds / unit:.1f} {name}"


def equivalent_steps(config: TrainConfig, steps: int, validated_tokens: int) -> tuple[float, float]:
    """Returns the durations of training and of all validations, as multiples of the duration of a plain training step."""
    recomputed = 1 - 1 / max(1, config.trainer.tbptt)        # this fraction of segments runs the forward pass twice
    reference = config.tune.prefers and config.tune.method != "full"             # the reference model runs a forward pass
    validation = FORWARD * (1 + reference) * validated_tokens / config.tokens_per_step
    return steps * (1 + FORWARD * recomputed + FORWARD * reference), validation


def product_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Returns the number of parameters in matrix products, which are all parameters except the embedding."""
    return n_parameters(model, vocab_size) - vocab_size * model.n_embd


def estimated_seconds(config: TrainConfig, vocab_size: int, device: torch.device) -> float:
    """Estimates the seconds of an optimiser step from the measured speed of one matrix product.

    The estimate is right within a factor of two or three, and assumes that a token takes 2 operations per parameter in the
    forward pass and 4 operations in the backward pass.
    """
    operations = 6.0 * product_parameters(config.model, vocab_size) * config.tokens_per_step
    if config.trainer.activation_checkpointing:
        operations *= 1 + FORWARD
    dtype = dtype_for(config.trainer.precision)
    rows = 512 if device.type == "cuda" else 64          # on a CPU, 512 rows in float16 would take a second
    x = torch.ones(rows, 1024, dtype=dtype, device=device)
    w = torch.ones(1024, 1024, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        (x @ w)[0, 0].item()             # waits for the device
        seconds.append(time.perf_counter() - start)
    return OVERHEAD * operations * min(seconds) / (2 * len(x) * w.numel()) / world_size()


def seconds_per_step(task: LanguageModel, config: TrainConfig, device: torch.device,
                     conversations: tuple[Tokenised, Tokenised] | None) -> float:
    """Measures the seconds of the forward and backward passes of an optimiser step.

    The measurement compiles the kernels and does not change the model. If there are conversations, the timed batch consists of
    their first rows, in which only answers are targets.
    """
    rows = config.data.batch_size // world_size()
    x = torch.zeros(rows, config.model.ctx_len, dtype=torch.long, device=device)
    batch: tuple[torch.Tensor, ...] = (x, x)
    if conversations and not config.trainer.tbptt:
        packed = rows_of(conversations[0], config.model.ctx_len).__getitems__(list(range(rows)))
        batch = tuple(part.to(device) for part in packed[:3])
    dtype = dtype_for(config.trainer.precision)
    task.to(device)
    seconds = []
    for step in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.loss(*batch)
        loss.backward()
        loss.item()                      # waits for the device
        seconds.append(time.perf_counter() - start)
        if step == 0 and seconds[0] > LONG_STEP:
            print_lines([("timing", f"the first of {1 + TIMED_STEPS} passes took {format_duration(seconds[0])}")])
        if step == 0 and seconds[0] > PATIENCE and config.plan != "timed":
            break
    task.zero_grad(set_to_none=True)
    batches = config.tokens_per_step / (x.numel() * world_size())
    return mean(seconds[1:] or seconds) * batches
