"""Chooses the general text of tune.guard=, whose loss a run with init_from= measures before and after tuning.

The text is unrelated to the task. If the loss of the text rises, tuning has damaged other abilities of the model.
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
    """Returns True if a run measures losses before and after training."""
    tuned = config.data.name == "chat" or config.tune.method != "full" or bool(config.tune.guard)
    return config.init_from is not None and tuned


def wants_guard(config: TrainConfig, user_keys: Collection[str]) -> bool:
    """Returns True if a new run measures the general text: with data=chat, tune= or tune.guard=.

    Continued pretraining does not measure the general text.
    """
    return config.data.name == "chat" or config.tune.method != "full" or not {"tune", "tune.guard"}.isdisjoint(user_keys)


def guard_path(config: TrainConfig) -> Path | None:
    """Returns the file of the general text, or None without a text. With fsdp there is none: no process has all weights."""
    guard = config.tune.guard
    if not guard or config.trainer.strategy == "fsdp":
        return None
    return Path(__file__).with_name("english.txt") if guard == ENGLISH else Path(guard)


def with_guard(config: TrainConfig, tokenizer: Tokenizer, user_keys: Collection[str]) -> tuple[TrainConfig, str | None]:
    """Sets tune.guard to null if a new run measures no general text. Returns the configuration and a note for the plan.

    tune.guard also becomes null if the tokenizer cannot encode ENGLISH. Raises UserError if the file of tune.guard is
    unreadable or empty, or cannot be encoded.
    """
    from rwkv.evaluation import count_tokens

    without = replace(config, tune=replace(config.tune, guard=None))
    if not wants_guard(config, user_keys):
        return without, None
    path = guard_path(config)
    if path is None:
        return (config if config.tune.guard else without), None
    try:
        count_tokens(tokenizer, path, "tune.guard")
    except ValueError as error:
        if config.tune.guard == ENGLISH:
            return without, f"none, because the tokenizer cannot encode the text of tune.guard={ENGLISH} ({error})"
        option = f"tune.guard={path}"
        raise UserError(str(error) if option in str(error) else f"{option} cannot be encoded: {error}") from None
    return config, None


def describe(config: TrainConfig) -> str:
    """Returns the plan's line on the losses that are measured before and after training."""
    if guard_path(config) is not None:
        return f"losses of the validation split and of tune.guard={config.tune.guard} are measured before and after training"
    why = " (trainer=fsdp shards the weights)" if config.tune.guard else ""
    return f"the loss of the validation split, but not of a general text, is measured before and after training{why}"


def sha256_of(path: Path | None) -> str | None:
    """Returns the SHA-256 of the file, or None without a file. Raises UserError if the file cannot be read."""
    if path is None:
        return None
    with open_file(path, "tune.guard") as file:
        return hashlib.sha256(file.read()).hexdigest()
