"""What a format's read() returns (Content) and what its write() gets (Outgoing)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.matvec import Int4
from rwkv.checkpoint.stored import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError

ENTRY = "timemix"                        # the key of our own entry (files.describe), in formats that have room for one


@dataclass
class Content:
    """A file's tensors by the file's own names, our entry, and other descriptions in the file.

    declared: sizes that the file states beside its tensors, by their names in ModelConfig, and vocab_size; also constants that
    the tensors were made for, such as an epsilon, by the generation's names. tied: the head is the embedding. packed: functions
    that read a matrix that the file holds in int4; `tensors` has the same matrices in float32. notes: sentences for people, on
    what was assumed or left unread.
    """

    path: Path
    tensors: dict[str, Stored]
    entry: dict[str, Any] | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    tied: bool = False
    step: int = 0
    packed: Mapping[str, Callable[[], Int4]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outgoing:
    """Tensors by official name in the dtypes to write, and our entry, for formats that have room for it.

    quantised: the block format of the large matrices, one of those in formats.QUANTISED; None leaves the dtypes of `tensors`.
    packed: as in Content. form: of a Hugging Face directory, one of formats.FORMS. card: the text of its README.md.
    """

    tensors: dict[str, Stored]
    config: ModelConfig
    vocab_size: int
    entry: dict[str, Any]
    quantised: str | None = None
    form: str | None = None
    packed: Mapping[str, Callable[[], Int4]] = field(default_factory=dict)
    card: str = ""


def plain_entry(path: Path, entry: Any) -> dict[str, Any]:
    """Returns our entry. Raises CheckpointError where it is not a dictionary."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} has a {ENTRY} entry that is a {type(entry).__name__}, expected a dictionary: was it "
                              "written by another program?")
    return entry


def entry_in(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our entry, which metadata hold as JSON; None where they have none. Raises CheckpointError where it is damaged."""
    if ENTRY not in metadata:
        return None
    try:
        return plain_entry(path, json.loads(metadata[ENTRY]))
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a {ENTRY} entry in its metadata that is not JSON ({error}): the file is "
                              "damaged") from error
