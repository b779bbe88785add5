"""Options that would make a run fit into memory.

They are in order of cost: first options that keep the training steps identical, then other optimisers, fewer rows per step and
LoRA; last comes training on more devices.
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from rwkv.config import EIGHT_BITS, ORTHOGONAL, TrainConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.training.memory.estimate import Memory, estimate

MAX_DEVICES = 1024                       # the largest number of devices to try
RECOMPUTED = {"trainer.activation_checkpointing": True}
IN_BACKWARD = {"trainer.optim_in_backward": True, "optim.grad_clip": 0.0}
ROUNDED = {"optim.name": EIGHT_BITS}
GROUPS = {"optim.name": "optim", "tune.method": "tune", "trainer.strategy": "trainer"}       # options that a group's file sets
Options = JsonMapping                    # dotted key -> value


class Remedy(NamedTuple):
    """A way to save memory. options: a text, as on the command line. need: the bytes of each process, as in Memory.total."""

    options: str
    need: int


class Variant(NamedTuple):
    """A configuration with some options replaced, and the memory of each process."""

    config: TrainConfig
    memory: Memory

    @classmethod
    def of(cls, config: TrainConfig, options: Options, vocab_size: int, processes: int = 1,
           gpu_memory: int | None = None) -> "Variant":
        """A variant; the other arguments are as for `estimate`. Raises UserError for options that are invalid together."""
        changed = with_keys(config, options)
        return cls(changed, estimate(changed, vocab_size, processes, gpu_memory))


def remedies(config: TrainConfig, vocab_size: int, processes: int, device: str,
             gpu_memory: int | None = None) -> Iterator[Remedy]:
    """The remedies that are compatible with the other options, whether or not the run then fits.

    processes: the number of processes that share data.batch_size. device: cpu or cuda; only on GPUs do more processes add
    memory. gpu_memory: as for `estimate`.
    """
    sharded = _sharded(config, processes) if device == "cuda" else ()
    for options in (*_same_steps(config, processes), *_other_steps(config, processes), *sharded):
        new = {key: value for key, value in options.items() if attrgetter(key)(config) != value}
        try:
            variant = Variant.of(config, new, vocab_size, options.get("trainer.devices", processes), gpu_memory)
            variant.config.require_separate_updates()
        except UserError:                # conflicting options
            continue
        if new:
            yield Remedy(as_typed(new), variant.memory.total)


def with_keys(config: TrainConfig, options: Options) -> TrainConfig:
    """The configuration with these options replaced. Raises UserError for invalid values."""
    groups: dict[str, JsonObject] = {}
    for key, value in options.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in groups.items()})


def as_typed(options: Options) -> str:
    texts = {key: str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
             for key, value in options.items()}
    return " ".join(f"{GROUPS.get(key, key)}={value}" for key, value in texts.items())


def _same_steps(config: TrainConfig, processes: int) -> Iterator[Options]:
    """Remedies with identical steps, up to rounding."""
    yield RECOMPUTED
    if config.trainer.precision == "32-true":
        yield RECOMPUTED | {"trainer.precision": "bf16-mixed"}
    rows, accumulate = config.data.batch_size, config.trainer.accumulate
    while rows % (2 * processes) == 0:
        rows, accumulate = rows // 2, accumulate * 2
        yield RECOMPUTED | {"data.batch_size": rows, "trainer.accumulate": accumulate}


def _other_steps(config: TrainConfig, processes: int) -> Iterator[Options]:
    """Remedies that change the steps: no clipping, 8-bit moments, fewer rows, or LoRA."""
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


def _sharded(config: TrainConfig, processes: int) -> Iterator[Options]:
    """Remedies that shard weights, gradients and moments over more and more GPUs, with at least one row each."""
    count = 2 * processes if config.trainer.strategy == "fsdp" else 2
    while count <= MAX_DEVICES:
        rows = max(config.data.batch_size, count)
        yield RECOMPUTED | {"trainer.strategy": "fsdp", "trainer.devices": count, "trainer.num_nodes": 1,
                            "data.batch_size": rows}
        count *= 2
