"""Finds copies of documents and puts all of them into the same split, so that the validation split contains no training text.

Two documents are copies if their texts are equal except for white space. The texts are compared by a 64-bit hash. Splitter
needs 100 bytes of memory per distinct document.
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
    """Computes a 64-bit hash of a text without white space, one chunk at a time."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def update(self, chunk: str) -> None:
        self._hash.update(chunk.encode(errors="surrogatepass").translate(None, WHITE))

    def value(self) -> int:
        return int.from_bytes(self._hash.digest())


def fingerprint(chunks: Iterable[str]) -> int:
    running_hash = Fingerprint()
    for chunk in chunks:
        running_hash.update(chunk)
    return running_hash.value()


class Placement(NamedTuple):
    """The split that a document is assigned to.

    Attributes:
        val: True for validation, False for training.
        copy: True if the document equals an earlier document.
        moved: True if the document would be in the other split without the rule about copies.
    """

    val: bool
    copy: bool
    moved: bool


class Splitter:
    """Assigns the documents of a stream to splits. A copy goes to the split of the original document.

    The other documents are assigned by in_validation, and `distinct` counts them.
    """

    def __init__(self, fraction: float) -> None:
        self.distinct = 0
        self._by_document = in_validation(fraction)
        self._by_number = in_validation(fraction)
        self._val: dict[int, bool] = {}

    def place(self, *fingerprints: int) -> Placement:
        """Assigns the next document, which is a copy if any of its fingerprints has occurred before.

        `fingerprints` has one entry per text of the document. A pair of answers has two texts.
        """
        val_by_number = next(self._by_number)
        original_val = next((self._val[value] for value in fingerprints if value in self._val), None)
        if original_val is None:
            self.distinct += 1
        val = next(self._by_document) if original_val is None else original_val
        for value in fingerprints:
            self._val.setdefault(value, val)
        return Placement(val, original_val is not None, val != val_by_number)


def place_in_order(fingerprints: Sequence[int], sizes: Sequence[int], fraction: float) -> list[Placement]:
    """Assigns the first documents, up to `fraction` of all bytes, and their copies to validation, and the others to training.

    `sizes` are the bytes of the documents, at least two of which must differ.
    """
    total_sizes: dict[int, int] = {}
    for value, size in zip(fingerprints, sizes, strict=True):
        total_sizes[value] = total_sizes.get(value, 0) + size
    validated = {*list(total_sizes)[:count_reaching(fraction, [*total_sizes.values()])]}
    val_count = count_reaching(fraction, sizes)
    seen: set[int] = set()
    placed = []
    for number, value in enumerate(fingerprints):
        val = value in validated
        placed.append(Placement(val, value in seen, val != (number < val_count)))
        seen.add(value)
    return placed


def split_documents(texts: Iterable[tuple[str, str, int | None]], fraction: float, path: str) -> Iterator[Document]:
    """Yields a Document with a split for each (text, where, weight) that is not empty.

    If all documents are equal, or if there is only one, the beginning of each is for training and the end for validation.
    Raises UserError if all texts are empty.
    """
    filled = (text for text in texts if text[0])
    first = next(filled, None)
    if first is None:
        raise UserError(f"data.path={path} has no text, because all documents are empty")
    equal = 1                            # counts the documents at the beginning that equal the first one
    different = next(filled, None)
    while different is not None and different[0] == first[0]:
        equal += 1
        different = next(filled, None)
    if different is None:
        yield from _split_copies(first[0], first[1], fraction, equal)
        return
    splitter = Splitter(fraction)
    for text, where, weight in chain(repeat(first, equal), [different], filled):
        place = splitter.place(fingerprint([text]))
        yield Document(chunks_of(text), place.val, where, weight, copy=place.copy)


def _split_copies(text: str, where: str, fraction: float, times: int) -> Iterator[Document]:
    cut = validation_begins(len(text), fraction, where)
    for begin, part, val in ((0, text[:cut], False), (cut, text[cut:], True)):
        for number in range(times):
            yield Document(chunks_of(part), val, where, before=begin, copy=number > 0 and val)


def repeated_share(documents: Iterable[Document]) -> float:
    """Returns the fraction of the validation text that the training text also contains.

    The fraction is measured in characters, and only in lines of at least LONG characters. At least SAMPLE lines, or all if
    there are fewer, are compared by hash. The compared lines are spread evenly over the validation text.
    """
    documents = list(documents)
    train, val = ([document for document in documents if document.val == is_val] for is_val in (False, True))
    sample: list[tuple[int, int]] = []   # hash and length of each line
    every = 1
    for number, line in enumerate(line for document in val for lines in _lines_by_chunk(document.chunks) for line in lines
                                  if len(line) >= LONG):
        if number % every == 0:
            sample.append((hash(line), len(line)))
        if len(sample) == 2 * SAMPLE:
            sample = sample[::2]
            every *= 2
    hashes = {hashed for hashed, _ in sample}
    repeated: set[int] = set()
    for document in train:
        for lines in _lines_by_chunk(document.chunks):
            repeated |= hashes.intersection(map(hash, lines))
    return sum(length for hashed, length in sample if hashed in repeated) / max(sum(length for _, length in sample), 1)


def _lines_by_chunk(chunks: Iterable[str]) -> Iterator[list[str]]:
    unfinished: list[str] = []           # the chunks of a line so far
    for chunk in chunks:
        first, *others = chunk.split("\n")
        unfinished.append(first)
        if others:
            yield ["".join(unfinished), *others[:-1]]
            unfinished = [others[-1]]
    yield ["".join(unfinished)]
