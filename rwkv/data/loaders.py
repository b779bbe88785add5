"""Batches for training and validation from files of tokens.

B = batch_size, T = ctx_len. Window i of N tokens is tokens[i*T : i*T + T+1]: x (B,T) its first T, y (B,T) its last T, so
that windows share no predicted token. Training goes through a seeded permutation of all whole windows, then through the
next one, without end: every token but the first is predicted once per epoch, and of the last ones fewer than T never are.
From the second epoch on all windows begin by a seeded number of tokens later, and one goes on from the last token at the
first, so that a token that comes again is predicted from another stretch of what is before it.
Step by step the order is the same for any number of workers, for any number of processes (each has every world-th window of
a common batch), and from any step on. Validation takes all windows in order, and the rest as a last one, filled up with
IGNORED targets. With trainer.tbptt, training reads documents instead: rwkv/data/documents.py.
"""

import os
import warnings
from typing import Any

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from rwkv.config import DataConfig
from rwkv.data.documents import LaneOrder, Pieces, Reading, Share
from rwkv.data.prepare import Corpus
from rwkv.data.windows import EndlessPermutations, Windows
from rwkv.errors import UserError


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
            raise UserError(f"the data have changed since the run began: their SHA-256 was {state_dict['sha256'][:12]} and is "
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
