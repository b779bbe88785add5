"""Several owners keep things in a bounded room: which thing is dropped first."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairLRU(Generic[K]):
    """The sizes and owners of things, in the order of use, the most recently used last. total: the sum of the sizes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[K, tuple[str, int]] = OrderedDict()
        self._of_owner: Counter[str] = Counter()         # total size, by owner
        self._number: Counter[str] = Counter()           # number of things, by owner
        self.total = 0

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: K, owner: str, size: int) -> None:
        """Adds a thing, as the one used last, in place of an earlier one with the same key."""
        self.remove(key)
        self._kept[key] = owner, size
        self._of_owner[owner] += size
        self._number[owner] += 1
        self.total += size

    def use(self, key: K) -> None:
        self._kept.move_to_end(key)

    def remove(self, key: K) -> None:
        if key not in self._kept:
            return
        owner, size = self._kept.pop(key)
        self.total -= size
        self._of_owner[owner] -= size
        self._number[owner] -= 1
        if not self._number[owner]:
            del self._number[owner], self._of_owner[owner]

    def victim(self, most: int) -> K:
        """The thing to drop where the total exceeds `most`.

        It is the least recently used one of an owner that holds more than an equal share. The thing used last is dropped only
        if it is the only one. So an owner within its share loses nothing to others, and a single owner has all the room.
        """
        share = most / len(self._of_owner)
        *others, last = self._kept
        return next((key for key in others if self._of_owner[self._kept[key][0]] > share), (others or [last])[0])
