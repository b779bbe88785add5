"""Text documents, their sources, and the rules by which they are split into training and validation."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rwkv.errors import UserError

SPLIT_SEED = 0
CHUNK = 1 << 16                          # characters per chunk


class Document(NamedTuple):
    """A text in consecutive `chunks`. val: whether it is in the validation split. where: the name of its file, for errors.

    weight: the document's bytes in the source, for the progress bar; if None, the bytes of its text. before: the number of
    characters before the document in the file. copy: whether the document equals an earlier one.
    """

    chunks: Iterable[str]
    val: bool
    where: str
    weight: int | None = None
    before: int = 0
    copy: bool = False


@dataclass(frozen=True)
class Source:
    """A source of documents. documents(): all of them, none empty, in an order that depends only on the data.

    about: one line for messages. sha256: a hash of the contents and their order. size: an estimate of the bytes to read.
    at_most: upper bounds on the number of bytes plus documents in (training, validation); None if unknown before reading.
    """

    documents: Callable[[], Iterator[Document]]
    about: str
    sha256: str
    size: int
    at_most: tuple[int, int] | None = None


def chunks_of(text: str) -> Iterator[str]:
    return (text[start:start + CHUNK] for start in range(0, len(text), CHUNK))


def rank(name: str) -> bytes:
    """A sort key for a fixed random order, which depends only on the name."""
    return hashlib.sha256(f"{SPLIT_SEED} {name}".encode()).digest()


def count_reaching(fraction: float, sizes: Sequence[int]) -> int:
    """How many documents, from the first one on, contain `fraction` of all bytes: at least one, and fewer than all."""
    target = fraction * sum(sizes)
    reached = count = 0
    while reached < target and count < len(sizes) - 1:
        reached += sizes[count]
        count += 1
    return max(count, 1)


def in_validation(fraction: float) -> Iterator[bool]:
    """Whether each document of an endless series is for validation: the first one, and one of every further 1/fraction
    documents, chosen by a hash.
    """
    block = picked = number = 0
    while True:
        yield number == picked
        number += 1
        if number == math.ceil((block + 1) / fraction):
            block += 1
            span = math.ceil((block + 1) / fraction) - number
            picked = number + int.from_bytes(rank(str(block))[:8], "big") % span


def validation_begins(characters: int, fraction: float, where: str) -> int:
    """The index of the character at which validation begins in a single document. Raises UserError if it is too short."""
    cut = int(characters * (1 - fraction))
    if not 0 < cut < characters:
        raise UserError(f"{where} has {characters} characters: too few to split into training and validation")
    return cut
