"""Reading: prompts into what the next token depends on, in parallel passes of a bounded size, nothing twice.

Prompts of different lengths go together without padding: all are read up to the end of the shortest, then those that
go on up to the end of the next, and so on. Rows that have read the same are one row until they differ.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv.model import RWKV
from rwkv.prefix_cache import PrefixCache
from rwkv.state import State

CHUNK_TOKENS = 1024                      # of all rows together in one pass: bounds the memory of a long prompt


class Context(NamedTuple):
    """What has been read: the logits (B,V) after the last token of each row, and the state. A value."""

    logits: Tensor
    state: State

    def rows(self, rows: Sequence[int]) -> "Context":
        """The contexts of these rows, in this order; a row may come more than once."""
        return Context(self.logits[rows], State(*(part[:, rows] for part in self.state)))


def read(model: RWKV, tokens: Tensor, context: Context | None = None) -> Context:
    """The context after tokens (B,T), T >= 1, which follow `context`."""
    state = context.state if context else None
    for chunk in tokens.to(model.emb.weight.device).split(max(1, CHUNK_TOKENS // len(tokens)), dim=1):
        logits, state = model.prefill(chunk, state)
    assert state is not None
    return Context(logits, state)


def read_prompts(model: RWKV, prompts: Sequence[Sequence[int]], start: Context | None = None,
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
    states = zip(*(context.state for context in contexts), strict=True)
    return Context(torch.cat([context.logits for context in contexts]), State(*(torch.cat(part, 1) for part in states)))
