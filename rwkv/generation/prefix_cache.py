"""Stores prefill results in limited memory, under keys computed from the tokens read.

If a prompt begins with an earlier prompt, or with an earlier prompt and the answer, prefill continues from the earlier result.
A result has the same size for every length, so the cache can hold many results. Results on a GPU are moved to host memory.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, repeat
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv.errors import UserError
from rwkv.fair_lru import FairLRU
from rwkv.model.base import Model, State
from rwkv.model.weights_watch import WeightsWatch


class PrefillResult(NamedTuple):
    """The result of prefill for B rows: the logits (B,V) after each row's last token, and the state.

    The tensors are never changed in place. `last_ids` holds the last ids read, on which the text of the next id may depend, or
    () if there are several rows or the ids are unknown.
    """

    logits: Tensor
    state: State
    last_ids: tuple[int, ...] = ()

    def nbytes(self) -> int:
        return self.logits.nbytes + self.state.nbytes()

    def to(self, device: torch.device | str) -> "PrefillResult":
        return self._replace(logits=self.logits.to(device), state=self.state.to(device))

    @staticmethod
    def cat(results: Sequence["PrefillResult"]) -> "PrefillResult":
        """Joins the rows of all results, in order, into one result without last_ids."""
        return PrefillResult(torch.cat([result.logits for result in results]), State.cat([result.state for result in results]))


class Key(NamedTuple):
    """A key of PrefixCache, with the number of tokens read and their hash.

    `model` and `owner` are names. Entries are never shared between different models or different owners.
    """

    length: int = 0
    hash: int = 0
    model: str = ""
    owner: str = ""


EMPTY = Key()


class PrefixCache:
    """A cache that holds at most max_bytes bytes of prefill results. Raises UserError if max_bytes is negative.

    A full cache evicts the least recently used result. An owner within the fair share of the cache loses no results to other
    owners. All methods are thread-safe.

    A key has the number of tokens and their polynomial hash, modulo a 127-bit prime and at a random point. Finding the longest
    match takes one look-up per prompt token, however many entries there are, because the key of a sequence is computed from the
    key of its prefix. Two prefixes of length n have the same hash with a probability of about n / 2^127. When a model's name is
    given to a different model, or when the weights change, begin() removes the entries under this name.
    """

    _PRIME = 2**127 - 1

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes must be 0 or more; got {max_bytes}")
        self.max_bytes = max_bytes
        self._point = secrets.randbelow(self._PRIME)
        self._entries: dict[Key, PrefillResult] = {}
        self._lru = FairLRU[Key]()
        self._watches: dict[str, WeightsWatch] = {}                     # the keys are model names
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
            if watch is not None and watch.model is model and watch.is_unchanged():
                return
            if watch is not None:
                for key in [key for key in self._entries if key.model == name]:
                    self._remove(key)
            self._watches[name] = WeightsWatch(model)

    def key(self, tokens: Sequence[int], after: Key = EMPTY) -> Key:
        """Returns the key of the sequence that consists of a prefix with the key `after`, and then `tokens`."""
        *_, last = self._keys(tokens, after)
        return last

    def longest(self, tokens: Sequence[int], after: Key = EMPTY) -> tuple[Key, "PrefillResult | None"]:
        """Returns the key and the result of the longest cached prefix of `tokens`, or (after, None) if no prefix is cached.

        `after` is the key of the sequence before `tokens`.
        """
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
        hashes = accumulate(tokens, lambda value, token: (value * self._point + token) % self._PRIME, initial=after.hash)
        return map(Key, count(after.length), hashes, repeat(after.model), repeat(after.owner))

    def _remove(self, key: Key) -> None:
        del self._entries[key]
        self._lru.remove(key)
