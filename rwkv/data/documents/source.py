"""Defines text documents and their sources, and the rules that split documents into training and validation."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.io.lines import count_of

SPLIT_SEED = 0
CHUNK = 1 << 16                          # characters per chunk


class Document(NamedTuple):
    """A text document.

    Attributes:
        chunks: the text, in consecutive chunks.
        val: True if the document is in the validation split.
        where: the name of the file, for error messages.
        weight: the bytes that the document has in the source, for the progress bar; None for the bytes of the text.
        before: the number of characters before the document in the file.
        copy: True if the document equals an earlier document.
    """

    chunks: Iterable[str]
    val: bool
    where: str
    weight: int | None = None
    before: int = 0
    copy: bool = False


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        documents: yields all documents when called, none of them empty, in an order that depends only on the data.
        about: one line about the source, for messages.
        sha256: a hash of the contents and their order.
        size: an estimate of the bytes to read.
        at_most: for the training and for the validation split, an upper bound of the number of bytes plus the number of
            documents; None if unknown before reading.
    """

    documents: Callable[[], Iterator[Document]]
    about: str
    sha256: str
    size: int
    at_most: tuple[int, int] | None = None


def chunks_of(text: str) -> Iterator[str]:
    return (text[start:start + CHUNK] for start in range(0, len(text), CHUNK))


def rank(name: str) -> bytes:
    """Returns a sort key that puts names into a fixed random order. The key depends only on the name."""
    return hashlib.sha256(f"{SPLIT_SEED} {name}".encode(errors="surrogateescape")).digest()      # a name may not be UTF-8


def count_reaching(fraction: float, sizes: Sequence[int]) -> int:
    """Returns how many documents, from the first on, reach `fraction` of all bytes: at least one, and fewer than all."""
    target = fraction * sum(sizes)
    reached = count = 0
    while reached < target and count < len(sizes) - 1:
        reached += sizes[count]
        count += 1
    return max(count, 1)


def in_validation(fraction: float) -> Iterator[bool]:
    """Yields for each document of an endless series whether it is for validation.

    The first document is for validation. Of the documents after it, a hash chooses one in 1/fraction.
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
    """Returns the index of the character at which validation begins in a single document.

    Raises UserError if the document is too short to be split.
    """
    cut = int(characters * (1 - fraction))
    if not 0 < cut < characters:
        raise UserError(f"{where} is too short to split into training and validation: it has "
                        f"{count_of(characters, 'character')}. Use a longer text")
    return cut
