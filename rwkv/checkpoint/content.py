"""What a format's read gives, and what its write takes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rwkv.checkpoint.stored import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError

ENTRY = "timemix"                        # our own entry in files that have room for one


@dataclass
class Content:
    """Tensors by the file's own names; our entry, and what else the file says of itself, where it does.

    declared: sizes that the file states beside its tensors, by their names in ModelConfig, and vocab_size.
    """

    path: Path
    tensors: dict[str, Stored]
    entry: dict[str, Any] | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    tied: bool = False                   # the head is the embedding
    step: int = 0


@dataclass
class Outgoing:
    """Tensors by official name, in the dtypes to write, and our entry for formats that have room for it."""

    tensors: dict[str, Stored]
    config: ModelConfig
    vocab_size: int
    entry: dict[str, Any]


def plain_entry(path: Path, entry: Any) -> dict[str, Any]:
    """Our entry as read. Raises CheckpointError where it is something else."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} has a {ENTRY} entry that is a {type(entry).__name__}, expected a dictionary: was it "
                              "written by another program?")
    return entry
