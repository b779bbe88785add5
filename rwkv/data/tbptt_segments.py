"""Makes the batches for trainer.tbptt=K. Each stream reads one document after another, K segments per optimiser step.

    stream 0   [ document 3 ............ | 3 ............... | 3 ... padding ]    a segment belongs to one document;
    stream 1   [ document 0 ... padding  ][ document 7 ..... | 7 ............ ]   [ resets the state

B = batch_size, T = ctx_len, and a segment has T tokens. An optimiser step has one stream per row of its batches: with
trainer.accumulate=A, these are A batches of B streams each. Documents come in a seeded random order, then in a new order,
without end. A stream that has finished a document gets the next document. The order depends only on the seed, the number of
streams and ctx_len.

A document longer than one stream's share of all segments is divided into chunks of whole segments, and each chunk begins with
an empty state. Without this division, all streams would read the same part of a single long file. The ids of a document are
end_of_text and the text. Each id predicts the next id, and the last id predicts the end_of_text of the following document, so
every token except the very first is predicted once per epoch. If a corpus has no end_of_text between documents (binidx), the
first token of each document is not predicted. In conversations (rwkv/data/conversations.py), only learnt tokens are predicted.
Conversations are not divided, because an answer needs the messages before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rwkv.data.conversations import count_longer_than
from rwkv.data.prepare import Corpus
from rwkv.data.token_array import TokenArray
from rwkv.data.windows import Permutations, StepLayout
from rwkv.errors import UserError
from rwkv.io.json_types import StateDict
from rwkv.io.lines import count_of
from rwkv.model.loss import IGNORED


class Segments(NamedTuple):
    """A batch of segments.

    Attributes:
        x, y (B,K,T): the input ids and the target ids, int64.
        starts_document (B,K): True for each segment before which the state is reset.
        part: the number of this batch within its optimiser step.
        weight: as in Packed.
        tokens: the number of tokens in this batch without padding, summed over all processes.
    """

    x: Tensor
    y: Tensor
    starts_document: Tensor
    part: int
    weight: float
    tokens: int


class Segment(NamedTuple):
    """The position of a segment in the corpus.

    The segment has `inputs` ids, beginning at `start`. The first `targets` of them predict the next id. `counted` targets
    contribute to the loss: all of them or, in conversations, only the learnt ones.
    """

    start: int
    inputs: int
    targets: int
    starts_document: bool
    counted: int


class BatchPlan(NamedTuple):
    """The positions of a batch's segments, K for each of the B rows. The other fields are as in Segments."""

    rows: list[list[Segment]]
    part: int
    weight: float
    tokens: int


class DocumentChunks:
    """Divides documents that are longer than one stream's share of all segments into chunks.

    `segments` (P,) is the number of segments in each chunk. `learnt` has a 1 for each token of a conversation that is a target,
    and is None for documents, because all their tokens are targets.
    """

    def __init__(self, tokens: TokenArray, end_of_text: int, ctx_len: int, streams: int,
                 learnt: TokenArray | None = None) -> None:
        self.tokens = tokens
        self.end_of_text = end_of_text
        self.ctx_len = ctx_len
        bounds = np.unique(np.concatenate([[0], tokens.starts, [len(tokens)]]))
        self.documents = len(bounds) - 1
        segments = -(-np.diff(bounds) // ctx_len)
        counts, length = _plan_chunks(segments, streams)
        if learnt is not None:
            counts = np.ones_like(segments)
            length = segments
        document = np.repeat(np.arange(self.documents), counts)                                # (P,): each chunk's document
        nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)         # (P,): chunk's index in document
        self._starts = bounds[document] + nth * length[document] * ctx_len
        self._ends = np.append(self._starts[1:], len(tokens))
        self._ends_document = np.append(np.diff(document) > 0, True)
        self.segments = -(-(self._ends - self._starts) // ctx_len)
        self._learnt_before = None if learnt is None else np.cumsum(np.append(0, learnt[:]), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.segments)

    def segment(self, chunk: int, number: int) -> Segment:
        start = int(self._starts[chunk]) + number * self.ctx_len
        end = int(self._ends[chunk])
        stop = min(start + self.ctx_len, end)
        end_of_text_follows = self.tokens[end:end + 1].tolist() == [self.end_of_text]
        all_predict = stop < end or not self._ends_document[chunk] or end_of_text_follows
        targets = stop - start - (not all_predict)
        before = self._learnt_before
        counted = targets if before is None else int(before[start + 1 + targets] - before[start + 1])
        return Segment(start, stop - start, targets, number == 0, counted)

    def padding(self) -> float:
        """Returns the fraction of all positions that are padding."""
        return 1 - len(self.tokens) / (int(self.segments.sum()) * self.ctx_len)


def _plan_chunks(segments: np.ndarray, streams: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each document the number of chunks (D,) and the number of segments per chunk (D,).

    `segments` (D,) is the number of segments in each document. The last chunk of a document may be shorter than the others.
    """
    share = -(-segments.sum() // streams)
    length = -(-segments // -(-segments // share))
    return -(-segments // length), length


@dataclass(eq=False)
class SegmentDataset(Dataset[Segments]):
    """Reads the tokens of a BatchPlan into a batch. `learnt` is as in DocumentChunks."""

    tokens: TokenArray
    ctx_len: int
    learnt: TokenArray | None = None

    def __getitems__(self, plan: BatchPlan) -> Segments:
        x = np.zeros((len(plan.rows), len(plan.rows[0]), self.ctx_len), np.int64)
        y = np.full_like(x, IGNORED)
        for row, segments in enumerate(plan.rows):
            for k, segment in enumerate(segments):
                tokens = self.tokens[segment.start:segment.start + segment.inputs + 1]
                x[row, k, :segment.inputs] = tokens[:segment.inputs]
                y[row, k, :segment.targets] = tokens[1:segment.targets + 1]
                if self.learnt is not None:
                    counts = self.learnt[segment.start + 1:segment.start + 1 + segment.targets]
                    y[row, k, :segment.targets][counts == 0] = IGNORED
        starts = torch.tensor([[segment.starts_document for segment in segments] for segments in plan.rows])
        return Segments(torch.from_numpy(x), torch.from_numpy(y), starts, plan.part, plan.weight, plan.tokens)


@dataclass(eq=False)
class SegmentSampler(Sampler[BatchPlan]):
    """Yields the plans of this process's `batches` batches, with K segments of each stream."""

    chunks: DocumentChunks
    K: int
    layout: StepLayout
    batches: int
    seed: int

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> "SegmentIterator":
        return SegmentIterator(self)


class StreamPositions:
    """Tracks the current chunk of each stream, and the number of segments left in that chunk.

    `assigned` is the number of chunks that streams have received so far.
    """

    def __init__(self, chunks: DocumentChunks, streams: int, seed: int) -> None:
        self.chunks = chunks
        self.order = Permutations(len(chunks), seed)
        self.assigned = 0
        self.chunk = [0] * streams
        self.left = [0] * streams

    def step(self, K: int) -> list[list[Segment]]:
        """Returns the next K segments of each stream.

        All streams advance by one segment before any of them advances again, so the assignment of chunks is independent of K.
        """
        columns = [[self._next(stream) for stream in range(len(self.left))] for _ in range(K)]
        return [list(segments) for segments in zip(*columns, strict=True)]

    def _next(self, stream: int) -> Segment:
        if not self.left[stream]:
            self.chunk[stream] = self.order[self.assigned]
            self.left[stream] = int(self.chunks.segments[self.chunk[stream]])
            self.assigned += 1
        chunk = self.chunk[stream]
        number = int(self.chunks.segments[chunk]) - self.left[stream]
        self.left[stream] -= 1
        return self.chunks.segment(chunk, number)

    def state_dict(self) -> StateDict:
        return {"dealt": self.assigned, "piece": [*self.chunk], "left": [*self.left]}

    def load_state_dict(self, state: StateDict) -> None:
        self.assigned = state["dealt"]
        self.chunk = [*state["piece"]]
        self.left = [*state["left"]]


class SegmentIterator(Iterator[BatchPlan]):
    """An iterator over a SegmentSampler.

    The batches of a step are planned together, because their weights depend on the number of targets in the step.
    """

    def __init__(self, sampler: SegmentSampler) -> None:
        self.sampler = sampler
        self._batches = 0
        self._positions = StreamPositions(sampler.chunks, sampler.layout.streams, sampler.seed)
        self._before: StateDict = {}        # the positions at the beginning of the current step
        self._step: list[list[Segment]] = []     # the step's K segments of each stream

    def __next__(self) -> BatchPlan:
        if self._batches >= self.sampler.batches:
            raise StopIteration
        part = self._batches % self.sampler.layout.parts
        if part == 0:
            self._plan_step()
        self._batches += 1
        return self._plan_batch(part)

    def _plan_step(self) -> None:
        self._before = self._positions.state_dict()
        self._step = self._positions.step(self.sampler.K)

    def _plan_batch(self, part: int) -> BatchPlan:
        layout = self.sampler.layout
        rows = [self._step[stream] for stream in layout.own(part)]
        tokens = sum(segment.inputs for stream in layout.common(part) for segment in self._step[stream])
        weight = _count_targets(rows) * layout.parts * layout.world / max(1, _count_targets(self._step))
        return BatchPlan(rows, part, weight, tokens)

    def state_dict(self) -> StateDict:
        """Returns the number of batches so far, and the streams' positions at the beginning of the current step.

        Between two steps, the positions are those at the beginning of the next step.
        """
        between_steps = self._batches % self.sampler.layout.parts == 0
        return {"batches": self._batches, "lanes": self._positions.state_dict() if between_steps else self._before}

    def load_state_dict(self, state: StateDict) -> None:
        """Restores the positions. Raises UserError if the run had a different number of streams, or no streams."""
        before = len(state["lanes"]["left"]) if "lanes" in state else 0
        now = self.sampler.layout.streams
        if before != now:
            remedy = "Restore the earlier data.batch_size and trainer.accumulate" if before else "Omit trainer.tbptt"
            raise UserError("with trainer.tbptt, a resumed run must have the same number of document streams: the run began "
                            f"with {before or 'no'} streams, but now there are {now}. {remedy}")
        self._batches = state["batches"]
        self._positions.load_state_dict(state["lanes"])
        if self._batches % self.sampler.layout.parts:
            self._plan_step()


def _count_targets(rows: list[list[Segment]]) -> int:
    return sum(segment.counted for row in rows for segment in row)


def chunks_of(corpus: Corpus, ctx_len: int, streams: int) -> DocumentChunks:
    return DocumentChunks(corpus.train, corpus.tokenizer.end_of_text, ctx_len, streams, corpus.learnt)


def describe(corpus: Corpus, ctx_len: int, streams: int, K: int) -> str:
    """Returns the line in a run's plan about the streams, the documents, the segments and the padding."""
    chunks = chunks_of(corpus, ctx_len, streams)
    divided = f", divided into {count_of(len(chunks), 'chunk')}" if len(chunks) > chunks.documents else ""
    longer = count_longer_than(corpus.val, ctx_len) if corpus.conversations else 0
    validation = f"; validation reads conversations whole, {longer:,} of them longer than model.ctx_len" if longer else ""
    documents = count_of(chunks.documents, "document")
    segments = count_of(int(chunks.segments.sum()), "segment")
    return (f"{count_of(streams, 'document stream')}, {count_of(K, 'segment')} of each in a step; {documents}{divided}, "
            f"{segments}, {100 * chunks.padding():.1f} % of positions padding{validation}")
