"""The data of trainer.tbptt=K: lanes that read documents one after the other, K segments of ctx_len tokens in each step.

    lane 0   [ document 3 ............ | 3 ............... | 3 ... padding ]    a segment belongs to one document,
    lane 1   [ document 0 ... padding  ][ document 7 ..... | 7 ............ ]   and [ is where the state is emptied

B rows of a batch, T = ctx_len. There are as many lanes as rows in an optimiser step: with trainer.accumulate=A a step is the A
batches of `batch_size` lanes each, so that it is the step of one batch A times as large. Documents come in a seeded
permutation, then in the next one, without end; the lane that has read its own to the end takes the next of this one order.
That hangs on the seed, the number of lanes and ctx_len alone: not on K, processes or workers.

A document that is longer than one lane's share of all is cut into several pieces, of whole segments, each read from an empty
state: else a text in a single file would be in all lanes at the same place. The ids of a document are end_of_text and its
text; each predicts the next one, the last the end_of_text that follows. So every token but the stream's first is predicted once
an epoch; where a corpus (binidx) has no end_of_text between documents, the first token of each is not either.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rwkv.config import TrainConfig
from rwkv.data.prepare import Corpus
from rwkv.data.token_array import Stream
from rwkv.data.windows import Permutations
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED


class Segments(NamedTuple):
    """A batch: x, y (B,K,T) int64; opens (B,K): whether a segment is the first of its piece.

    part: which of the accumulated batches of a step it is. weight: what its mean loss counts for, such that the mean over
    the processes and batches of a step is that over all the targets that count in them. counted: the targets that count in
    this batch of all processes.
    """

    x: Tensor
    y: Tensor
    opens: Tensor
    part: int
    weight: float
    counted: int


class Cut(NamedTuple):
    """A segment before it is read: `inputs` ids from `start` on, of which the first `targets` predict the next one."""

    start: int
    inputs: int
    targets: int
    opens: bool


class Rows(NamedTuple):
    """A batch before it is read: K cuts for each of its B rows."""

    cuts: list[list[Cut]]
    part: int
    weight: float
    counted: int


class Pieces:
    """Documents, cut where they are longer than one lane's share. `segments` (P,): of how many each piece is."""

    def __init__(self, tokens: Stream, end_of_text: int, ctx_len: int, lanes: int) -> None:
        self.tokens, self.end_of_text, self.ctx_len = tokens, end_of_text, ctx_len
        bounds = np.unique(np.concatenate([[0], tokens.starts, [len(tokens)]]))
        self.documents = len(bounds) - 1
        counts, each = _parts(-(-np.diff(bounds) // ctx_len), lanes)
        document = np.repeat(np.arange(self.documents), counts)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = bounds[document] + nth * each[document] * ctx_len
        self._ends = np.append(self._starts[1:], len(tokens))
        self._closes = np.append(np.diff(document) > 0, True)
        self.segments = -(-(self._ends - self._starts) // ctx_len)

    def __len__(self) -> int:
        return len(self.segments)

    def cut(self, piece: int, segment: int) -> Cut:
        """Segment number `segment` of a piece."""
        start, end = int(self._starts[piece]) + segment * self.ctx_len, int(self._ends[piece])
        stop = min(start + self.ctx_len, end)
        predicts_all = stop < end or not self._closes[piece] or self._is_end_of_text(end)
        return Cut(start, stop - start, stop - start - (not predicts_all), segment == 0)

    def _is_end_of_text(self, place: int) -> bool:
        return self.tokens[place:place + 1].tolist() == [self.end_of_text]

    def padding(self) -> float:
        """The share of the positions of all segments that hold no token."""
        return 1 - len(self.tokens) / (int(self.segments.sum()) * self.ctx_len)


def _parts(segments: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Into how many pieces each document of `segments` (D,) is cut, and of how many segments, the last may have fewer."""
    share = -(-segments.sum() // lanes)
    each = -(-segments // -(-segments // share))
    return -(-segments // each), each


class Reading(Dataset[Segments]):
    """From places to tokens."""

    def __init__(self, tokens: Stream, ctx_len: int) -> None:
        self.tokens, self.ctx_len = tokens, ctx_len

    def __getitems__(self, rows: Rows) -> Segments:
        x = np.zeros((len(rows.cuts), len(rows.cuts[0]), self.ctx_len), np.int64)
        y = np.full_like(x, IGNORED)
        for row, cuts in enumerate(rows.cuts):
            for column, cut in enumerate(cuts):
                tokens = self.tokens[cut.start:cut.start + cut.inputs + 1]
                x[row, column, :cut.inputs] = tokens[:cut.inputs]
                y[row, column, :cut.targets] = tokens[1:cut.targets + 1]
        opens = torch.tensor([[cut.opens for cut in cuts] for cuts in rows.cuts])
        return Segments(torch.from_numpy(x), torch.from_numpy(y), opens, rows.part, rows.weight,
                        rows.counted)


class Share(NamedTuple):
    """Of the rows of a step, in `parts` accumulated batches over `world` processes, those of process `rank`: `rows` a batch."""

    rows: int
    parts: int = 1
    rank: int = 0
    world: int = 1

    @property
    def lanes(self) -> int:
        """Of all processes."""
        return self.rows * self.parts * self.world

    def of(self, part: int) -> range:
        """The lanes that are this process's rows of a batch: every world-th one of the common batch."""
        return self.common(part)[self.rank::self.world]

    def common(self, part: int) -> range:
        """The lanes that are the rows of a batch in all processes."""
        return range(part * self.rows * self.world, (part + 1) * self.rows * self.world)


class LaneOrder(Sampler[Rows]):
    """`batches` batches of K segments in each lane of `share`."""

    def __init__(self, pieces: Pieces, K: int, share: Share, batches: int, seed: int) -> None:
        self.pieces, self.K, self.share, self.batches, self.seed = pieces, K, share, batches, seed

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> "LaneIterator":
        return LaneIterator(self)


class Places:
    """Where each lane is: in which piece, and how many segments of it are left; and how many pieces were dealt."""

    def __init__(self, pieces: Pieces, lanes: int, seed: int) -> None:
        self.pieces, self.order = pieces, Permutations(len(pieces), seed)
        self.dealt, self.piece, self.left = 0, [0] * lanes, [0] * lanes

    def step(self, K: int) -> list[list[Cut]]:
        """The next K segments of every lane. No lane is a segment ahead of another, so that the deal hangs on no K."""
        return [list(cuts) for cuts in zip(*([self._next(lane) for lane in range(len(self.left))] for _ in range(K)),
                                           strict=True)]

    def _next(self, lane: int) -> Cut:
        if not self.left[lane]:
            self.piece[lane] = self.order[self.dealt]
            self.left[lane] = int(self.pieces.segments[self.piece[lane]])
            self.dealt += 1
        piece, left = self.piece[lane], self.left[lane]
        self.left[lane] -= 1
        return self.pieces.cut(piece, int(self.pieces.segments[piece]) - left)

    def state_dict(self) -> dict[str, Any]:
        return {"dealt": self.dealt, "piece": [*self.piece], "left": [*self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dealt, self.piece, self.left = state["dealt"], [*state["piece"]], [*state["left"]]


class LaneIterator(Iterator[Rows]):
    """Where one pass over LaneOrder stands. A step is planned as a whole, so that its number of targets is known."""

    def __init__(self, order: LaneOrder) -> None:
        self.order, self._batches = order, 0
        self._places = Places(order.pieces, order.share.lanes, order.seed)
        self._before: dict[str, Any] = {}        # where the lanes were when the step at hand began
        self._step: list[list[Cut]] = []

    def __next__(self) -> Rows:
        if self._batches >= self.order.batches:
            raise StopIteration
        part = self._batches % self.order.share.parts
        if part == 0:
            self._plan()
        self._batches += 1
        return self._rows(part)

    def _plan(self) -> None:
        self._before = self._places.state_dict()
        self._step = self._places.step(self.order.K)

    def _rows(self, part: int) -> Rows:
        share = self.order.share
        cuts, common = ([self._step[lane] for lane in lanes] for lanes in (share.of(part), share.common(part)))
        weight = _targets(cuts) * share.parts * share.world / max(1, _targets(self._step))
        return Rows(cuts, part, weight, _targets(common))

    def state_dict(self) -> dict[str, Any]:
        """Between two batches of a step: where the step began."""
        between_steps = self._batches % self.order.share.parts == 0
        return {"batches": self._batches, "lanes": self._places.state_dict() if between_steps else self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the run had other lanes, or none."""
        self._require_same_lanes(len(state["lanes"]["left"]) if "lanes" in state else 0)
        self._batches = state["batches"]
        self._places.load_state_dict(state["lanes"])
        if self._batches % self.order.share.parts:
            self._plan()

    def _require_same_lanes(self, before: int) -> None:
        if before != self.order.share.lanes:
            raise UserError(f"the run was begun with {before or 'no'} lanes, and data.batch_size times trainer.accumulate is "
                            f"{self.order.share.lanes}: with trainer.tbptt, a run goes on with the lanes that it has")


def _targets(cuts: list[list[Cut]]) -> int:
    return sum(cut.targets for row in cuts for cut in row)


def pieces_of(config: TrainConfig, corpus: Corpus) -> Pieces:
    """Of a run's training data."""
    return Pieces(corpus.train, corpus.tokenizer.end_of_text, config.model.ctx_len, _lanes(config))


def describe(config: TrainConfig, corpus: Corpus) -> str:
    """One line for people: what a step reads, and what of it is padding."""
    lanes, pieces = _lanes(config), pieces_of(config, corpus)
    cut = f", cut into {len(pieces):,} pieces" if len(pieces) > pieces.documents else ""
    return (f"{lanes:,} lanes of {config.trainer.tbptt} segments a step, the state carried on; {pieces.documents:,} documents"
            f"{cut}, {pieces.segments.sum():,} segments, {100 * pieces.padding():.1f} % of their positions padding")


def _lanes(config: TrainConfig) -> int:
    return config.data.batch_size * config.trainer.accumulate
