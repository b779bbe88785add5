"""Draws the training and validation windows of data=mix.

Each window is from one source. Every block of BLOCK windows contains each source's share of windows, in a seeded order.
Rounding is corrected in later blocks, so that over the whole run each source has its share to the nearest window. The windows
of a source come in the same order as in a run on that source alone: all windows in a random order, then again in a new order.
Each source has its own seed. So the order depends only on the seed, the weights and the data, not on the number of workers or
processes. A run can resume from any step.
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
    """A validation batch x, y (B,T). All windows are from source number `source`."""

    x: Tensor
    y: Tensor
    source: int


class Place(NamedTuple):
    """The place of a window: the number of its source, and its number within that source."""

    source: int
    number: int


def seed_of(seed: int, source: int) -> int:
    """Returns the seed for the order of a source's windows. The first source has the run's seed, as in a run on it alone."""
    return seed + (source << 32)


@dataclass(eq=False)
class MixedWindows(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of the training windows of all sources. The index is a Place."""

    sources: Sequence[Windows]

    def __getitems__(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        """Returns the windows as one batch x, y (B,T), int64."""
        rows = [self.sources[place.source][place.number] for place in places]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


@dataclass(eq=False)
class MixSampler(Sampler[list[Place]]):
    """Yields the places of the windows of `batches` batches.

    `sizes` has each source's number of windows per epoch, and `shares` each source's fraction of all windows. All processes
    share one order, and process `rank` of `world` gets every world-th place.
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
    """An iterator over a MixSampler."""

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
    """Yields for each window its source and its number within that source, in the order that all processes share.

    `drawn` is the number of windows so far.
    """

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
        """Plans a block. `taken` is the number of each source's windows in earlier blocks."""
        self._block = block
        self._before = [*taken]
        self._turns = plan_block(self.shares, taken, self.seed, block)
        self._after = [*taken]
        for source, _ in self._turns:
            self._after[source] += 1

    def state_dict(self) -> StateDict:
        return {"drawn": self.drawn, "taken": [*self._before], "block": self._block}

    def load_state_dict(self, state: StateDict) -> None:
        self.drawn = state["drawn"]
        self._begin(state["block"], state["taken"])


def plan_block(shares: Sequence[float], taken: Sequence[int], seed: int, block: int) -> list[tuple[int, int]]:
    """Returns the source of each of a block's BLOCK windows, and the window's number within that source.

    `taken` is the number of each source's windows in earlier blocks.
    """
    weights = np.array(shares)
    counts = np.array(taken)
    chosen = []
    for _ in range(BLOCK):               # each window is from the source that is furthest behind its share
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
    """A dataset of the validation windows of all sources. The index is a list of places in one source."""

    sources: Sequence[Windows]

    def __getitems__(self, places: Sequence[Place]) -> SourceBatch:
        x, y = self.sources[places[0].source].__getitems__([place.number for place in places])
        return SourceBatch(x, y, places[0].source)

    def batches(self, batch_size: int) -> list[list[Place]]:
        """Returns the places of each validation batch. All windows of a batch are from one source."""
        return [[Place(source, number) for number in range(start, min(start + batch_size, len(windows)))]
                for source, windows in enumerate(self.sources) for start in range(0, len(windows), batch_size)]
