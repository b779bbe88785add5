"""Copies of documents: all copies of a document go to the same split, so that validation has no training text.

Two documents are copies if their texts are equal except for white space. Documents are compared by 64 bits of their hash. A
stream (Splitter) takes 100 bytes of memory per distinct document.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, repeat
from typing import NamedTuple

from rwkv.data.documents.source import Document, chunks_of, count_reaching, in_validation, validation_begins
from rwkv.errors import UserError

WHITE = b" \t\n\r\v\f"
LONG = 32                                # characters; shorter lines, such as "}", occur in unrelated texts
SAMPLE = 4096                            # lines of the validation text to search for in the training text


class Fingerprint:
    """The hash of a text in chunks."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def update(self, chunk: str) -> None:
        self._hash.update(chunk.encode(errors="surrogatepass").translate(None, WHITE))

    def value(self) -> int:
        return int.from_bytes(self._hash.digest())


def fingerprint(chunks: Iterable[str]) -> int:
    computed = Fingerprint()
    for chunk in chunks:
        computed.update(chunk)
    return computed.value()


class Placed(NamedTuple):
    """The split of a document. copy: it equals an earlier document. moved: without copies it would be in the other split."""

    val: bool
    copy: bool
    moved: bool


class Splitter:
    """Splits a stream of documents: the first of equal documents by in_validation, the others like the first.

    distinct: the number of different documents so far.
    """

    def __init__(self, fraction: float) -> None:
        self.distinct = 0
        self._by_document = in_validation(fraction)
        self._by_number = in_validation(fraction)
        self._val: dict[int, bool] = {}

    def place(self, *fingerprints: int) -> Placed:
        """fingerprints: of the document's texts; a document is a copy if it shares one of them, as a pair of answers may."""
        plain = next(self._by_number)
        earlier = next((self._val[value] for value in fingerprints if value in self._val), None)
        if earlier is None:
            self.distinct += 1
        val = next(self._by_document) if earlier is None else earlier
        for value in fingerprints:
            self._val.setdefault(value, val)
        return Placed(val, earlier is not None, val != plain)


def place_in_order(fingerprints: Sequence[int], sizes: Sequence[int], fraction: float) -> list[Placed]:
    """The split of each document: the first documents with `fraction` of all bytes, and their copies, are for validation.

    sizes: bytes of each document. At least two documents must differ.
    """
    total_sizes: dict[int, int] = {}
    for value, size in zip(fingerprints, sizes, strict=True):
        total_sizes[value] = total_sizes.get(value, 0) + size
    validated = {*list(total_sizes)[:count_reaching(fraction, [*total_sizes.values()])]}
    plain = count_reaching(fraction, sizes)
    seen: set[int] = set()
    placed = []
    for number, value in enumerate(fingerprints):
        val = value in validated
        placed.append(Placed(val, value in seen, val != (number < plain)))
        seen.add(value)
    return placed


def split_documents(texts: Iterable[tuple[str, str, int | None]], fraction: float, path: str) -> Iterator[Document]:
    """Documents of both splits from (text, where, weight), without empty texts.

    A single document is divided in two, and so is each of several equal ones.
    """
    filled = (text for text in texts if text[0])
    first = next(filled, None)
    if first is None:
        raise UserError(f"data.path={path} has no text: all its documents are empty")
    equal = 1                            # documents at the beginning with the text of the first
    different = next(filled, None)
    while different is not None and different[0] == first[0]:
        equal += 1
        different = next(filled, None)
    if different is None:
        yield from _divided(first[0], first[1], fraction, equal)
        return
    splitter = Splitter(fraction)
    for text, where, weight in chain(repeat(first, equal), [different], filled):
        place = splitter.place(fingerprint([text]))
        yield Document(chunks_of(text), place.val, where, weight, copy=place.copy)


def _divided(text: str, where: str, fraction: float, times: int) -> Iterator[Document]:
    """`times` equal documents: their beginnings for training, their ends for validation."""
    cut = validation_begins(len(text), fraction, where)
    for begin, part, val in ((0, text[:cut], False), (cut, text[cut:], True)):
        for number in range(times):
            yield Document(chunks_of(part), val, where, before=begin, copy=number > 0 and val)


def repeated_share(documents: Iterable[Document]) -> float:
    """The share of the validation text that the training text contains, by characters in lines of at least LONG characters.

    Searches for SAMPLE lines, spread over the validation text, by their hashes, since lines may be long.
    """
    documents = list(documents)
    train, val = ([document for document in documents if document.val == is_val] for is_val in (False, True))
    sample: list[tuple[int, int]] = []   # hash and length of each line
    every = 1
    for number, line in enumerate(line for document in val for lines in _lines(document.chunks) for line in lines
                                  if len(line) >= LONG):
        if number % every == 0:
            sample.append((hash(line), len(line)))
        if len(sample) == 2 * SAMPLE:
            sample = sample[::2]
            every *= 2
    hashes = {hashed for hashed, _ in sample}
    repeated: set[int] = set()
    for document in train:
        for lines in _lines(document.chunks):
            repeated |= hashes.intersection(map(hash, lines))
    return sum(length for hashed, length in sample if hashed in repeated) / max(sum(length for _, length in sample), 1)


def _lines(chunks: Iterable[str]) -> Iterator[list[str]]:
    """The lines of a text, grouped by the chunk in which they end."""
    unfinished: list[str] = []           # the parts of a line
    for chunk in chunks:
        first, *others = chunk.split("\n")
        unfinished.append(first)
        if others:
            yield ["".join(unfinished), *others[:-1]]
            unfinished = [others[-1]]
    yield ["".join(unfinished)]
