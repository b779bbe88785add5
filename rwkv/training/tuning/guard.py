"""The general text of tune.guard=, on which a run that tunes the weights of another is measured before and after.

The text has nothing to do with the task. If its loss rises, tuning has broken something.
"""

import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rwkv.config import ENGLISH, TrainConfig
from rwkv.errors import UserError
from rwkv.io.utf8 import open_file
from rwkv.tokenizer.tokenizers import Tokenizer


def is_compared(config: TrainConfig) -> bool:
    """Whether a run is measured before and after."""
    tuned = config.data.name == "chat" or config.tune.method != "full" or bool(config.tune.guard)
    return config.init_from is not None and tuned


def is_asked_for(config: TrainConfig, given: Collection[str]) -> bool:
    """Whether a new run measures the text: data=chat, tune= and tune.guard= ask for it, and training on does not."""
    return config.data.name == "chat" or config.tune.method != "full" or not {"tune", "tune.guard"}.isdisjoint(given)


def text_of(config: TrainConfig) -> Path | None:
    """The general text; None if there is none, and with fsdp, where each process has only a part of the weights."""
    guard = config.tune.guard
    if not guard or config.trainer.strategy == "fsdp":
        return None
    return Path(__file__).with_name("english.txt") if guard == ENGLISH else Path(guard)


def with_guard(config: TrainConfig, tokenizer: Tokenizer, given: Collection[str]) -> TrainConfig:
    """A new run's configuration. tune.guard becomes null if no text is asked for, or if the tokenizer cannot encode ENGLISH.

    Raises UserError if the file that tune.guard names cannot be read, is empty or cannot be encoded.
    """
    from rwkv.distributed import log
    from rwkv.evaluation import count_tokens

    without = replace(config, tune=replace(config.tune, guard=None))
    if not is_asked_for(config, given):
        return without
    path = text_of(config)
    if path is None:
        return config if config.tune.guard else without
    try:
        count_tokens(tokenizer, path, "tune.guard")
    except ValueError as error:
        if config.tune.guard == ENGLISH:
            log(f"guard      none: the tokenizer cannot encode the text of tune.guard={ENGLISH} ({error})")
            return without
        named = f"tune.guard={path}"
        raise UserError(str(error) if named in str(error) else f"{named} cannot be encoded: {error}") from None
    return config


def describe(config: TrainConfig) -> str:
    """One line for people."""
    if text_of(config) is not None:
        return f"before and after, the losses of the validation split and of the text of tune.guard={config.tune.guard}"
    why = " (trainer=fsdp divides the weights)" if config.tune.guard else ""
    return f"before and after, the loss of the validation split; of no general text{why}"


def sha256_of(path: Path | None) -> str | None:
    """The hash of the text. Raises UserError if it cannot be read."""
    if path is None:
        return None
    with open_file(path, "tune.guard") as file:
        return hashlib.sha256(file.read()).hexdigest()
