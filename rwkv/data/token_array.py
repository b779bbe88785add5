"""Reads token ids in one or many memory-mapped files as a single array. Only the ids that are read are loaded into memory.

    tokens = TokenArray(parts, offsets)
    tokens[10:20]                       # the ids (10,)
    tokens.starts                       # the offsets of documents (D,), int64, ascending
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAPPED = 1024                            # maximum number of files mapped at the same time; a process may map about 65,000


class Part(NamedTuple):
    """A range of consecutive ids in a file: `length` ids of type `dtype`, beginning with id number `first`."""

    path: Path
    dtype: str
    first: int
    length: int


class DocumentOffsets(NamedTuple):
    """A range of document offsets in an .npy file: the entries [first, first + length), int64, minus `base`."""

    path: Path
    first: int
    length: int
    base: int


class TokenArray:
    """An array of the ids of `parts`, one after another, with the offsets of the documents.

    Pickling stores only the paths of the files. Unpickling maps the files again.
    """

    def __init__(self, parts: Sequence[Part], *offsets: DocumentOffsets) -> None:
        self.parts = [part for part in parts if part.length]
        self._offsets = offsets
        self._ends = list(accumulate(part.length for part in self.parts))
        self._mapped = lru_cache(MAPPED)(_open_mapped)   # is cached by file, because a file may contain thousands of parts

    def __reduce__(self) -> tuple[object, ...]:
        return TokenArray, (self.parts, *self._offsets)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, places: slice) -> np.ndarray:
        """Returns consecutive ids (n,): a view of the mapped file, or a copy if the ids are in several parts."""
        start, stop, step = places.indices(len(self))
        assert step == 1, "only consecutive ids can be read"
        pieces = []
        index = bisect_right(self._ends, start)
        while start < stop:
            part = self.parts[index]
            begin = self._ends[index] - part.length
            ids = self._mapped(part.path, part.dtype)
            pieces.append(ids[part.first + start - begin:part.first + min(stop, self._ends[index]) - begin])
            start = self._ends[index]
            index += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint16)])

    @staticmethod
    def concatenate(arrays: Sequence["TokenArray"]) -> "TokenArray":
        """Concatenates arrays. Either all of them must be in files, or all must be in memory."""
        if arrays and isinstance(arrays[0], TokensInMemory):
            begins = accumulate(map(len, arrays), initial=0)
            return TokensInMemory(np.concatenate([array[:] for array in arrays]), np.concatenate(
                [array.starts + begin for array, begin in zip(arrays, begins, strict=False)]))
        begins = accumulate(map(len, arrays), initial=0)
        offsets = [offsets._replace(base=offsets.base - begin)
                   for array, begin in zip(arrays, begins, strict=False) for offsets in array._offsets]
        return TokenArray([part for array in arrays for part in array.parts], *offsets)

    def first(self, length: int) -> "TokenArray":
        """Returns the first `length` ids, or all ids if there are fewer."""
        return self.between(0, min(length, len(self)))

    def between(self, start: int, stop: int) -> "TokenArray":
        """Returns the ids [start, stop) and the offsets of the documents that begin there."""
        cut = []
        for part, end in zip(self.parts, self._ends, strict=True):
            skipped = max(0, start - (end - part.length))
            length = min(end, stop) - (end - part.length) - skipped
            if length > 0:
                cut.append(part._replace(first=part.first + skipped, length=length))
        offsets = []
        for old in self._offsets:
            first, last = np.searchsorted(_load_offsets(old), (start, stop)).tolist()
            offsets.append(old._replace(first=old.first + first, length=last - first, base=old.base + start))
        return TokenArray(cut, *offsets)

    @property
    def bounds(self) -> np.ndarray:
        """Returns the offset of each document and, last, the length of the array: (D+1,) int64."""
        return np.append(self.starts, len(self))

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns the offset of each document's first token, or of the end_of_text before that token: (D,) int64, ascending."""
        return np.concatenate([np.empty(0, np.int64), *map(_load_offsets, self._offsets)])


class TokensInMemory(TokenArray):
    """A TokenArray of ids (N,) in memory, with the documents' offsets `begins` (D,)."""

    def __init__(self, ids: np.ndarray, begins: np.ndarray) -> None:
        super().__init__([])
        self._ids = ids
        self._begins = begins

    def __reduce__(self) -> tuple[object, ...]:
        return TokensInMemory, (self._ids, self._begins)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, places: slice) -> np.ndarray:
        return self._ids[places]

    def between(self, start: int, stop: int) -> "TokenArray":
        inside = (self._begins >= start) & (self._begins < stop)
        return TokensInMemory(self._ids[start:stop], self._begins[inside] - start)

    @cached_property
    def starts(self) -> np.ndarray:
        return self._begins


def _load_offsets(offsets: DocumentOffsets) -> np.ndarray:
    path, first, length, base = offsets
    return np.load(path, mmap_mode="r")[first:first + length] - base


def _open_mapped(path: Path, dtype: str) -> np.ndarray:
    """Maps a file and returns a plain array, which is faster to slice than a memmap."""
    return np.asarray(np.memmap(path, dtype, "r"))
