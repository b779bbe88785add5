"""Training and validation windows of data=mix.

Each window is of one source. In every BLOCK windows each source has its share, to the nearest window over the whole run, in a
seeded order. The windows of a source come in the order of a run on it alone, each source with its own seed: all of them in a
permutation, then in the next one. So the order depends only on the seed, the weights and the data: it is the same for any
number of workers and processes, and continues from any step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rwkv.data.windows import Permutations, Windows
from rwkv.io.json_types import StateDict

BLOCK = 64


class SourceBatch(NamedTuple):
    """A validation batch: x, y (B,T) as of other windows, all from source number `source`."""

    x: Tensor
    y: Tensor
    source: int


class Place(NamedTuple):
    """Window number `number` of source number `source`."""

    source: int
    number: int


def seed_of(seed: int, source: int) -> int:
    """The seed of a source's order. The first source has the seed of a run on it alone."""
    return seed + (source << 32)


@dataclass(eq=False)
class MixedWindows(Dataset[tuple[Tensor, Tensor]]):
    """The training windows of all sources."""

    sources: Sequence[Windows]

    def __getitems__(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        """The windows as one batch: x (B,T), y (B,T), int64."""
        rows = [self.sources[place.source][place.number] for place in places]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


@dataclass(eq=False)
class MixSampler(Sampler[list[Place]]):
    """The places of `batches` batches. sizes, shares: of each source, the windows in an epoch and the share of all windows.

    The process `rank` of `world` has every world-th place of the common order.
    """

    sizes: Sequence[int]
    shares: Sequence[float]
    batch_size: int
    batches: int
    seed: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> "MixIterator":
        return MixIterator(self)


class MixIterator(Iterator[list[Place]]):
    """One pass over a MixSampler."""

    def __init__(self, sampler: MixSampler) -> None:
        self.sampler = sampler
        self._turns = SourceTurns(sampler.shares, sampler.seed)
        self._orders = [Permutations(size, seed_of(sampler.seed, source)) for source, size in enumerate(sampler.sizes)]

    def __next__(self) -> list[Place]:
        sampler = self.sampler
        common = sampler.batch_size * sampler.world
        if self._turns.drawn >= sampler.batches * common:
            raise StopIteration
        turns = [next(self._turns) for _ in range(common)]
        return [Place(source, nth - nth % sampler.sizes[source] + self._orders[source][nth])
                for source, nth in turns[sampler.rank::sampler.world]]

    def state_dict(self) -> StateDict:
        return self._turns.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._turns.load_state_dict(state)


class SourceTurns(Iterator[tuple[int, int]]):
    """The source of each window of the common order, and the window's number within it. drawn: the windows so far."""

    def __init__(self, shares: Sequence[float], seed: int) -> None:
        self.shares = shares
        self.seed = seed
        self.drawn = 0
        self._begin(0, [0] * len(shares))

    def __next__(self) -> tuple[int, int]:
        if self.drawn == (self._block + 1) * BLOCK:
            self._begin(self._block + 1, self._after)
        turn = self._turns[self.drawn % BLOCK]
        self.drawn += 1
        return turn

    def _begin(self, block: int, taken: Sequence[int]) -> None:
        """Plans a block. taken: the windows of each source before it."""
        self._block = block
        self._before = [*taken]
        self._turns = mixed_block(self.shares, taken, self.seed, block)
        self._after = [*taken]
        for source, _ in self._turns:
            self._after[source] += 1

    def state_dict(self) -> StateDict:
        return {"drawn": self.drawn, "taken": [*self._before], "block": self._block}

    def load_state_dict(self, state: StateDict) -> None:
        self.drawn = state["drawn"]
        self._begin(state["block"], state["taken"])


def mixed_block(shares: Sequence[float], taken: Sequence[int], seed: int, block: int) -> list[tuple[int, int]]:
    """The source of each of a block's BLOCK windows, and the window's number within it. taken: windows before the block."""
    weights = np.array(shares)
    counts = np.array(taken)
    chosen = []
    for _ in range(BLOCK):               # the source furthest behind its share
        source = int(np.argmax(weights * (counts.sum() + 1) - counts))
        counts[source] += 1
        chosen.append(source)
    before = [*taken]
    places = []
    for turn in np.random.default_rng((seed, block, BLOCK)).permutation(BLOCK).tolist():
        source = chosen[turn]
        places.append((source, before[source]))
        before[source] += 1
    return places


@dataclass(eq=False)
class MixedValidation(Dataset[SourceBatch]):
    """The validation windows of all sources, source by source."""

    sources: Sequence[Windows]

    def __getitems__(self, places: Sequence[Place]) -> SourceBatch:
        x, y = self.sources[places[0].source].__getitems__([place.number for place in places])
        return SourceBatch(x, y, places[0].source)

    def batches(self, batch_size: int) -> list[list[Place]]:
        """The batches of validation, each of one source."""
        return [[Place(source, number) for number in range(start, min(start + batch_size, len(windows)))]
                for source, windows in enumerate(self.sources) for start in range(0, len(windows), batch_size)]
