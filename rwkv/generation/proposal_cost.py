"""Measures what a proposed token costs in speculative decoding, from the times of recent steps (speculation.py)."""

from collections import defaultdict, deque
from statistics import median

from kernels import native

STEPS = 5                                # recent steps whose times count; until so many have been timed, nothing is proposed
PASSES, FEWEST_PASSES = 9, 3             # recent passes with proposals whose times count: at most, and at least
REFRESH = 32                             # after this many passes with proposals, a step without proposals is timed again


def pass_cost() -> float:
    """Returns the time that an additional token of a pass may take, relative to a step. This is the estimate before any pass.

    With the 1.5b model it was 0.03 to 0.1 with AVX-512, and with AVX2 0.18 to 0.35 in int8 and int4; 8 rows in GGUF's blocks
    suggest 0.4 there (docs/log.md, "Drafts"). Other CPUs have not been measured.
    """
    return 0.2 if (native.level() or "").startswith("avx512") else 0.4


class ProposalCost:
    """The cost of proposing tokens with one draft: the draft's time, and the time by which the pass takes longer.

    Times are medians of recent ones, so that a single slow step changes nothing. The seconds per proposed token are assumed to
    be the same for all numbers of rows. Until FEWEST_PASSES have been timed, estimates are used: pass_cost() and `draft_cost`.

    Args:
        draft_cost: the estimated time in which the draft proposes one token, as a fraction of the time of a model step.
    """

    def __init__(self, draft_cost: float) -> None:
        self.draft_cost = draft_cost
        self._steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))     # seconds; keys: rows
        self._per_token: deque[float] = deque(maxlen=PASSES)     # seconds
        self._passes: defaultdict[int, int] = defaultdict(int)   # passes with proposals since the last step; keys: rows

    def record(self, rows: int, proposed: int, seconds: float) -> None:
        """Records the time of a pass with this many rows, for which `proposed` tokens were proposed in total."""
        steps = self._steps[rows]
        if not proposed:
            steps.append(seconds)
            self._passes[rows] = 0
            return
        self._passes[rows] += 1
        if len(steps) == STEPS:
            self._per_token.append((seconds - median(steps)) / proposed)

    def needs_step(self, rows: int) -> bool:
        """Returns True if the next pass with this many rows must be a step without proposals, whose time is missing or old."""
        return len(self._steps[rows]) < STEPS or self._passes[rows] >= REFRESH

    def relative(self, rows: int) -> float:
        """Returns the time of one proposed token for each row, relative to a step with this many rows."""
        steps = self._steps[rows]
        if len(self._per_token) >= FEWEST_PASSES and len(steps) == STEPS:
            return max(0.0, rows * median(self._per_token) / median(steps))
        each = pass_cost()
        return rows * (each + self.draft_cost) / (1 + each * (rows - 1))
