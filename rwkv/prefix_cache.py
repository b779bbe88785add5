"""A memory of what has been read, bounded in bytes: a prompt that begins as an earlier one did costs only its rest.

An RWKV's context is of a fixed size however long the text was, so each entry is one context under the tokens it has read.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value", bound=tuple[Any, ...])


class PrefixCache(Generic[Value]):
    """The contexts used last, under the tokens that they have read, in at most max_bytes.

    For one model: a context of another means nothing to it. `longest` and `put` are what reading uses; threads may share a
    cache. Raises ValueError for a max_bytes below 0.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is 0 or more; got {max_bytes}")
        self.max_bytes, self.bytes = max_bytes, 0
        self._entries: OrderedDict[tuple[int, ...], Value] = OrderedDict()
        self._lock = Lock()              # of the entries and of their bytes

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Value | None]:
        """How many of the first tokens have been read, and the context after them; 0 and None where none have."""
        tokens = tuple(tokens)
        with self._lock:
            found = max((key for key in self._entries if tokens[:len(key)] == key), key=len, default=None)
            if found is None:
                return 0, None
            self._entries.move_to_end(found)
            return len(found), self._entries[found]

    def put(self, tokens: Sequence[int], context: Value) -> None:
        """Remembers `context`, and forgets what was used longest ago where there is no room."""
        size = _bytes(context)
        with self._lock:
            self._forget(tuple(tokens))
            if size > self.max_bytes:
                return
            while self.bytes + size > self.max_bytes:
                self._forget(next(iter(self._entries)))
            self._entries[tuple(tokens)] = context
            self.bytes += size

    def _forget(self, tokens: tuple[int, ...]) -> None:
        if tokens in self._entries:
            self.bytes -= _bytes(self._entries.pop(tokens))


def _bytes(parts: Iterable[Any]) -> int:
    return sum(part.untyped_storage().nbytes() if isinstance(part, Tensor) else _bytes(part) for part in parts)
