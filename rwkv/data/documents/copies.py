"""Copies of documents. All copies of a document go to the same split, so that the validation split contains no training text.

Two documents are copies if their texts are equal except for white space. They are compared by a 64-bit hash. Splitter needs 100
bytes of memory per distinct document.
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
    """A 64-bit hash of a text, ignoring white space, computed one chunk at a time."""

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
    """The split of a document. val: whether it is for validation. copy: whether it equals an earlier document. moved: whether
    it would be in the other split if copies were ignored."""

    val: bool
    copy: bool
    moved: bool


class Splitter:
    """Assigns documents of a stream to splits: distinct documents by in_validation, copies to the split of the original.

    distinct: the number of distinct documents so far.
    """

    def __init__(self, fraction: float) -> None:
        self.distinct = 0
        self._by_document = in_validation(fraction)
        self._by_number = in_validation(fraction)
        self._val: dict[int, bool] = {}

    def place(self, *fingerprints: int) -> Placed:
        """Assigns the next document. fingerprints: one for each of its texts; a pair of answers has two texts. The document is
        a copy if any fingerprint has occurred before."""
        plain = next(self._by_number)
        earlier = next((self._val[value] for value in fingerprints if value in self._val), None)
        if earlier is None:
            self.distinct += 1
        val = next(self._by_document) if earlier is None else earlier
        for value in fingerprints:
            self._val.setdefault(value, val)
        return Placed(val, earlier is not None, val != plain)


def place_in_order(fingerprints: Sequence[int], sizes: Sequence[int], fraction: float) -> list[Placed]:
    """Assigns to validation the first documents, up to `fraction` of all bytes, and their copies; to training, all others.

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
    """Assigns each (text, where, weight) to a split. Omits empty texts.

    If there is only one document, or if all are equal, each is divided: its beginning is for training, its end for validation.
    """
    filled = (text for text in texts if text[0])
    first = next(filled, None)
    if first is None:
        raise UserError(f"data.path={path} has no text: all its documents are empty")
    equal = 1                            # number of documents at the beginning that equal the first
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
    """Divides each of `times` equal documents: its beginning is for training, its end for validation."""
    cut = validation_begins(len(text), fraction, where)
    for begin, part, val in ((0, text[:cut], False), (cut, text[cut:], True)):
        for number in range(times):
            yield Document(chunks_of(part), val, where, before=begin, copy=number > 0 and val)


def repeated_share(documents: Iterable[Document]) -> float:
    """The fraction of the validation text's characters, in lines of at least LONG, that the training text also contains.

    Searches for the hashes of at least SAMPLE lines, spread evenly over the validation text (all lines if there are fewer).
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
    unfinished: list[str] = []           # the chunks of a line so far
    for chunk in chunks:
        first, *others = chunk.split("\n")
        unfinished.append(first)
        if others:
            yield ["".join(unfinished), *others[:-1]]
            unfinished = [others[-1]]
    yield ["".join(unfinished)]
