"""Decides how many tokens a draft proposes and when the draft pauses. The model verifies the proposals in one pass.

A pass reads the last token of each row and the tokens proposed for the row. The row draws a token from the logits after each of
them, with its own random numbers, penalties and grammar, as without a draft. The pass ends for the row when the row draws a
different token than the proposed one. The row's state is then the state after the last accepted token. Logits and states are
bit for bit those of single steps (rwkv/model/decoding), so a draft changes no sequence, and a rejected token leaves no trace.

The number of proposed tokens k follows from an estimate. A pass with k proposals takes 1 + c(k) times as long as a step, where
c(k) is measured while generating (proposal_cost.py). If each proposal is right with probability p, k proposals yield
1 + p + ... + p^k tokens on average. Each row estimates p from its last passes, starting at FIRST_P, and k is chosen to yield
the most tokens per unit of time. If the gain is below LEAST_GAIN, the row's draft pauses for FIRST_PAUSE tokens, and then
proposes TRIED tokens. The draft resumes if all of these are right; otherwise the next pause is twice as long. After a pause, a
draft model has read nothing for a while, so only the second pass is timed, and it proposes TRIED tokens too. With more than
MOST_ROWS rows nothing is proposed, because the tokens of that many rows already share the cost of reading the weights.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rwkv.generation.draft import Draft
from rwkv.generation.proposal_cost import ProposalCost
from rwkv.generation.row import Row

MOST_ROWS = 4                            # with more rows in the batch, no tokens are proposed
FIRST_P = 0.6
DECAY = 0.95                             # factor by which the weight of earlier passes shrinks in each pass
PRIOR_TOKENS = 4.0                       # FIRST_P weighs as much as this many proposals
LEAST_GAIN = 1.05
FIRST_PAUSE = 32                         # tokens
TRIED = 2                                # number of tokens proposed after a pause
LARGEST_DRAFT_COST = 0.5                 # relative to a model step; above this, even a draft that is always right gains little


class Pace:
    """Decides how many tokens to propose for one row, at most `most`. The rule is in the module's docstring."""

    def __init__(self, most: int, cost: ProposalCost) -> None:
        self._most = most
        self._cost = cost
        self._accepted, self._proposed = FIRST_P * PRIOR_TOKENS, PRIOR_TOKENS
        self._pauses = 0
        self._wait = 0                   # tokens until the current pause ends
        self._best_numbers: dict[int, int] = {}               # the results of _best() since the last pass; keys: rows
        self._on_trial = not self._best(1)               # True if the next proposal decides whether the draft resumes
        self._resumed = False            # True for the pass after a successful trial

    def n_tokens(self, rows: int) -> int:
        """Returns the number of tokens to propose in a pass with this many rows.

        During a pause, each call with at most MOST_ROWS rows counts as one token.
        """
        if rows > MOST_ROWS:
            return 0
        if self._wait:
            self._wait -= 1
            return 0
        if self._cost.needs_step(rows):
            return 0
        return min(self._most, TRIED) if self._on_trial or self._resumed else self._best(rows)

    def record(self, proposed: int, accepted: int, rejected: bool) -> None:
        """Records the outcome of a pass. `rejected` must be True if the row drew a different token than the proposed one."""
        self._best_numbers.clear()
        failed_trial = self._on_trial and rejected
        self._resumed = self._on_trial and not rejected
        if self._resumed:
            self._accepted, self._proposed = FIRST_P * PRIOR_TOKENS, PRIOR_TOKENS
            self._pauses = 0
            self._on_trial = False
        self._accepted = self._accepted * DECAY + accepted
        self._proposed = self._proposed * DECAY + accepted + rejected
        if failed_trial or not (self._resumed or self._best(1)):
            self._wait = FIRST_PAUSE << self._pauses
            self._pauses += 1
            self._on_trial = True

    def _best(self, rows: int) -> int:
        if rows not in self._best_numbers:
            p = self._accepted / self._proposed
            gains = {0: LEAST_GAIN}
            tokens = 1.0
            for k in range(1, self._most + 1):
                tokens += p ** k
                gains[k] = tokens / (1 + self._cost.relative(rows, k))
            self._best_numbers[rows] = max(gains, key=gains.__getitem__)
        return self._best_numbers[rows]


class Speculation:
    """Proposes tokens for all rows of an engine, and records how many of them are accepted."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._paces: WeakKeyDictionary[Row, Pace] = WeakKeyDictionary()
        self._draft_ran = self._draft_ran_before = False         # in the current pass and in the one before

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        """Returns the tokens that may follow the last token of each row; [] for a row without a proposal."""
        self._draft_ran_before, self._draft_ran = self._draft_ran, False
        return [self._proposal(row, len(rows)) if row.unfinished else [] for row in rows]

    def record(self, row: Row, proposed: int, accepted: int) -> None:
        """Records how many of the proposed tokens a row has accepted in a pass."""
        row.proposed_tokens += proposed
        row.accepted_tokens += accepted
        self._paces[row].record(proposed, accepted, rejected=row.unfinished and accepted < proposed)

    def record_time(self, rows: int, proposed: int, seconds: float) -> None:
        """Records the time of a pass with this many rows, for which `proposed` tokens were proposed in total.

        Ignores a pass in which the draft ran but proposed nothing, and a pass with proposals after a pass in which the draft
        did not run: the draft may have read a prompt, or the tokens drawn in a pause.
        """
        if rows <= MOST_ROWS and self._draft_ran == bool(proposed) and (self._draft_ran_before or not proposed):
            self._draft.cost.record(rows, proposed, seconds)

    def _proposal(self, row: Row, rows: int) -> list[int]:
        pace = self._paces.get(row)
        if pace is None:
            pace = self._paces[row] = Pace(self._draft.most_tokens, self._draft.cost)
        n = min(pace.n_tokens(rows), row.tokens_left - 1)
        if n <= 0:
            return []
        self._draft_ran = True
        return row.tokens_before_end(self._draft.propose(row, n))
