"""Batches for training and validation from files of tokens.

B = batch_size, T = ctx_len. Window i of N tokens is tokens[i*T : i*T + T+1]: x (B,T) its first T, y (B,T) its last T, so
that windows share no predicted token. Training goes through a seeded permutation of all whole windows, then through the
next one, without end: every token but the first is predicted once per epoch, and of the last ones fewer than T never are.
From the second epoch on all windows begin by a seeded number of tokens later, and one goes on from the last token at the
first, so that a token that comes again is predicted from another stretch of what is before it.
Step by step the order is the same for any number of workers, for any number of processes (each has every world-th window of
a common batch), and from any step on. Validation takes all windows in order, and the rest as a last one, filled up with
IGNORED targets. With trainer.tbptt, training reads documents instead: rwkv/lanes.py.
"""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rwkv.config import DataConfig
from rwkv.lanes import LaneOrder, Pieces, Reading, Share
from rwkv.loss import IGNORED
from rwkv.order import Permutations, shift
from rwkv.stream import Stream
from rwkv.tokens import Corpus


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
            raise ValueError("the run was begun with trainer.tbptt, and cannot go on without: leave it out to resume")
        self.drawn = state["drawn"]


class DataModule(LightningDataModule):
    """A corpus as Lightning's loaders. To Lightning, one epoch is the whole run: trainer.max_steps steps.

    tbptt: segments of each lane in a step of training, 0 for windows. config.batch_size: rows of this process in a batch.
    The place in the data is in every checkpoint that is saved while the loader runs, so in any hook of training or
    validation; after the end of fit Lightning has forgotten it.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, ctx_len: int, seed: int, tbptt: int = 0) -> None:
        super().__init__()
        self.corpus, self.config, self.ctx_len, self.seed, self.tbptt = corpus, config, ctx_len, seed, tbptt

    def train_dataloader(self) -> StatefulDataLoader:
        """Batches (x, y), each (B,T), or Segments; its state_dict says where it is."""
        data, sampler = self._lanes() if self.tbptt else self._windows()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            return StatefulDataLoader(data, batch_sampler=sampler, collate_fn=_as_it_is, num_workers=self.config.num_workers,
                                      worker_init_fn=_apart, generator=_own_generator(self.seed))

    def val_dataloader(self) -> DataLoader:
        """Batches (x, y), each (B,T), the last one smaller: every token but the first is a target once."""
        windows = Windows(self.corpus.val, self.ctx_len, partial=True)
        return DataLoader(windows, self.config.batch_size, collate_fn=_as_it_is, generator=_own_generator(self.seed))

    def state_dict(self) -> dict[str, str]:
        """What a checkpoint says of the data."""
        return {"sha256": self.corpus.sha256}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Raises ValueError where the run would go on with other data than it began with."""
        if state_dict["sha256"] != self.corpus.sha256:
            raise ValueError(f"the data have changed since the run began: their SHA-256 was {state_dict['sha256'][:12]} and is "
                             f"{self.corpus.sha256[:12]}; put them back to resume, or begin a new run with init_from=")

    def _windows(self) -> tuple[Windows, EndlessPermutations]:
        windows, share = Windows(self.corpus.train, self.ctx_len, seed=self.seed), self._share()
        batches = self._batches() or -(-len(windows) // share.rows)
        return windows, EndlessPermutations(len(windows), share.rows, batches, self.seed, share.rank, share.world)

    def _lanes(self) -> tuple[Reading, LaneOrder]:
        tokens, share = self.corpus.train, self._share()
        pieces = Pieces(tokens, self.corpus.tokenizer.end_of_text, self.ctx_len, share.lanes)
        batches = self._batches() or -(-int(pieces.segments.sum()) // (share.lanes * self.tbptt))
        return Reading(tokens, self.ctx_len), LaneOrder(pieces, self.tbptt, share, batches, self.seed)

    def _batches(self) -> int:
        """Of the whole run; 0 where no trainer says so, for an epoch."""
        trainer = self.trainer
        return 0 if trainer is None or trainer.max_steps < 0 else trainer.max_steps * trainer.accumulate_grad_batches

    def _share(self) -> Share:
        trainer, rows = self.trainer, self.config.batch_size
        if trainer is None:
            return Share(rows)
        return Share(rows, trainer.accumulate_grad_batches, trainer.global_rank, trainer.world_size)


def _as_it_is(batch: Any) -> Any:
    return batch


def _apart(worker: int) -> None:
    """Out of reach of the terminal's Ctrl-C: training ends its workers itself, once it has saved where it is."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _own_generator(seed: int) -> torch.Generator:
    """Loaders draw a seed for their workers: not from the global generator, whose state then only the model moves."""
    return torch.Generator().manual_seed(seed)
