"""Suggests options that would make a run fit into memory, in order of cost.

The first options keep the training steps identical. Other optimisers, fewer rows per step and LoRA follow. Training on more
devices comes last.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from rwkv.config import EIGHT_BITS, ORTHOGONAL, TrainConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.training.memory.estimate import Memory, estimate

MAX_DEVICES = 1024                       # the largest number of devices that is tried
RECOMPUTED = {"trainer.activation_checkpointing": True}
IN_BACKWARD = {"trainer.optim_in_backward": True, "optim.grad_clip": 0.0}
ROUNDED = {"optim.name": EIGHT_BITS}
GROUPS = {"optim.name": "optim", "tune.method": "tune", "trainer.strategy": "trainer"}       # a group's file sets these options
Options = JsonMapping                    # maps dotted keys to values


class Remedy(NamedTuple):
    """Options that save memory, as typed on the command line, and the bytes that each process then needs."""

    options: str
    need: int


class Variant(NamedTuple):
    """A configuration with some options replaced, and the memory that each process needs."""

    config: TrainConfig
    memory: Memory

    @classmethod
    def of(cls, config: TrainConfig, options: Options, vocab_size: int, processes: int = 1,
           gpu_memory: int | None = None) -> "Variant":
        """Replaces `options` in `config` and estimates the memory. Raises UserError if the options are invalid together."""
        changed = with_keys(config, options)
        return cls(changed, estimate(changed, vocab_size, processes, gpu_memory))


def remedies(config: TrainConfig, vocab_size: int, processes: int, device: str, gpu_memory: int | None = None,
             is_fixed: Callable[[str], bool] | None = None) -> Iterator[Remedy]:
    """Yields the remedies that are compatible with the other options. The run need not fit with a remedy.

    Args:
        processes: the number of processes, which share the rows of data.batch_size.
        device: cpu or cuda. Only on GPUs do more processes add memory.
        gpu_memory: the bytes of memory of each process's GPU, as for `estimate`.
        is_fixed: returns True for an option that must not change. None allows all changes.
    """
    sharded = _more_gpus(config, processes) if device == "cuda" else ()
    for options in (*_same_steps(config, processes), *_other_steps(config, processes), *sharded):
        new = {key: value for key, value in options.items() if attrgetter(key)(config) != value}
        try:
            variant = Variant.of(config, new, vocab_size, options.get("trainer.devices", processes), gpu_memory)
            variant.config.require_separate_updates()
        except UserError:                # the options conflict
            continue
        if new and not (is_fixed and any(map(is_fixed, new))):
            yield Remedy(format_options(new), variant.memory.total)


def with_keys(config: TrainConfig, options: Options) -> TrainConfig:
    """Returns the configuration with these options replaced. Raises UserError for invalid values."""
    groups: dict[str, JsonObject] = {}
    for key, value in options.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in groups.items()})


def format_options(options: Options) -> str:
    texts = {key: str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
             for key, value in options.items()}
    return " ".join(f"{GROUPS.get(key, key)}={value}" for key, value in texts.items())


def _same_steps(config: TrainConfig, processes: int) -> Iterator[Options]:
    # Up to rounding, these options keep the steps identical
    yield RECOMPUTED
    if config.trainer.precision == "32-true":
        yield RECOMPUTED | {"trainer.precision": "bf16-mixed"}
    rows, accumulate = config.data.batch_size, config.trainer.accumulate
    while rows % (2 * processes) == 0:
        rows, accumulate = rows // 2, accumulate * 2
        yield RECOMPUTED | {"data.batch_size": rows, "trainer.accumulate": accumulate}


def _other_steps(config: TrainConfig, processes: int) -> Iterator[Options]:
    # These options change the steps: no clipping, 8-bit moments, fewer rows, or LoRA
    rounded = {} if config.optim.name in ORTHOGONAL else ROUNDED
    yield RECOMPUTED | IN_BACKWARD
    yield RECOMPUTED | rounded
    passes = max(1, config.data.batch_size // processes) * config.trainer.accumulate
    yield RECOMPUTED | rounded | {"data.batch_size": processes, "trainer.accumulate": passes}
    yield RECOMPUTED | rounded | IN_BACKWARD
    yield RECOMPUTED | rounded | IN_BACKWARD | {"data.batch_size": processes}
    if config.init_from is not None:
        yield RECOMPUTED | {"tune.method": "lora"}
        yield RECOMPUTED | {"tune.method": "lora", "tune.base": "bfloat16"}


def _more_gpus(config: TrainConfig, processes: int) -> Iterator[Options]:
    """Yields options that shard weights, gradients and moments over more and more GPUs, with at least one row for each GPU."""
    count = 2 * processes if config.trainer.strategy == "fsdp" else 2
    while count <= MAX_DEVICES:
        rows = max(config.data.batch_size, count)
        yield RECOMPUTED | {"trainer.strategy": "fsdp", "trainer.devices": count, "trainer.num_nodes": 1,
                            "data.batch_size": rows}
        count *= 2
