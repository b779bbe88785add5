"""Decides what a full cache evicts: a fair LRU policy for several owners."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairLRU(Generic[K]):
    """Records the sizes and owners of a cache's entries, and chooses the entry to evict.

    Iteration starts with the least recently used entry. `total` is the sum of all sizes.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[K, tuple[str, int]] = OrderedDict()
        self._sizes: Counter[str] = Counter()            # total size per owner
        self._counts: Counter[str] = Counter()           # number of entries per owner
        self.total = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, owner: str, size: int) -> None:
        """Adds an entry as the most recently used one, and replaces an entry with the same key."""
        self.remove(key)
        self._entries[key] = owner, size
        self._sizes[owner] += size
        self._counts[owner] += 1
        self.total += size

    def use(self, key: K) -> None:
        self._entries.move_to_end(key)

    def remove(self, key: K) -> None:
        if key not in self._entries:
            return
        owner, size = self._entries.pop(key)
        self.total -= size
        self._sizes[owner] -= size
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner], self._sizes[owner]

    def victim(self, capacity: int) -> K:
        """Returns the key of the entry to evict when `total` exceeds `capacity`.

        The victim is the least recently used entry of an owner with more than an equal share. The most recently used entry is
        evicted only if there is no other entry. So other owners cannot evict the entries of an owner within its share, and a
        single owner may use the whole cache.
        """
        share = capacity / len(self._sizes)
        *others, last = self._entries
        return next((key for key in others if self._sizes[self._entries[key][0]] > share), (others or [last])[0])
