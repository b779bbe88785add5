"""One long array of token ids that lies in many files, memory-mapped: what is read of it is all that is in memory.

    stream = Stream(parts, starts)
    stream[10:20]                       # ids (10,), as in one array
    stream.starts                       # places where documents begin (D,), int64, ascending
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAPPED = 1024                            # files at a time: a system lets a process map some 65,000


class Part(NamedTuple):
    """`length` ids of type `dtype` in a file, from id number `first` on."""

    path: Path
    dtype: str
    first: int
    length: int


class Starts(NamedTuple):
    """Where documents begin: entries [first, first + length) of a .npy file of int64, less `base`."""

    path: Path
    first: int
    length: int
    base: int


class Stream:
    """Pickles as the names of its files, so that another process opens them itself."""

    def __init__(self, parts: Sequence[Part], starts: Starts) -> None:
        self.parts = [part for part in parts if part.length]
        self._starts = starts
        self._ends = list(accumulate(part.length for part in self.parts))
        self._mapped = lru_cache(MAPPED)(_map)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.parts, self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.parts, self._starts) == (other.parts, other._starts)

    __hash__ = None                      # type: ignore[assignment]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, places: slice) -> np.ndarray:
        """Consecutive ids, a copy where they lie in more than one file."""
        start, stop, step = places.indices(len(self))
        assert step == 1, "ids are read in order"
        found, index = [], bisect_right(self._ends, start)
        while start < stop:
            part, begins = self.parts[index], self._ends[index] - self.parts[index].length
            found.append(self._mapped(part)[start - begins:stop - begins])
            start, index = self._ends[index], index + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.uint16)])

    @cached_property
    def starts(self) -> np.ndarray:
        """Where documents begin: the place of the end-of-text token before each. (D,), int64, ascending."""
        where = self._starts
        return np.load(where.path, mmap_mode="r")[where.first:where.first + where.length] - where.base


def _map(part: Part) -> np.ndarray:
    """A plain array over the file: cutting pieces from a memmap takes longer."""
    dtype = np.dtype(part.dtype)
    return np.asarray(np.memmap(part.path, dtype, "r", offset=part.first * dtype.itemsize, shape=(part.length,)))
