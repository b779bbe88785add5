"""Loads batches for training and validation from the tokenised data of rwkv/data/prepare.py.

B = batch_size, T = ctx_len. Window i of N tokens is tokens[i*T : i*T + T+1]: x (B,T) is its first T tokens, y (B,T) its last T,
so no two windows predict the same token. Training reads all complete windows in a seeded random order, then in a new order,
without end. In an epoch every token is predicted once, except the first token and up to T-1 tokens at the end. From the second
epoch on, the windows are shifted by a seeded offset, with wrap-around, so that a token has a different context in each epoch.
The order is the same for any number of workers and processes, and a run can resume from any step; process `rank` of `world`
reads every world-th window. Validation reads all windows in order; the tokens that remain form a last window, padded with
IGNORED targets. For trainer.tbptt see segments.py, for data=mix mixture/windows.py, for conversations conversations.py, for
pairs of answers pairs.py.
"""

import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rwkv.config import DataConfig
from rwkv.data.conversations import RowSampler, WholeConversations, longer_than
from rwkv.data.mixture.windows import MixedValidation, MixedWindows, MixSampler, seed_of
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.data.segments import SegmentDataset, SegmentSampler, chunks_of
from rwkv.data.streaming.lanes import StreamLoader
from rwkv.data.windows import ShuffleSampler, StepLayout, Windows
from rwkv.errors import UserError
from rwkv.io.json_types import StateDict
from rwkv.io.signals import STOPPING

Batch = TypeVar("Batch")
# torch's messages are "DataLoader worker (pid 9) is killed by signal: Killed. " and "... (pid(s) 9) exited unexpectedly"
IN_WORKER = "in DataLoader worker process"
WORKER_ENDED = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal: ([^.]*)|exited unexpectedly)")


def require_workers(count: int) -> None:
    """Raises UserError if the system lacks semaphores, which workers' queues require (on Linux they are files in /dev/shm)."""
    try:
        if count:
            multiprocessing.get_context().Lock()
    except (ImportError, OSError) as error:
        raise UserError(f"data.num_workers={count} requires semaphores, which this system lacks ({error}): load batches in the "
                        "training process with data.num_workers=0, or enlarge /dev/shm") from None


class DataModule(LightningDataModule):
    """Provides a corpus's loaders to Lightning, for which the whole run (trainer.max_steps steps) is one epoch.

    config.batch_size: rows per batch in this process. tbptt: segments of each document stream per training step; 0 for windows.
    Checkpoints saved during fit contain the loader's position; later checkpoints do not, since Lightning discards it after fit.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, ctx_len: int, seed: int, tbptt: int = 0) -> None:
        super().__init__()
        self.corpus = corpus
        self.config = config
        self.ctx_len = ctx_len
        self.seed = seed
        self.tbptt = tbptt

    def train_dataloader(self) -> StatefulDataLoader | StreamLoader:
        """A loader of batches (x, y), each (B,T), or of Packed, Pairs or Segments. The loader's state_dict is its position."""
        data: Dataset
        sampler: Sampler
        trainer = self.trainer
        layout = StepLayout(self.config.batch_size)
        batches = 0                      # in the whole run, or in one epoch if no number of steps is known
        if trainer is not None:
            layout = StepLayout(layout.rows, trainer.accumulate_grad_batches, trainer.global_rank, trainer.world_size)
            batches = max(0, trainer.max_steps) * trainer.accumulate_grad_batches
        if streams := self.corpus.streams:
            if not batches:
                raise UserError("data.streaming requires trainer.max_steps, because a stream has no end")
            return StreamLoader(batches, self.config.num_workers, _init_worker, sources=streams,
                                tokenizer=self.corpus.tokenizer, T=self.ctx_len, layout=layout, seed=self.seed)
        if self.tbptt:
            chunks = chunks_of(self.corpus, self.ctx_len, layout.streams)
            data = SegmentDataset(self.corpus.train, self.ctx_len, self.corpus.learnt)
            batches = batches or -(-int(chunks.segments.sum()) // (layout.streams * self.tbptt))
            sampler = SegmentSampler(chunks, self.tbptt, layout, batches, self.seed)
        elif self.corpus.conversations:
            data = rows_of(self.corpus.conversations[0], self.ctx_len)
            batches = batches or -(-len(data) // layout.rows)
            sampler = RowSampler(data.counts, layout.rows, batches, self.seed, layout.rank, layout.world, layout.parts)
        elif self.corpus.parts:
            windows = [Windows(part.corpus.train, self.ctx_len, seed=seed_of(self.seed, number))
                       for number, part in enumerate(self.corpus.parts)]
            data = MixedWindows(windows)
            batches = batches or -(-sum(map(len, windows)) // layout.rows)
            sampler = MixSampler([*map(len, windows)], [part.share for part in self.corpus.parts], layout.rows, batches,
                                 self.seed, layout.rank, layout.world)
        else:
            data = Windows(self.corpus.train, self.ctx_len, seed=self.seed)
            batches = batches or -(-len(data) // layout.rows)
            sampler = ShuffleSampler(len(data), layout.rows, batches, self.seed, layout.rank, layout.world)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # from torchdata 0.11 with torch 2.13
            return StatefulDataLoader(data, batch_sampler=sampler, collate_fn=_unchanged, num_workers=self.config.num_workers,
                                      worker_init_fn=_init_worker, generator=_own_generator(self.seed))

    def val_dataloader(self) -> DataLoader:
        """A loader of batches (x, y), each (B,T), or of Packed, Pairs or SourceBatch; the last batch may be smaller. Every
        token but the first of each source is a target once.

        With tbptt, batches of conversations are Whole if one is longer than ctx_len, since its answer may begin after ctx_len.
        """
        if self.corpus.parts:
            mixed = MixedValidation([Windows(part.corpus.val, self.ctx_len, partial=True) for part in self.corpus.parts])
            return DataLoader(mixed, batch_sampler=mixed.batches(self.config.batch_size), collate_fn=_unchanged,
                              generator=_own_generator(self.seed))
        windows: Any = Windows(self.corpus.val, self.ctx_len, partial=True)
        if self.corpus.conversations:
            whole = self.tbptt and longer_than(self.corpus.val, self.ctx_len)
            val = self.corpus.conversations[1]
            windows = WholeConversations(val.tokens, val.learnt, self.ctx_len) if whole else rows_of(val, self.ctx_len)
        return DataLoader(windows, self.config.batch_size, collate_fn=_unchanged, generator=_own_generator(self.seed))

    def state_dict(self) -> StateDict:
        mixed = {"shares": {part.name: part.share for part in self.corpus.parts}} if self.corpus.parts else {}
        return {"sha256": self.corpus.sha256} | mixed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Raises UserError if the run began with different data."""
        shares = {part.name: part.share for part in self.corpus.parts}
        if state_dict.get("shares", {}) != shares:
            before, now = (", ".join(f"{name} {100 * share:.4g} %" for name, share in each.items())
                           for each in (state_dict.get("shares", {}), shares))
            raise UserError(f"a resumed run must have the same data.sources, {before}; got {now}: pass the same names and "
                            "weights, or begin a new run with init_from=")
        if state_dict["sha256"] != self.corpus.sha256:
            raise UserError(f"the data have changed since the run began: their SHA-256 was {state_dict['sha256'][:12]} and is "
                            f"{self.corpus.sha256[:12]}; to resume, restore them or pass their path as data.path= or "
                            "data.sources=; or begin a new run with init_from=")


def _unchanged(batch: Batch) -> Batch:
    return batch


def _init_worker(worker: int) -> None:
    ForkingPickler.register(torch.Tensor, _by_value)
    _ignore_interrupts()


def _by_value(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Pickles a tensor by value. By default torch puts the values into /dev/shm, which is small in containers; a batch that
    does not fit there never arrives.
    """
    return torch.from_numpy, (tensor.numpy(),)


def worker_error(error: BaseException) -> UserError | None:
    """The UserError that replaces torch's error about a worker; None for other errors. Either the worker was killed, which a
    signal handler reports anywhere in this process, or the worker raised UserError, which torch shows with a traceback.
    """
    if isinstance(error, UserError) and IN_WORKER in str(error):
        return UserError(str(error).strip().splitlines()[-1].partition(": ")[2])
    ended = WORKER_ENDED.search(str(error)) if isinstance(error, RuntimeError) else None
    if ended is None:
        return None
    end = f"killed ({ended[1]})" if ended[1] else "killed"
    return UserError(f"a process that loads batches was {end}, perhaps because memory was full: continue the run with "
                     "resume=auto and fewer data.num_workers; with 0 the training process loads batches itself")


def _ignore_interrupts() -> None:
    """Makes this worker process ignore stop signals: the training process ends its workers after it has saved a checkpoint.

    systemd and SLURM send such signals to every process of a job, and the terminal sends Ctrl-C to the process group.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = os.getppid()

        def end_for_parent() -> None:
            """Ends this process when its parent sends SIGTERM, and ignores SIGTERM from other processes."""
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
                pass
            os._exit(0)

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=end_for_parent, daemon=True).start()


def _own_generator(seed: int) -> torch.Generator:
    """A generator from which a loader draws its workers' seeds, so that the loader does not change the global random state."""
    return torch.Generator().manual_seed(seed)
