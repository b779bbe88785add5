"""The result of a format's read() (Content) and the argument of its write() (Outgoing)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernels.matvec import BLOCKS, Packed
from rwkv.checkpoint.stored import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError
from rwkv.io.json_types import JsonMapping, JsonObject

ENTRY = "timemix"                        # the key of our entry (files.describe), in formats that can hold it


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix W of `shape` (N,K) that a file has in a form of kernels/matvec, by the form's name.

    read(): a view of the mapped file where the file's order is that of the form. repacked: it is not, and `timemix convert`
    writes a file where it is.
    """

    form: str
    shape: tuple[int, ...]
    read: Callable[[], Packed]
    repacked: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of files that have such matrices: int8 or int4."""
        return "int4" if self.form in BLOCKS else self.form


@dataclass
class Content:
    """A file's tensors by the file's own names, our entry, and other metadata.

    declared: sizes that the file states, by their names in ModelConfig, and vocab_size; also constants that the tensors assume,
    such as an epsilon, by the generation's names. tied: the head is the embedding. packed: matrices that the file
    has packed, and `tensors` in float32. notes: messages on what was assumed or not read.
    """

    path: Path
    tensors: dict[str, Stored]
    entry: JsonObject | None = None
    declared: JsonObject = field(default_factory=dict)
    tokenizer: JsonObject | None = None
    tied: bool = False
    step: int = 0
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outgoing:
    """Tensors by official name in the dtypes to write, and our entry, for formats that can hold it.

    quantised: the block format of the large matrices, as in formats.QUANTISED; None keeps the dtypes of `tensors`.
    packed: as in Content. form: of a Hugging Face directory, one of formats.FORMS. card: the text of its README.md. by_input:
    store matrices with sparse inputs by input, as decoding on a CPU reads them.
    """

    tensors: dict[str, Stored]
    config: ModelConfig
    vocab_size: int
    entry: JsonObject
    quantised: str | None = None
    form: str | None = None
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)
    card: str = ""
    by_input: bool = False


def plain_entry(path: Path, entry: object) -> JsonObject:
    """Returns our entry. Raises CheckpointError if it is not a dictionary."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the entry {ENTRY} must be a dictionary; got a {type(entry).__name__}: was it written "
                              "by another program?")
    return entry


def entry_in(path: Path, metadata: JsonMapping) -> JsonObject | None:
    """Our entry, stored as JSON in the metadata, or None. Raises CheckpointError if it is damaged."""
    if ENTRY not in metadata:
        return None
    try:
        return plain_entry(path, json.loads(metadata[ENTRY]))
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a {ENTRY} entry in its metadata that is not JSON ({error}): the file is "
                              "damaged") from error
