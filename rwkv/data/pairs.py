"""Packs the pairs of answers for tune.objective=dpo into rows. A row contains both conversations of a pair, the chosen first.

    row 0   [ chosen 3 .... ][ rejected 3 .. ][ chosen 0 ][ rejected 0 ]   T = ctx_len positions; [ resets the state

Thus both sequences of a pair are always in the same batch, and a run can resume from any step. Two kinds of pairs are omitted.
A pair that is longer than a row is omitted because truncation changes the probability of an answer. A pair of two equal
sequences is omitted because it expresses no preference, so that its gradient would only be rounding error.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv.data.conversations import ConversationRows, Packed, Rows, Tokenised, packed_rows
from rwkv.data.token_array import TokenArray
from rwkv.errors import UserError
from rwkv.io.lines import count_of


class Pairs(NamedTuple):
    """A batch of P pairs.

    Attributes:
        x, y, starts (B,T), weight: as in Packed.
        answers (B,T): 2p at the positions of the chosen answer of pair p, 2p+1 at those of the rejected answer, and -1 at
            padding, int64.
        numbers (P,): the numbers of the pairs in their split, int64.
    """

    x: Tensor
    y: Tensor
    starts: Tensor
    weight: float
    answers: Tensor
    numbers: Tensor


class PairRows(ConversationRows):
    """A dataset of the packed rows of a split of pairs. Raises UserError if all pairs have to be omitted.

    Attributes:
        counts (rows,): the number of pairs in each row.
        left_out: the number of pairs that are omitted because they are longer than a row.
        equal: the number of pairs that are omitted because both sequences are equal.
    """

    def __init__(self, tokens: TokenArray, learnt: TokenArray, ctx_len: int) -> None:
        self.tokens = tokens
        self.learnt = learnt
        self.ctx_len = ctx_len
        self._bounds = tokens.bounds
        self._lengths = np.diff(self._bounds) - 1                # the last id, end_of_text, is only a target
        pair_lengths = self._lengths.reshape(-1, 2).sum(1)
        self.n_pairs = len(pair_lengths)
        differs = np.ones(self.n_pairs, bool)
        for number in np.flatnonzero(self._lengths[::2] == self._lengths[1::2]).tolist():
            differs[number] = not self._has_equal_answers(number)
        self.equal = int((~differs).sum())
        self.longest = int(pair_lengths[differs].max(initial=0))
        included = np.flatnonzero(differs & (pair_lengths <= ctx_len))
        self.left_out = self.n_pairs - self.equal - len(included)
        if not differs.any():
            raise UserError("the chosen and rejected answers of a pair must differ, but are equal in all "
                            f"{count_of(self.n_pairs, 'pair')} of the training or validation split")
        if not len(included):
            raise UserError(f"no pair of answers fits into model.ctx_len={ctx_len} tokens: the shortest pair has "
                            f"{pair_lengths[differs].min()} tokens. Raise model.ctx_len")
        self._n_tokens = int(pair_lengths[included].sum())
        rows = packed_rows(pair_lengths[included].tolist(), ctx_len)
        self._rows = [[int(sequence) for number in row for sequence in (2 * included[number], 2 * included[number] + 1)]
                      for row in rows]
        self.counts = np.array([len(row) // 2 for row in self._rows])

    def _has_equal_answers(self, number: int) -> bool:
        begin, middle, end = self._bounds[2 * number:2 * number + 3].tolist()
        return np.array_equal(self.tokens[begin:middle], self.tokens[middle:end])

    def __getitems__(self, rows: Rows | list[int]) -> Pairs:     # type: ignore[override]
        packed: Packed = super().__getitems__(rows)
        numbers = rows.numbers if isinstance(rows, Rows) else rows
        answers = np.full(packed.x.shape, -1)
        sequences: list[int] = []
        for row, number in enumerate(numbers):
            column = 0
            for sequence in self._rows[number % len(self)]:
                answers[row, column:column + self._lengths[sequence]] = len(sequences)
                sequences.append(sequence)
                column += self._lengths[sequence]
        return Pairs(*packed, torch.from_numpy(answers), torch.tensor(sequences[::2]) // 2)

    def describe(self) -> str:
        left_out = (f"; {count_of(self.left_out, 'pair')} longer than model.ctx_len={self.ctx_len} omitted "
                    f"(model.ctx_len={self.longest} includes all)" if self.left_out else "")
        if self.equal:
            left_out = f"; {count_of(self.equal, 'pair')} with equal answers omitted{left_out}"
        pairs = count_of(int(self.counts.sum()), "pair")
        return (f"{pairs} of answers in {count_of(len(self), 'row')}, {100 * self.padding():.1f} % of "
                f"positions padding{left_out}")


@lru_cache(maxsize=2)
def rows_of(split: Tokenised, ctx_len: int) -> ConversationRows:
    """Packs a split into rows. The rows are cached, because the length of a run, its plan and its loader all need them."""
    return (PairRows if split.paired else ConversationRows)(split.tokens, split.learnt, ctx_len)
