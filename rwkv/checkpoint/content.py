"""What a file format's read() returns (Content), and what its write() accepts (Outgoing)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernels.matvec import BLOCKS, Packed
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError
from rwkv.io.json_types import JsonMapping, JsonObject

ENTRY = "timemix"                        # the key of this program's entry (files.describe) in a file's metadata


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix W of `shape` (N,K) that a file stores in a packed format of kernels/matvec. format: the name of that format.

    read(): the packed matrix: a view of the mapped file, or a copy if `repacked`. repacked: the file's layout differs from that
    of kernels/matvec; `timemix convert` writes a file that needs no copy.
    """

    format: str
    shape: tuple[int, ...]
    read: Callable[[], Packed]
    repacked: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of files that have such matrices: int8 or int4."""
        return "int4" if self.format in BLOCKS else self.format


@dataclass
class Content:
    """What a file contains: its tensors by the names in the file, this program's entry, and other metadata.

    declared: sizes that the file states, by their names in ModelConfig, and vocab_size; also constants that the tensors assume,
    such as an epsilon, by the generation's names. tied: the head shares the embedding's weights. packed: the matrices that the
    file stores packed; `tensors` has them as float32. notes: messages about values that were assumed or ignored.
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
    """What a file format writes: tensors by official name, in the dtypes to write, and this program's entry.

    quantised: the block format of the large matrices, one of formats.QUANTISED; None keeps the dtypes of `tensors`. packed: the
    matrices that the source file stores packed. layout: the layout of a Hugging Face directory, one of formats.LAYOUTS.
    card: the text of its README.md. by_input: whether to store matrices with sparse inputs transposed, as decoding on a CPU
    reads them.
    """

    tensors: dict[str, Stored]
    config: ModelConfig
    vocab_size: int
    entry: JsonObject
    quantised: str | None = None
    layout: str | None = None
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)
    card: str = ""
    by_input: bool = False


def plain_entry(path: Path, entry: object) -> JsonObject:
    """Returns this program's entry. Raises CheckpointError if it is not a dictionary."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the entry {ENTRY} must be a dictionary; got a {type(entry).__name__}: was it written "
                              "by another program?")
    return entry


def entry_in(path: Path, metadata: JsonMapping) -> JsonObject | None:
    """This program's entry in a file's metadata, or None. Raises CheckpointError if it is not a JSON object."""
    if ENTRY not in metadata:
        return None
    try:
        return plain_entry(path, json.loads(metadata[ENTRY]))
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a {ENTRY} entry in its metadata that is not JSON ({error}): the file is "
                              "damaged") from error
