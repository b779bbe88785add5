"""The result of a format's read (Content) and the argument of its write (Outgoing)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.matvec import Int4
from rwkv.checkpoint.stored import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError

ENTRY = "timemix"                        # the key of our own entry, in formats that have room for one


@dataclass
class Content:
    """Tensors by the file's own names, with our entry and other descriptions that the file has.

    declared: sizes that the file states beside its tensors, by their names in ModelConfig, and vocab_size; and numbers that its
    tensors were made for, by the generation's names. tied: the head is the embedding. packed: reads the matrices that the file
    holds in int4, which `tensors` unpacks.
    """

    path: Path
    tensors: dict[str, Stored]
    entry: dict[str, Any] | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    tied: bool = False
    step: int = 0
    packed: Mapping[str, Callable[[], Int4]] = field(default_factory=dict)


@dataclass
class Outgoing:
    """Tensors by official name in the dtypes to write, and our entry, for formats that have room for it.

    quantised: the name of the block format for the large matrices, one of the format's QUANTISED; None: as `tensors` says.
    packed: reads the matrices that are in int4 already. form: of a Hugging Face directory, fla or official.
    """

    tensors: dict[str, Stored]
    config: ModelConfig
    vocab_size: int
    entry: dict[str, Any]
    quantised: str | None = None
    form: str | None = None
    packed: Mapping[str, Callable[[], Int4]] = field(default_factory=dict)


def plain_entry(path: Path, entry: Any) -> dict[str, Any]:
    """Raises CheckpointError where our entry is not a dictionary."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} has a {ENTRY} entry that is a {type(entry).__name__}, expected a dictionary: was it "
                              "written by another program?")
    return entry


def entry_in(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our entry in metadata, as JSON; None where they have none. Raises CheckpointError where it is damaged."""
    if ENTRY not in metadata:
        return None
    try:
        return plain_entry(path, json.loads(metadata[ENTRY]))
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a {ENTRY} entry in its metadata that is not JSON ({error}): the file is "
                              "damaged") from error
