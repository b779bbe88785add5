"""Defines what the read() of a file format returns (Content) and what its write() accepts (Outgoing)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernels.matvec import BLOCKS, Packed
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError
from rwkv.io.json_types import JsonMapping, JsonObject

ENTRY = "timemix"                        # in a file's metadata, the key of the entry that files.describe makes


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix W (N,K) that a file stores in a packed format of kernels/matvec.

    Attributes:
        format: the name of the packed format.
        read: returns the packed matrix, as a view of the mapped file, or as a copy if `repacked`.
        repacked: the file's layout differs from the layout of kernels/matvec. `timemix convert` writes a file that needs no
            copy.
    """

    format: str
    shape: tuple[int, ...]
    read: Callable[[], Packed]
    repacked: bool = False

    @property
    def dtype(self) -> str:
        """Returns the dtype, int8 or int4, of a file that stores this matrix."""
        return "int4" if self.format in BLOCKS else self.format


@dataclass
class Content:
    """What a file contains: its tensors, its metadata, and the entry `timemix` that this program adds.

    Attributes:
        tensors: the tensors, by the names that the file uses.
        entry: the value of the entry `timemix`; None if another program wrote the file.
        declared: the sizes that the file states, by their names in ModelConfig; vocab_size; and constants that the tensors
            assume, such as an epsilon, by the generation's names.
        tied: the head shares the weights of the embedding.
        packed: the matrices that the file stores packed. `tensors` has the same matrices as float32.
        notes: messages about values that were assumed or ignored.
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
    """What a file format writes: the tensors by official name, in the dtypes to write, and the entry `timemix`.

    Attributes:
        quantised: the block format of the large matrices, one of formats.QUANTISED. None keeps the dtypes of `tensors`.
        layout: the layout of a Hugging Face directory, one of formats.LAYOUTS.
        packed: the matrices that the source file stores packed.
        card: the text of the README.md in a Hugging Face directory.
        by_input: stores the matrices with sparse inputs transposed, which makes decoding on a CPU faster.
        texts: the source's chat templates and generation options, as the files of a directory: {name: text}.
        name: the model's name, if a default chat template follows from it.
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
    texts: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None


def plain_entry(path: Path, entry: object) -> JsonObject:
    """Returns the entry `timemix` unchanged. Raises CheckpointError if the entry is not a dictionary."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"the entry {ENTRY} in {path} must be a dictionary; got a {type(entry).__name__}. Another "
                              "program may have written the file")
    return entry


def entry_in(path: Path, metadata: JsonMapping) -> JsonObject | None:
    """Returns the entry `timemix` in a file's metadata, or None. Raises CheckpointError if it is not a JSON object."""
    if ENTRY not in metadata:
        return None
    try:
        return plain_entry(path, json.loads(metadata[ENTRY]))
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: the metadata entry {ENTRY} is not JSON ({error})") from error
