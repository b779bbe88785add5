"""Prefill: reads prompts in parallel passes of bounded size, and caches the results by the tokens read.

Prompts of different lengths are read together without padding: all of them up to the end of the shortest, then the longer
ones up to the end of the next, and so on. Rows that have read the same tokens are one row until they differ.

The result for a text has the same size however long the text is, so the cache holds one per prompt: a prompt that begins with
an earlier one is read from the end of that one on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv.errors import UserError
from rwkv.model.base import Model, State

TOKENS_PER_PASS = 1024                   # of all rows together: bounds the memory of a long prompt


class PrefillResult(NamedTuple):
    """What B rows have read: the logits (B,V) after the last token of each, and the state. Nothing changes it in place."""

    logits: Tensor
    state: State

    def rows(self, rows: Sequence[int]) -> "PrefillResult":
        """A copy of these rows, in this order; a row may come more than once."""
        return PrefillResult(self.logits[rows], self.state.rows(rows))

    def nbytes(self) -> int:
        """The memory of its tensors, in bytes."""
        return self.logits.nbytes + self.state.nbytes()

    @staticmethod
    def cat(results: Sequence["PrefillResult"]) -> "PrefillResult":
        """One result with the rows of all, in order."""
        return PrefillResult(torch.cat([result.logits for result in results]), State.cat([result.state for result in results]))


class PrefixCache:
    """The prefill results that were used last, by the tokens read, in at most max_bytes.

    A cache is for one model only; threads may share it. Raises UserError for a max_bytes below 0.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes is 0 or more; got {max_bytes}")
        self.max_bytes = max_bytes
        self.bytes = 0                   # of all entries
        self._entries: OrderedDict[tuple[int, ...], PrefillResult] = OrderedDict()       # most recently used last
        self._lock = Lock()              # guards _entries and bytes

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: Sequence[int]) -> tuple[int, PrefillResult | None]:
        """The length of the longest prefix of `tokens` in the cache and the result after it; (0, None) where there is none."""
        tokens = tuple(tokens)
        with self._lock:
            found = max((key for key in self._entries if tokens[:len(key)] == key), key=len, default=None)
            if found is None:
                return 0, None
            self._entries.move_to_end(found)
            return len(found), self._entries[found]

    def put(self, tokens: Sequence[int], result: PrefillResult) -> None:
        """Adds the result after `tokens`; removes the least recently used ones where there is no room."""
        tokens = tuple(tokens)
        size = result.nbytes()
        with self._lock:
            if tokens in self._entries:
                self._remove(tokens)
            if size > self.max_bytes:
                return
            while self.bytes + size > self.max_bytes:
                self._remove(next(iter(self._entries)))
            self._entries[tokens] = result
            self.bytes += size

    def _remove(self, tokens: tuple[int, ...]) -> None:
        self.bytes -= self._entries.pop(tokens).nbytes()


def prefill(model: Model, tokens: Tensor, start: PrefillResult | None = None) -> PrefillResult:
    """The result after tokens (B,T), T >= 1, which follow what `start` has read."""
    state = start.state if start else None
    positions = max(1, TOKENS_PER_PASS // len(tokens))
    for chunk in tokens.to(model.emb.weight.device).split(positions, dim=1):
        logits, state = model.prefill(chunk, state)
    assert state is not None
    return PrefillResult(logits, state)


def read_prompts(model: Model, prompts: Sequence[Sequence[int]], start: PrefillResult | None = None,
                 cache: PrefixCache | None = None) -> PrefillResult:
    """The result after each prompt, B rows. Prompts have any length: at least 1 token, or 0 after a `start`.

    `start`, of one row, is what was read before every prompt; the cache is not used then. Raises ValueError where `start` has
    several rows or is of another model.
    """
    if start is not None:
        model.check_state(start.state, B=1)
        cache = None
    if not prompts:
        return PrefillResult(torch.empty(0, model.vocab_size), model.empty_state(0))
    unique = sorted({tuple(prompt) for prompt in prompts})
    shared = _common_prefix(unique)
    position, result = (0, start) if cache is None else cache.longest(shared)
    rows = [shared[:position]]                                  # the tokens that each row of `result` has read
    finished: dict[tuple[int, ...], PrefillResult] = {}         # one row each, by the tokens read
    if result is not None and rows[0] in unique:
        finished[rows[0]] = result
    for begin, end in pairwise(_pass_ends(unique, len(shared), position)):
        parents = rows
        rows = sorted({prompt[:end] for prompt in unique if len(prompt) >= end})
        inherited = result and result.rows([parents.index(row[:begin]) for row in rows])
        result = prefill(model, torch.tensor([row[begin:] for row in rows]), inherited)
        finished |= {row: result.rows([index]) for index, row in enumerate(rows) if row in unique or row == shared}
    if cache is not None:
        for row, row_result in finished.items():
            cache.put(row, row_result)
    return PrefillResult.cat([finished[tuple(prompt)] for prompt in prompts])


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest prefix of all `prompts`, which are in lexicographic order: that of the first and the last."""
    first, last = prompts[0], prompts[-1]
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _pass_ends(prompts: Sequence[tuple[int, ...]], shared: int, position: int) -> list[int]:
    """`position` and the ends of the passes after it: the end of the common prefix and of each prompt."""
    ends = {len(prompt) for prompt in prompts} | {shared}
    return sorted({position} | {end for end in ends if end > position})
