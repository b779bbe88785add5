"""The prefix cache: prefill results, found by the tokens that they have read.

A result has the same size for every length, so the cache holds many; results on a GPU are moved to host memory. A prompt that
begins with an earlier prompt, or with an earlier prompt and its answer, continues from that result.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, repeat
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from rwkv.errors import UserError
from rwkv.fair_lru import FairLRU
from rwkv.model.base import Model
from rwkv.model.weights_watch import WeightsWatch

if TYPE_CHECKING:
    from rwkv.generation.prefill import PrefillResult


class Key(NamedTuple):
    """A key of PrefixCache: the model, the owner, the number of tokens, and the hash of the tokens.

    Different models, and different owners, share no entries.
    """

    length: int = 0
    hash: int = 0
    model: str = ""
    owner: str = ""


EMPTY = Key()


class PrefixCache:
    """A cache of at most max_bytes bytes of prefill results, found by the tokens that they have read. It evicts the least
    recently used result; an owner that stays within its fair share of the cache loses nothing to others.

    A key has the number of tokens and their polynomial hash, modulo a 127-bit prime and at a random point. Finding the longest
    match takes one look-up per prompt token, however many entries there are, because the key of a sequence is computed from
    the key of its prefix. Two prefixes of length n have the same hash with a probability of about n / 2^127. A model's name in
    the keys stands for one model: its entries are removed when a different model gets the name, and when the weights change.
    Thread-safe. Raises UserError for a max_bytes below 0.
    """

    _PRIME = 2**127 - 1

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes must be 0 or more; got {max_bytes}")
        self.max_bytes = max_bytes
        self._point = secrets.randbelow(self._PRIME)
        self._entries: dict[Key, PrefillResult] = {}
        self._lru = FairLRU[Key]()
        self._watches: dict[str, WeightsWatch] = {}                     # by model name
        self._lock = Lock()              # guards all fields above

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._lru.total

    def begin(self, model: Model, name: str = "") -> None:
        """Removes the entries under this name if they belong to a different model, or if the model's weights have changed."""
        with self._lock:
            watch = self._watches.get(name)
            if watch is not None and watch.model is model and watch.unchanged():
                return
            if watch is not None:
                for key in [key for key in self._entries if key.model == name]:
                    self._remove(key)
            self._watches[name] = WeightsWatch(model)

    def key(self, tokens: Sequence[int], after: Key = EMPTY) -> Key:
        """The key of a prefix followed by `tokens`. after: the key of the prefix."""
        *_, last = self._keys(tokens, after)
        return last

    def longest(self, tokens: Sequence[int], after: Key = EMPTY) -> tuple[Key, "PrefillResult | None"]:
        """The key and the result of the longest cached prefix of `tokens`; (after, None) if there is none. after: the key of
        what precedes `tokens`."""
        keys = list(self._keys(tokens, after))
        with self._lock:
            longest = next((key for key in reversed(keys) if key in self._entries), None)
            if longest is None:
                return after, None
            self._lru.use(longest)
            return longest, self._entries[longest]

    def put(self, key: Key, result: "PrefillResult") -> None:
        result = result.to("cpu")
        size = result.nbytes()
        with self._lock:
            if key in self._entries:
                self._remove(key)
            if size > self.max_bytes:
                return
            self._entries[key] = result
            self._lru.add(key, key.owner, size)
            while self._lru.total > self.max_bytes:
                self._remove(self._lru.victim(self.max_bytes))

    def _keys(self, tokens: Sequence[int], after: Key = EMPTY) -> Iterator[Key]:
        """The key of each prefix of `tokens`, the empty prefix first. after: the key of what precedes `tokens`."""
        hashes = accumulate(tokens, lambda value, token: (value * self._point + token) % self._PRIME, initial=after.hash)
        return map(Key, count(after.length), hashes, repeat(after.model), repeat(after.owner))

    def _remove(self, key: Key) -> None:
        del self._entries[key]
        self._lru.remove(key)
