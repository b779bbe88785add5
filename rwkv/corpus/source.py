"""What every kind of data looks like to its reader."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

SPLIT_SEED = 0
CHUNK = 1 << 16                          # characters, or bytes of a file, at a time


class Document(NamedTuple):
    """A text in consecutive `chunks`, in one split; `where` names it in errors.

    weight: the bytes of the source that it stands for in the progress bar, where they are not those of its text.
    before: the characters of `where` that stand before it.
    """

    chunks: Iterable[str]
    val: bool
    where: str
    weight: int | None = None
    before: int = 0


@dataclass(frozen=True)
class Source:
    """documents(): all of them, in an order that only the data decide; none is empty.

    about: one line for people. sha256: identifies the contents and the order. size: bytes to go through, as far as is known.
    at_most: bounds on the bytes and documents of (training, validation) together, where known before reading.
    """

    documents: Callable[[], Iterator[Document]]
    about: str
    sha256: str
    size: int
    at_most: tuple[int, int] | None = None


def sha256(parts: Iterable[str]) -> str:
    """Identifies a list of strings; of a single one, it is the SHA-256 of its UTF-8."""
    joined, between = hashlib.sha256(), b""
    for part in parts:
        joined.update(between + part.encode())
        between = b"\0"
    return joined.hexdigest()


def chunks_of(text: str) -> Iterator[str]:
    return (text[start:start + CHUNK] for start in range(0, len(text), CHUNK))


def rank(name: str) -> bytes:
    """A place in a fixed random order, that hangs on the name alone."""
    return hashlib.sha256(f"{SPLIT_SEED} {name}".encode()).digest()


def count_reaching(fraction: float, sizes: Sequence[int]) -> int:
    """How many of the first documents hold `fraction` of all bytes: at least one, and fewer than all."""
    wanted, reached, count = fraction * sum(sizes), 0, 0
    while reached < wanted and count < len(sizes) - 1:
        reached += sizes[count]
        count += 1
    return max(count, 1)


def in_validation(fraction: float) -> Iterator[bool]:
    """For one document after the other, of a number that nobody knows yet, whether it is for validation.

    The first is, and of every 1/fraction that follow one is, at a place that its number decides at random.
    """
    block, picked = 0, 0
    number = 0
    while True:
        yield number == picked
        number += 1
        if number == math.ceil((block + 1) / fraction):
            block += 1
            span = math.ceil((block + 1) / fraction) - number
            picked = number + int.from_bytes(rank(str(block))[:8], "big") % span


def split_documents(found: Iterable[tuple[str, str, int | None]], fraction: float, path: str) -> Iterator[Document]:
    """From (text, where, weight) to documents of the two splits, empty ones left out; a single one is cut in two."""
    kept = (document for document in found if document[0])
    first = list(islice(kept, 2))
    if not first:
        raise ValueError(f"data.path={path} has no text: all its documents are empty")
    if len(first) == 1:
        yield from _halves(first[0][0], first[0][1], fraction)
    else:
        for val, (text, where, weight) in zip(in_validation(fraction), chain(first, kept), strict=False):
            yield Document(chunks_of(text), val, where, weight)


def _halves(text: str, where: str, fraction: float) -> Iterator[Document]:
    cut = validation_begins(len(text), fraction, where)
    yield Document(chunks_of(text[:cut]), False, where)
    yield Document(chunks_of(text[cut:]), True, where, before=cut)


def validation_begins(characters: int, fraction: float, where: str) -> int:
    """The character of a single document from which on it is for validation. Raises ValueError where it is too short."""
    cut = int(characters * (1 - fraction))
    if not 0 < cut < characters:
        raise ValueError(f"{where} has {characters} characters: too few to split into training and validation")
    return cut
