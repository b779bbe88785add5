"""Speculative decoding: one pass of the model reads a row's last token and a draft's proposals for the next ones.

The row draws from the logits after each of these tokens as it would without a draft: with its own random numbers, penalties and
grammar. It continues as long as it draws what was proposed, and its state is then the one after the last such token. Logits and
states have the bits of single steps (rwkv/model/decoding), so the sequence is exactly the one without a draft; a rejected token
has changed nothing.

How many tokens are proposed: a pass of n tokens, counted over all rows, is assumed to take 1 + PASS_COST (n - 1) times as long
as a step. If each proposal is right with probability p, k of them yield 1 + p + ... + p^k tokens. A row estimates p from its
last passes, beginning at FIRST_P, and proposes the k with the most tokens per time. If that gains less than LEAST_GAIN, its
draft pauses: after FIRST_PAUSE tokens it tries two, and continues if both are right; otherwise the next pause is twice as long.
With more than MOST_ROWS rows nothing is proposed, because the tokens of so many rows already share the reading of the weights.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rwkv.generation.draft import Draft
from rwkv.generation.row import Row

PASS_COST = 0.2                          # measured at 1.5b: 0.12 to 0.26, by dtype and number of tokens
MOST_ROWS = 4                            # rows with a draft
FIRST_P = 0.6
DECAY = 0.9                              # of the weight of earlier passes, per pass
PRIOR_TOKENS = 4.0                       # the weight of FIRST_P, in proposals
LEAST_GAIN = 1.05
FIRST_PAUSE = 32                         # tokens
TRIED = 2                                # tokens proposed after a pause
LARGEST_COST = 0.5                       # Draft.cost; even a draft that is always right gains little above


class Pace:
    """How many tokens to propose for one row, by the rule above. most: at most. cost: of a proposed token, as Draft.cost."""

    def __init__(self, most: int, cost: float) -> None:
        self._most = most
        self._cost = cost
        self._accepted, self._proposed = FIRST_P * PRIOR_TOKENS, PRIOR_TOKENS
        self._pauses = 0
        self._wait = 0                   # tokens of the present pause that are left
        self._trying = not self._best(1)         # the next proposal decides

    def n(self, rows: int) -> int:
        """The number of tokens to propose now, with that many rows in the pass."""
        if rows > MOST_ROWS:
            return 0
        if self._wait:
            self._wait -= 1
            return 0
        return min(self._most, TRIED) if self._trying else self._best(rows)

    def record(self, proposed: int, accepted: int, rejected: bool) -> None:
        """The result of a pass. rejected: the row has drawn another token than the next one proposed; otherwise it has ended or
        accepted all."""
        failed = self._trying and rejected
        if self._trying and not rejected:
            self._accepted, self._proposed = FIRST_P * PRIOR_TOKENS, PRIOR_TOKENS
            self._pauses = 0
            self._trying = False
        self._accepted = self._accepted * DECAY + accepted
        self._proposed = self._proposed * DECAY + accepted + rejected
        if failed or not self._best(1):
            self._wait = FIRST_PAUSE << self._pauses
            self._pauses += 1
            self._trying = True

    def _best(self, rows: int) -> int:
        p = self._accepted / self._proposed
        price = rows * (PASS_COST + self._cost) / (1 + PASS_COST * (rows - 1))       # of a proposal for each row
        gains = {0: LEAST_GAIN}
        tokens = 1.0
        for k in range(1, self._most + 1):
            tokens += p ** k
            gains[k] = tokens / (1 + price * k)
        return max(gains, key=gains.__getitem__)


class Speculation:
    """The drafts of an engine's rows."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._paces: WeakKeyDictionary[Row, Pace] = WeakKeyDictionary()

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        """Tokens that may follow the last one of each row; [] for a row that reads its last token alone."""
        return [self._proposal(row, len(rows)) if row.unfinished else [] for row in rows]

    def record(self, row: Row, proposed: int, accepted: int) -> None:
        """Counts the result of a pass."""
        row.proposed_tokens += proposed
        row.accepted_tokens += accepted
        self._paces[row].record(proposed, accepted, rejected=row.unfinished and accepted < proposed)

    def _proposal(self, row: Row, rows: int) -> list[int]:
        pace = self._paces.get(row)
        if pace is None:
            pace = self._paces[row] = Pace(self._draft.most_tokens, self._draft.cost)
        n = min(pace.n(rows), row.tokens_left - 1)
        return row.before_end(self._draft.propose(row, n)) if n > 0 else []
