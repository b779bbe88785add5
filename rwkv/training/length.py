"""trainer.epochs: how many steps as many passes over the training split are, once the data are known.

A pass is over all windows, over all rows of conversations, or over all segments of trainer.tbptt's streams. A step may begin in
one pass and end in the next; the last step is the first that has read all of the last pass.
"""

from dataclasses import replace
from math import ceil

from rwkv.config import TrainConfig
from rwkv.data import documents
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.data.windows import Windows

ROUNDING = 1e-9                          # of epochs times steps, of which both may be fractions
MANY = 4                                 # epochs of conversations: from more on, answers are learnt by heart


def steps_per_epoch(config: TrainConfig, data: Corpus) -> float:
    """The optimiser steps of one pass over the training split: a fraction where the last step has room for more."""
    rows = config.data.batch_size * config.trainer.accumulate
    if config.trainer.tbptt:
        return int(documents.chunks_of(config, data).segments.sum()) / (rows * config.trainer.tbptt)
    if data.conversations:
        return len(rows_of(data.conversations[0], config.model.ctx_len)) / rows
    return len(Windows(data.train, config.model.ctx_len)) / rows


def with_steps_of_epochs(config: TrainConfig, data: Corpus) -> TrainConfig:
    """The configuration with the fewest max_steps that read trainer.epochs; itself where they are not given."""
    epochs = config.trainer.epochs
    if epochs is None:
        return config
    steps = max(1, ceil(epochs * steps_per_epoch(config, data) - ROUNDING))
    return replace(config, trainer=replace(config.trainer, max_steps=steps))
