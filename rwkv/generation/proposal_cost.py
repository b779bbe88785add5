"""Measures what a proposed token costs in speculative decoding, from the times of recent steps (speculation.py)."""

from collections import Counter, defaultdict, deque
from statistics import median

from kernels import native

STEPS = 5                                # recent steps whose times count; until that many have been timed, nothing is proposed
PASSES, FEWEST_PASSES = 5, 2             # maximum and minimum number of recent passes that count, for each number of proposals
REFRESH = 32                             # after this many passes with proposals, a step without proposals is timed again


def pass_cost() -> float:
    """Returns the time of an additional token of a pass, relative to a step, as estimated before any pass has been timed.

    In int8 and int4, an additional token of the 1.5b model took 0.03 to 0.1 of a step with AVX-512, and 0.18 to 0.35 with AVX2.
    In GGUF's blocks, passes of 8 rows took about 0.4 per token with AVX2 (docs/log.md, "Drafts"). No other CPU was measured.
    """
    return 0.2 if (native.level() or "").startswith("avx512") else 0.4


class ProposalCost:
    """The cost of proposing tokens with one draft: the draft's time, and the time by which the pass takes longer.

    Times are medians of recent ones, so that a single slow step changes nothing. Times are measured for each number of proposed
    tokens, because a pass with proposals also has a constant cost. Times for other numbers are proportional to that of the
    nearest number. Until a number has been measured FEWEST_PASSES times, times are estimated from pass_cost() and `draft_cost`.

    Args:
        draft_cost: the estimated time in which the draft proposes one token, as a fraction of the time of a model step.
    """

    def __init__(self, draft_cost: float) -> None:
        self.draft_cost = draft_cost
        self._steps = _RecentTimes(STEPS, STEPS)         # times of steps; keys: rows
        self._extra = _RecentTimes(PASSES, FEWEST_PASSES)         # times by which passes exceed a step; keys: proposals
        self._passes: Counter[int] = Counter()           # passes with proposals since the last step; keys: rows

    def record(self, rows: int, proposed: int, seconds: float) -> None:
        """Records the time of a pass with this many rows, for which `proposed` tokens were proposed in total."""
        if not proposed:
            self._steps.record(rows, seconds)
            self._passes[rows] = 0
            return
        self._passes[rows] += 1
        if rows in self._steps.medians:
            self._extra.record(proposed, seconds - self._steps.medians[rows])

    def needs_step(self, rows: int) -> bool:
        """Returns True if the next pass with this many rows must be a step without proposals, whose time is missing or old."""
        return rows not in self._steps.medians or self._passes[rows] >= REFRESH

    def relative(self, rows: int, n: int) -> float:
        """Returns the time of n proposed tokens for each row, relative to a step with this many rows."""
        step, extra = self._steps.medians.get(rows), self._extra.medians
        if step and extra:
            nearest = min(extra, key=lambda proposed: abs(proposed - rows * n))
            return max(0.0, rows * n / nearest * extra[nearest] / step)
        each = pass_cost()
        return rows * n * (each + self.draft_cost) / (1 + each * (rows - 1))


class _RecentTimes:
    """Keeps the last `most` times in seconds for each key, and their medians, for keys with at least `fewest` times."""

    def __init__(self, most: int, fewest: int) -> None:
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=most))
        self._fewest = fewest
        self.medians: dict[int, float] = {}

    def record(self, key: int, seconds: float) -> None:
        times = self._times[key]
        times.append(seconds)
        if len(times) >= self._fewest:
            self.medians[key] = median(times)
