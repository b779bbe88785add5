"""Divides tokens into training windows of ctx_len tokens, and draws the windows in an endless seeded random order.

Each epoch is a new permutation of the windows. The order can be computed from any position, so that a run can resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rwkv.data.token_array import TokenArray
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED


class Permutations:
    """An endless sequence of seeded permutations of the numbers below `size`. The index is a position in the sequence."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
        return int(self._order[offset])


@lru_cache
def window_offset(ctx_len: int, seed: int, epoch: int) -> int:
    """Returns the number of tokens by which an epoch shifts all windows: 0 for epoch 0, otherwise random below ctx_len."""
    return int(np.random.default_rng((seed, epoch, ctx_len)).integers(ctx_len)) if epoch else 0


@dataclass(eq=False)
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of the windows of a TokenArray. Window numbers of len(self) and more belong to later, shifted epochs.

    If `partial` is true, the tokens after the last complete window form a shorter window, and there is only one epoch. `seed`
    determines the shifts.
    """

    tokens: TokenArray
    ctx_len: int
    partial: bool = False
    seed: int = 0

    def __len__(self) -> int:
        """Returns the number of windows in an epoch."""
        predicted = len(self.tokens) - 1
        return -(-predicted // self.ctx_len) if self.partial else predicted // self.ctx_len

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([number])
        return x[0], y[0]

    def __getitems__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the windows with these numbers as one batch x, y (B,T), int64, padded with 0 (x) and IGNORED (y)."""
        x = np.zeros((len(numbers), self.ctx_len), np.int64)
        y = np.full_like(x, IGNORED)
        for row, number in enumerate(numbers):
            column = 0
            for span in self._spans(number):
                tokens = self.tokens[span]
                columns = slice(column, column := column + len(tokens) - 1)
                x[row, columns] = tokens[:-1]
                y[row, columns] = tokens[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def _spans(self, number: int) -> list[slice]:
        """Returns the one or two spans of a window's tokens. Each span also includes the target of the last input."""
        epoch, index = divmod(number, len(self))
        end = min(len(self) * self.ctx_len, len(self.tokens) - 1)
        start = (index * self.ctx_len + window_offset(self.ctx_len, self.seed, epoch)) % end
        stop = start + self.ctx_len
        wrapped = [slice(stop - end + 1)] if stop > end and not self.partial else []
        return [slice(start, min(stop, end) + 1), *wrapped]


@dataclass(eq=False)
class ShuffleSampler(Sampler[list[int]]):
    """Yields the window numbers of `batches` batches. Each epoch is a new permutation of the `size` windows.

    All processes share one order, and process `rank` of `world` gets every world-th number.
    """

    size: int
    batch_size: int
    batches: int
    seed: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> "ShuffleIterator":
        return ShuffleIterator(self)


class ShuffleIterator(Iterator[list[int]]):
    """An iterator over a ShuffleSampler. `drawn` counts the numbers that all processes together have used so far."""

    def __init__(self, sampler: ShuffleSampler) -> None:
        self.sampler = sampler
        self.drawn = 0
        self._order = Permutations(sampler.size, sampler.seed)

    def __next__(self) -> list[int]:
        sampler = self.sampler
        common = sampler.batch_size * sampler.world
        if self.drawn >= sampler.batches * common:
            raise StopIteration
        self.drawn += common
        positions = range(self.drawn - common + sampler.rank, self.drawn, sampler.world)
        return [position - position % sampler.size + self._order[position] for position in positions]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the position. Raises UserError if the run began with trainer.tbptt."""
        if "drawn" not in state:
            raise UserError("the run began with trainer.tbptt and cannot resume without trainer.tbptt. Omit the option "
                            "trainer.tbptt=, and the run will keep the earlier value")
        self.drawn = state["drawn"]


class StepLayout(NamedTuple):
    """The layout of an optimiser step: each of `world` processes accumulates `parts` batches of `rows` rows."""

    rows: int
    parts: int = 1
    rank: int = 0
    world: int = 1

    @property
    def streams(self) -> int:
        return self.rows * self.parts * self.world

    def own(self, part: int) -> range:
        """Returns the streams that are this process's rows in batch `part`: every world-th stream of the batch."""
        return self.common(part)[self.rank::self.world]

    def common(self, part: int) -> range:
        """Returns the streams that are rows of batch `part` in any process."""
        return range(part * self.rows * self.world, (part + 1) * self.rows * self.world)
