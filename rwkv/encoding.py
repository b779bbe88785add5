"""Documents in pieces to arrays of ids, a batch at a time, with the place in the data of what cannot be encoded."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rwkv.tokenizer import Tokenizer

BATCH = 1 << 20                          # characters given to a tokenizer at a time: bounds what it keeps of them


class Piece(NamedTuple):
    """A document, or a part of one; `opens`: it is the first of its document. before: the characters of `where` before it."""

    text: str
    val: bool
    opens: bool
    where: str
    weight: int
    before: int = 0


def encode(parts: list[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The ids of each piece, end_of_text before those that open a document."""
    for batch in _batches(parts):
        for part, ids in zip(batch, _encode_batch(batch, tokenizer), strict=True):
            if part.opens:
                yield np.array([tokenizer.end_of_text], dtype)
            yield np.array(ids, dtype)


def _encode_batch(batch: list[Piece], tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([part.text for part in batch])
    except ValueError:
        for part in batch:               # which one was it
            try:
                tokenizer.encode(part.text, part.before)
            except ValueError as error:
                raise ValueError(f"{part.where}: {error}") from None
        raise


def _batches(parts: Sequence[Piece]) -> Iterator[list[Piece]]:
    batch, length = [], 0
    for part in parts:
        batch.append(part)
        length += len(part.text)
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
