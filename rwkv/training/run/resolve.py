"""Chooses the options that the user left open, in one ordered list of steps.

A step is a function from (config, context) to (config, note). Each step sees the choices of earlier steps: the number of passes
depends on the length of sequences, and the memory depends on the precision and the passes. The steps belong to different stages
of a run's start. For example, the command line is checked before the base model is opened, and epochs are converted to steps
once the data have been read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from rwkv.checkpoint.files import Checkpoint
from rwkv.config import TrainConfig
from rwkv.data.prepare import Corpus
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.device import AUTO, device_for, is_planned_elsewhere, resolve_precision
from rwkv.training.memory.capacity import free_memory
from rwkv.training.memory.savings import fit_memory, with_passes
from rwkv.training.run import rates
from rwkv.training.run.directory import Note
from rwkv.training.run.length import with_default_length, with_max_steps, with_steps_of_epochs
from rwkv.training.tuning.guard import with_guard

Choice = tuple[TrainConfig, Note | None]


class Stage(Enum):
    """The stage of a run's start at which a step is applied. Each name says what is known by then."""

    COMMAND_LINE = "the command line alone"
    BASE = "the base model of init_from= too, if there is one"
    DATA = "the data too"


@dataclass(frozen=True)
class Context:
    """The facts on which the steps depend in addition to the configuration.

    Args:
        user_keys: the keys that the user set on the command line.
        chosen: the options that the groups among these keys set.
        base: the base model of init_from=, in a new run.
        tokenizer: the tokenizer of the base model, in a new run.
        data: the data, in Stage.DATA only.
        resumed: True if the configuration has the saved options of a resumed run.
    """

    user_keys: Collection[str] = ()
    chosen: Collection[str] = ()
    base: Checkpoint | None = None
    tokenizer: Tokenizer | None = None
    data: Corpus | None = None
    resumed: bool = False


class Step(NamedTuple):
    """A step that chooses options. If `again` is True, it also applies to the merged options of a resumed run."""

    stage: Stage
    choose: Callable[[TrainConfig, Context], Choice]
    again: bool = False


def default_length(config: TrainConfig, context: Context) -> Choice:
    return with_default_length(config, {*context.user_keys, *context.chosen}), None


def default_rates(config: TrainConfig, context: Context) -> Choice:
    config, names = rates.with_default_rates(config, context.user_keys, context.chosen)
    return config, Note("rate", rates.describe(config, names)) if names else None


def guard_text(config: TrainConfig, context: Context) -> Choice:
    if context.tokenizer is None:
        return config, None
    config, why_none = with_guard(config, context.tokenizer, context.user_keys)
    return config, Note("guard", why_none) if why_none else None


def one_length(config: TrainConfig, context: Context) -> Choice:
    return with_max_steps(config, context.user_keys), None


def precision(config: TrainConfig, context: Context) -> Choice:
    value = config.trainer.precision
    if not is_planned_elsewhere(config):
        value = resolve_precision(value, config.trainer.accelerator)
    elif value in (None, AUTO):
        value = "bf16-mixed"
    return replace(config, trainer=replace(config.trainer, precision=value)), None


def passes(config: TrainConfig, context: Context) -> Choice:
    if context.base is None or is_planned_elsewhere(config):
        return config, None
    config, text = with_passes(config, context.base.vocab_size, context.user_keys)
    return config, Note("memory", text) if text else None


def less_memory(config: TrainConfig, context: Context) -> Choice:
    if context.base is None or is_planned_elsewhere(config):
        return config, None
    free = free_memory(device_for(config.trainer.accelerator))
    config, text = fit_memory(config, context.base.vocab_size, context.user_keys, free)
    return config, Note("memory", text) if text else None


def steps_of_epochs(config: TrainConfig, context: Context) -> Choice:
    assert context.data is not None
    return with_steps_of_epochs(config, context.data), None


STEPS = (
    Step(Stage.COMMAND_LINE, default_length),
    Step(Stage.COMMAND_LINE, default_rates),
    Step(Stage.BASE, guard_text),
    Step(Stage.BASE, one_length, again=True),
    Step(Stage.BASE, precision, again=True),
    Step(Stage.BASE, passes),
    Step(Stage.BASE, less_memory),
    Step(Stage.DATA, steps_of_epochs, again=True),
)


def resolve(config: TrainConfig, stage: Stage, context: Context) -> tuple[TrainConfig, tuple[Note, ...]]:
    """Applies the steps of `stage`. Returns the configuration and the plan's notes. Raises UserError for invalid options."""
    notes = []
    for step in STEPS:
        if step.stage is stage and (step.again or not context.resumed):
            config, note = step.choose(config, context)
            notes += [note] if note else []
    return config, tuple(notes)
