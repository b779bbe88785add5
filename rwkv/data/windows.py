"""The order of training: numbers without end, each once in an epoch, found again from any place on."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rwkv.data.token_array import Stream
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED


class Permutations:
    """The numbers below `size` in a seeded permutation, then in the next one: order[place] for any place from 0 on."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __getitem__(self, place: int) -> int:
        epoch, offset = divmod(place, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.size)
        return int(self._order[offset])


@lru_cache
def shift(ctx_len: int, seed: int, epoch: int) -> int:
    """By how many tokens, fewer than ctx_len, the windows of an epoch begin later than those of the first one."""
    return int(np.random.default_rng((seed, epoch, ctx_len)).integers(ctx_len)) if epoch else 0


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The windows of a stream of tokens, and after them, numbered on, those of the next epochs, cut elsewhere.

    partial: the rest after the last whole window is one as well, and there is one epoch. seed: of where epochs are cut.
    """

    def __init__(self, tokens: Stream, ctx_len: int, partial: bool = False, seed: int = 0) -> None:
        self.tokens, self.ctx_len, self.partial, self.seed = tokens, ctx_len, partial, seed

    def __len__(self) -> int:
        predicted = len(self.tokens) - 1
        return -(-predicted // self.ctx_len) if self.partial else predicted // self.ctx_len

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """One window: x (T,), y (T,)."""
        x, y = self.__getitems__([number])
        return x[0], y[0]

    def __getitems__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Windows `numbers` (B,) as one batch: x (B,T), y (B,T), int64."""
        x = np.zeros((len(numbers), self.ctx_len), np.int64)
        y = np.full_like(x, IGNORED)
        for row, number in enumerate(numbers):
            column = 0
            for span in self._spans(number):
                tokens = self.tokens[span]
                columns = slice(column, column := column + len(tokens) - 1)
                x[row, columns], y[row, columns] = tokens[:-1], tokens[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def _spans(self, number: int) -> list[slice]:
        """Where its inputs lie, each followed by one token more, the last input's target."""
        epoch, index = divmod(number, len(self))
        end = min(len(self) * self.ctx_len, len(self.tokens) - 1)
        start = (index * self.ctx_len + shift(self.ctx_len, self.seed, epoch)) % end
        stop = start + self.ctx_len
        around = [slice(stop - end + 1)] if stop > end and not self.partial else []
        return [slice(start, min(stop, end) + 1), *around]


class EndlessPermutations(Sampler[list[int]]):
    """`batches` batches of the numbers below `size` in an order of their own, then of the next `size` numbers, without end.

    Of `world` processes, the one with `rank` has every world-th number of the common order.
    """

    def __init__(self, size: int, batch_size: int, batches: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self.size, self.batch_size, self.batches, self.seed = size, batch_size, batches, seed
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> "PermutationIterator":
        return PermutationIterator(self)


class PermutationIterator(Iterator[list[int]]):
    """Where one pass over EndlessPermutations stands: `drawn` numbers, by all processes together."""

    def __init__(self, sampler: EndlessPermutations) -> None:
        self.sampler, self.drawn = sampler, 0
        self._order = Permutations(sampler.size, sampler.seed)

    def __next__(self) -> list[int]:
        sampler = self.sampler
        common = sampler.batch_size * sampler.world
        if self.drawn >= sampler.batches * common:
            raise StopIteration
        self.drawn += common
        places = range(self.drawn - common + sampler.rank, self.drawn, sampler.world)
        return [place - place % sampler.size + self._order[place] for place in places]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises ValueError where the run read documents in lanes."""
        if "drawn" not in state:
            raise UserError("the run was begun with trainer.tbptt, and cannot go on without: leave it out to resume")
        self.drawn = state["drawn"]
