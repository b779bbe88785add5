"""Makes training batches from streams (streams.py). Nothing is tokenised before the first step.

The first data.val_documents rows of a stream are for validation. The following rows are for training, except for copies of
validation texts. At the end of the stream, training starts over with the first training row.

    rows  --> blocks of data.shuffle_buffer rows, each in a seeded order
          --> lanes: each row goes to the lane with the fewest bytes so far; one lane per row of a batch
          --> per lane: end_of_text, text, end_of_text, text, ..., divided into windows of T tokens plus the next token

So a batch depends only on the data, the seed, data.shuffle_buffer, data.batch_size and T. Every process reads all rows but
tokenises only the rows of its own lanes. So N processes together have the same batches as a single process, and a run can
resume with a different number of processes. With data=mix, each source is a stream with its own lanes, and SourceTurns chooses
the source of each window.

The state for resuming contains the position of each lane: the number of finished rows, and the number of finished tokens in the
next row. The state also contains the start of the oldest block that a lane still reads, and hashes of this and all later
blocks. A resumed run reads these blocks again, checks that they are unchanged, and tokenises only unfinished rows.
"""

import hashlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rwkv.data.mixture.windows import SourceTurns, seed_of
from rwkv.data.streaming.encoding import Streamed, TextEncoder
from rwkv.data.streaming.streams import Position, Reader, Row, open_stream
from rwkv.data.windows import StepLayout
from rwkv.distributed import all_gather
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject, StateDict
from rwkv.tokenizer.tokenizers import Tokenizer

AHEAD = 1 << 18                          # bytes of rows to tokenise per call: tokenizers are faster on many texts
Item = TypeVar("Item")


class Block(NamedTuple):
    """The start of a block of rows.

    Attributes:
        epoch, number: the number of the epoch, and the number of the block in this epoch.
        position: the reader's position at the start of the block.
        bytes, documents: the numbers of bytes and rows that each lane has received before this block.
    """

    epoch: int
    number: int
    position: Position
    bytes: list[int]
    documents: list[int]


class Lanes:
    """Reads and tokenises the lanes of a stream that belong to this process.

    `own` are the numbers of these lanes, and `count` is the number of lanes in all processes.
    """

    def __init__(self, streamed: Streamed, tokenizer: Tokenizer, count: int, own: Sequence[int], seed: int) -> None:
        stream = open_stream(streamed.config)
        if stream.sha256 != streamed.sha256:
            raise UserError(f"data.path={streamed.config.path} has changed while the run was reading the data. Start the run "
                            "again")
        self._stream = stream
        self._streamed = streamed
        self._texts = TextEncoder(stream, tokenizer, streamed.config.separator, streamed.held_out, skips=True)
        self._seed = seed
        self._rows: dict[int, deque[Row]] = {lane: deque() for lane in own}
        self._ids: dict[int, deque[np.ndarray]] = {lane: deque() for lane in own}       # tokenised rows
        self._position = {lane: [0, 0] for lane in own}
        self._blocks = deque([Block(0, 0, streamed.begins, [0] * count, [0] * count)])   # the last block will be read next
        self._hashes: deque[str] = deque()       # one for each block except the last
        self._expected: deque[str] = deque()     # hashes of the blocks that a resumed run has yet to read again
        self._reader: Reader | None = None
        self._last_filled_epoch = 0                 # the last epoch in which a row had tokens

    def window(self, lane: int, T: int) -> np.ndarray:
        """Returns the next T tokens of a lane and the token after them."""
        documents = self._ids[lane]
        position = self._position[lane]
        while sum(map(len, documents)) <= position[1] + T:
            if self._rows[lane]:
                self._tokenise(lane)
            else:
                self._read_block()
        parts = [documents[0][position[1]:position[1] + T + 1]]
        for document in itertools.islice(documents, 1, None):
            parts.append(document[:T + 1 - sum(map(len, parts))])
        position[1] += T
        while position[1] >= len(documents[0]):
            position[1] -= len(documents.popleft())
            position[0] += 1
        return np.concatenate(parts)

    def _tokenise(self, needed: int) -> None:
        """Tokenises the next row of lane `needed`, then rows of all lanes in turn, up to AHEAD bytes."""
        lanes = deque([needed, *(lane for lane in self._rows if lane != needed)])
        rows: list[tuple[int, Row]] = []
        size = 0
        while lanes and size < AHEAD:
            lane = lanes.popleft()
            if self._rows[lane]:
                rows.append((lane, self._rows[lane].popleft()))
                size += rows[-1][1].size()
                lanes.append(lane)
        for (lane, _), encoded in zip(rows, self._texts.encode([row for _, row in rows]), strict=True):
            self._ids[lane].append(np.concatenate([np.empty(0, self._texts.dtype), *encoded.ids]))
            self._require_text(len(self._ids[lane][-1]))

    def _require_text(self, tokens: int) -> None:
        """Raises UserError if the stream has been read many times and no row had tokens."""
        epoch = self._blocks[-1].epoch
        if tokens:
            self._last_filled_epoch = epoch
        elif epoch > self._last_filled_epoch + 2 * len(self._blocks[-1].bytes):
            config = self._streamed.config
            raise UserError(f"data.path={config.path} has no text to train on: all documents after the first "
                            f"data.val_documents={config.val_documents} are empty, or copies of those documents")

    def _read_block(self) -> None:
        block = self._blocks[-1]
        self._reader = self._reader or self._stream.read(block.position)
        rows = list(itertools.islice(self._reader, self._streamed.config.shuffle_buffer))
        if not rows and not block.number:
            raise UserError(f"data.path={self._streamed.config.path} became shorter while the run was reading the data. "
                            "Restore the data and continue the run with resume=auto")
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            content = row.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        if self._expected and self._expected.popleft() != digest.hexdigest():
            where = f" at {rows[0].where}" if rows else ""
            raise UserError(f"data.path={self._streamed.config.path} has changed{where} since the run was stopped. Restore the "
                            "data to resume, or begin a new run with init_from=")
        self._hashes.append(digest.hexdigest())
        size, documents = [*block.bytes], [*block.documents]
        emptiest = [(lane_size, lane) for lane, lane_size in enumerate(size)]
        heapq.heapify(emptiest)
        for number in np.random.default_rng((self._seed, block.epoch, block.number)).permutation(len(rows)).tolist():
            lane = emptiest[0][1]
            size[lane] += rows[number].size() + 1
            heapq.heapreplace(emptiest, (size[lane], lane))
            documents[lane] += 1
            if lane in self._rows:
                self._rows[lane].append(rows[number])
        if len(rows) == self._streamed.config.shuffle_buffer:
            self._blocks.append(Block(block.epoch, block.number + 1, self._reader.position(), size, documents))
        else:
            self._reader = None
            self._blocks.append(Block(block.epoch + 1, 0, self._streamed.begins, size, documents))

    def state(self) -> StateDict:
        """Returns the position of this process's lanes, as dicts, lists, strings and numbers."""
        while len(self._blocks) > 1 and all(self._blocks[1].documents[lane] <= done
                                            for lane, (done, _) in self._position.items()):
            self._blocks.popleft()
            self._hashes.popleft()
        return {"block": list(self._blocks[0]), "hashes": [*self._hashes],
                "lanes": {lane: [*position] for lane, position in self._position.items()}}

    def load(self, state: JsonMapping) -> None:
        """Resumes from a state, which must contain all lanes of this process."""
        block = Block(*state["block"])
        self._blocks = deque([block])
        self._expected = deque(state["hashes"])
        for lane in self._rows:
            self._position[lane] = [*state["lanes"][lane]]
        self._last_filled_epoch = block.epoch
        for lane, rows in self._rows.items():
            done = self._position[lane][0] - block.documents[lane]
            while self._expected or len(rows) < done:
                self._read_block()
            for _ in range(done):
                rows.popleft()


class Batches(IterableDataset[Any]):
    """Yields (batch, state) without end: this process's batch (x, y), each (B,T) int64, and the state after the batch.

    Args:
        sources: each stream and its share of the windows.
        state: the state to resume from; None to begin with the first row.
    """

    def __init__(self, sources: Sequence[tuple[Streamed, float]], tokenizer: Tokenizer, T: int, layout: StepLayout, seed: int,
                 state: JsonMapping | None) -> None:
        self.sources = sources
        self.tokenizer = tokenizer.to_dict()     # the worker creates its own tokenizer
        self.T = T
        self.layout = layout
        self.seed = seed
        self.state = state

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, Tensor], JsonObject]]:
        tokenizer = Tokenizer.from_dict(self.tokenizer)
        common = self.layout.rows * self.layout.world
        own = range(self.layout.rank, common, self.layout.world)
        turns = SourceTurns([share for _, share in self.sources], self.seed)
        lanes = [Lanes(streamed, tokenizer, common, own, seed_of(self.seed, number))
                 for number, (streamed, _) in enumerate(self.sources)]
        if self.state is not None:
            turns.load_state_dict(self.state["turns"])
            for source_lanes, state in zip(lanes, self.state["sources"], strict=True):
                source_lanes.load(state)
        while True:
            sources = [next(turns)[0] for _ in range(common)]
            tokens = torch.from_numpy(np.stack([lanes[sources[lane]].window(lane, self.T).astype(np.int64) for lane in own]))
            yield (tokens[:, :-1], tokens[:, 1:]), {"turns": turns.state_dict(), "sources": [each.state() for each in lanes]}


class StreamLoader:
    """A loader of `batches` batches (x, y). If `num_workers` is positive, one worker process reads ahead of training.

    state_dict returns the position in all processes, so all of them must call it at the same time.
    """

    def __init__(self, batches: int, num_workers: int, init_worker: Callable[[int], None], **arguments: Any) -> None:
        self.batches = batches
        self.num_workers = min(num_workers, 1)
        self.init_worker = init_worker
        self.arguments = arguments
        self.layout: StepLayout = arguments["layout"]
        self._state: StateDict | None = None        # the state after the last batch
        self._continues = False          # whether the next iteration begins at that state

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        state = self._state if self._continues else None
        self._continues = False
        self._state = state
        common = self.layout.rows * self.layout.world
        done = state["turns"]["drawn"] // common if state else 0
        read = DataLoader(Batches(**self.arguments, state=state), None, num_workers=self.num_workers, collate_fn=_identity,
                          worker_init_fn=self.init_worker, generator=torch.Generator().manual_seed(0))
        for batch, after in itertools.islice(read, self.batches - done):
            self._state = after
            yield batch

    def state_dict(self) -> StateDict:
        gathered = all_gather(self._state)
        states = [state for state in gathered if state is not None]
        if len(states) < len(gathered):  # nothing has been read yet
            return {"rows": self.layout.rows * self.layout.world}
        sources = [join_states([state["sources"][number] for state in states]) for number in range(len(states[0]["sources"]))]
        return {"rows": self.layout.rows * self.layout.world, "turns": states[0]["turns"], "sources": sources}

    def load_state_dict(self, state: StateDict) -> None:
        """Restores the position. Raises UserError if the run had a different number of rows per batch."""
        rows = self.layout.rows * self.layout.world
        if state.get("rows") != rows:
            remedy = "Restore the earlier data.batch_size" if "rows" in state else "Omit data.streaming"
            raise UserError("with data.streaming, a resumed run must have the same number of rows per batch: the run began "
                            f"with {state.get('rows', 'no')} rows, but now there are {rows}. {remedy}")
        self._state = state if "turns" in state else None
        self._continues = self._state is not None


def _identity(item: Item) -> Item:
    return item


def join_states(states: Sequence[JsonMapping]) -> StateDict:
    """Joins the states of all processes: the positions of all lanes, the oldest block, and the hashes since that block."""
    oldest = min(states, key=lambda state: state["block"][:2])
    hashes = [state["hashes"] for state in states if state["block"][:2] == oldest["block"][:2]]
    return {"block": oldest["block"], "hashes": max(hashes, key=len),
            "lanes": {lane: position for state in states for lane, position in state["lanes"].items()}}
