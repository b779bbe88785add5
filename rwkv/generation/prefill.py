"""A memory of what has been read, bounded in bytes: a prompt that begins as an earlier one did costs only its rest.

An RWKV's context is of a fixed size however long the text was, so each entry is one context under the tokens it has read.

Reading: prompts into what the next token depends on, in parallel passes of a bounded size, nothing twice.

Prompts of different lengths go together without padding: all are read up to the end of the shortest, then those that
go on up to the end of the next, and so on. Rows that have read the same are one row until they differ.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from rwkv.errors import UserError
from rwkv.model.base import Model, State

Value = TypeVar("Value", bound=tuple[Any, ...])


class PrefixCache(Generic[Value]):
    """The contexts used last, under the tokens that they have read, in at most max_bytes.

    For one model: a context of another means nothing to it. `longest` and `put` are what reading uses; threads may share a
    cache. Raises ValueError for a max_bytes below 0.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes is 0 or more; got {max_bytes}")
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


CHUNK_TOKENS = 1024                      # of all rows together in one pass: bounds the memory of a long prompt


class Context(NamedTuple):
    """What has been read: the logits (B,V) after the last token of each row, and the state. A value."""

    logits: Tensor
    state: State

    def rows(self, rows: Sequence[int]) -> "Context":
        """The contexts of these rows, in this order; a row may come more than once."""
        return Context(self.logits[rows], self.state.rows(rows))


def read(model: Model, tokens: Tensor, context: Context | None = None) -> Context:
    """The context after tokens (B,T), T >= 1, which follow `context`."""
    state = context.state if context else None
    for chunk in tokens.to(model.emb.weight.device).split(max(1, CHUNK_TOKENS // len(tokens)), dim=1):
        logits, state = model.prefill(chunk, state)
    assert state is not None
    return Context(logits, state)


def read_prompts(model: Model, prompts: Sequence[Sequence[int]], start: Context | None = None,
                 cache: PrefixCache[Context] | None = None) -> Context:
    """The context after each prompt, B rows: prompts of any length, at least 1, or 0 after a `start` of one row.

    Raises ValueError where `start` is not of one row, or of another model.
    """
    if start is not None:
        model.check_state(start.state, B=1)
    if not prompts:
        return Context(torch.empty(0, model.vocab_size), model.empty_state(0))
    unique = sorted({tuple(prompt) for prompt in prompts})
    shared = _shared(unique)
    position, context = cache.longest(shared) if cache and start is None else (0, start)
    ends: dict[tuple[int, ...], Context] = {}
    rows = [shared[:position]]                                  # what each row of `context` has read
    for begin, end in pairwise(_boundaries(unique, len(shared), position)):
        parents, rows = rows, sorted({prompt[:end] for prompt in unique if len(prompt) >= end})
        inherited = context and context.rows([parents.index(row[:begin]) for row in rows])
        context = read(model, torch.tensor([row[begin:] for row in rows]), inherited)
        ends |= {row: context.rows([index]) for index, row in enumerate(rows) if row in unique or row == shared}
    if context is not None:
        ends |= {row: context.rows([rows.index(row)]) for row in unique if row in rows}
    if cache is not None and start is None:
        for row, end_context in ends.items():
            cache.put(row, end_context)
    return _stack([ends[tuple(prompt)] for prompt in prompts])


def _shared(ordered: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all begin with: in lexicographic order, what the first and the last begin with."""
    first, last = ordered[0], ordered[-1]
    differ = (index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[:next(differ, min(len(first), len(last)))]


def _boundaries(prompts: Sequence[tuple[int, ...]], shared: int, position: int) -> list[int]:
    """Where a pass must end: what all share, and the end of each prompt, from `position` on."""
    lengths = {len(prompt) for prompt in prompts} | {shared}
    return sorted({position} | {length for length in lengths if length > position})


def _stack(contexts: Sequence[Context]) -> Context:
    return Context(torch.cat([context.logits for context in contexts]), State.cat([context.state for context in contexts]))
