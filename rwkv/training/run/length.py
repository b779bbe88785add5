"""Computes the length of a run in steps from trainer.max_steps, trainer.max_tokens or trainer.epochs.

Optimisers and schedules count steps. Published recipes (experiment=) count tokens, and tuning on conversations counts epochs.
Epochs are converted to steps once the data are known. An epoch is a pass over all windows, all rows of conversations, or all
segments of trainer.tbptt's streams. A step may span two epochs, and the last step completes the last epoch.
"""

from collections.abc import Collection
from dataclasses import replace
from math import ceil, inf

from rwkv.config import LENGTHS, TrainConfig, length_option
from rwkv.data import tbptt_segments
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.data.windows import Windows

ROUNDING = 1e-9                          # epochs * steps per epoch may exceed a whole number by this rounding error
CHAT_EPOCHS = 2.0                        # a new run on conversations has this many epochs by default
MAX_EPOCHS = 4                           # with more epochs, a model memorises text


def steps_per_epoch(config: TrainConfig, data: Corpus) -> float:
    """Returns the number of optimiser steps in one epoch. The number is a fraction if the rows do not fill the last step.

    For streams, the number is an estimate, or infinity if the length of a stream is unknown.
    """
    if data.streams:
        return sum(inf if stream.tokens is None else stream.tokens for stream, _ in data.streams) / config.tokens_per_step
    rows = config.data.batch_size * config.trainer.accumulate
    if config.trainer.tbptt:
        return int(tbptt_segments.chunks_of(data, config.model.ctx_len, rows).segments.sum()) / (rows * config.trainer.tbptt)
    if data.conversations:
        return len(rows_of(data.conversations[0], config.model.ctx_len)) / rows
    return len(Windows(data.train, config.model.ctx_len)) / rows


def with_steps_of_epochs(config: TrainConfig, data: Corpus) -> TrainConfig:
    """Sets max_steps to the fewest steps that complete trainer.epochs. Without epochs, the configuration is unchanged."""
    epochs = config.trainer.epochs
    if epochs is None:
        return config
    steps = max(1, ceil(epochs * steps_per_epoch(config, data) - ROUNDING))
    return replace(config, trainer=replace(config.trainer, max_steps=steps))


def with_max_steps(config: TrainConfig, user_keys: Collection[str]) -> TrainConfig:
    """Returns the configuration with a single length option, and with max_steps computed from trainer.max_tokens if set.

    A length that the user gives overrides the length of an experiment or of a resumed run.
    """
    user_length = length_option(config, user_keys)
    trainer = config.trainer
    if user_length:
        trainer = replace(trainer, max_tokens=trainer.max_tokens if user_length == "trainer.max_tokens" else None,
                          epochs=trainer.epochs if user_length == "trainer.epochs" else None)
    if trainer.max_tokens is not None:
        trainer = replace(trainer, max_steps=ceil(trainer.max_tokens / config.tokens_per_step))
    return replace(config, trainer=trainer)


def with_default_length(config: TrainConfig, chosen: Collection[str]) -> TrainConfig:
    """Sets the epochs of a new run on conversations to CHAT_EPOCHS, unless the user or a group sets a length."""
    if config.data.name != "chat" or not set(LENGTHS).isdisjoint(chosen):
        return config
    return replace(config, trainer=replace(config.trainer, epochs=CHAT_EPOCHS))
