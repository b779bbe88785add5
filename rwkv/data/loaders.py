"""Loads batches for training and validation from the tokenised data of rwkv/data/prepare.py.

B = batch_size, T = ctx_len. Window i is tokens[i*T : i*T + T+1]. The first T tokens of a window are a row of x (B,T), and the
last T tokens are a row of y (B,T), so no two windows predict the same token.

Training reads all complete windows in a seeded random order, then again in a new order, without end. An epoch predicts every
token once, except the first token and up to T-1 tokens at the end. From the second epoch on, the windows are shifted by a
seeded offset, with wrap-around, so that a token has a different context in each epoch. The order is the same for any number of
workers and processes. Process `rank` of `world` reads every world-th window. A run can resume from any step.

Validation reads all windows in order. The tokens that remain form a last window, which is padded with IGNORED targets.

Other kinds of batches are in tbptt_segments.py (trainer.tbptt), mixture/windows.py (data=mix), conversations.py and pairs.py.
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
from rwkv.data.conversations import ConversationRows, RowSampler, Tokenised, WholeConversations, count_longer_than
from rwkv.data.mixture.windows import MixedValidation, MixedWindows, MixSampler, seed_of
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.data.streaming.lanes import StreamLoader
from rwkv.data.tbptt_segments import SegmentDataset, SegmentSampler, chunks_of
from rwkv.data.windows import ShuffleSampler, StepLayout, Windows
from rwkv.errors import UserError
from rwkv.io.json_types import StateDict
from rwkv.io.lines import count_of
from rwkv.io.signals import STOPPING

Batch = TypeVar("Batch")
# torch writes "DataLoader worker (pid 9) is killed by signal: Killed. " or "DataLoader worker (pid(s) 9) exited unexpectedly"
IN_WORKER = "in DataLoader worker process"
WORKER_ENDED = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal: ([^.]*)|exited unexpectedly)")


def require_workers(count: int) -> None:
    """Raises UserError if `count` workers need semaphores and the system has none. Linux keeps semaphores in /dev/shm."""
    try:
        if count:
            multiprocessing.get_context().Lock()
    except (ImportError, OSError) as error:
        raise UserError(f"data.num_workers={count} requires semaphores, but this system has none ({error}). Set "
                        "data.num_workers=0 to load batches in the training process, or enlarge /dev/shm") from None


class TrainingLoader(StatefulDataLoader):
    """A StatefulDataLoader that can load the state of a loader with a different number of workers.

    Without workers, a state has the sampler's position at the top level; with workers, in the main snapshot, which torchdata
    takes at each batch. The workers themselves have no state, and draw no random numbers.
    """

    def load_state_dict(self, state_dict: StateDict) -> None:
        position = state_dict.get("_snapshot", {}).get("_main_snapshot", state_dict)
        if state_dict and position.get("_num_workers", 0) != self.num_workers:
            state_dict = self._state_at(position)
        super().load_state_dict(state_dict)

    def _state_at(self, position: StateDict) -> StateDict:
        batches = position["_sampler_iter_yielded"]
        if not self.num_workers:
            return {**position, "_num_yielded": batches, "dataset_state": None, "fetcher_state": None,
                    "_iterator_finished": False}
        snapshot = {"_snapshot_step": batches, "_last_yielded_worker_id": self.num_workers - 1,
                    "_main_snapshot": {**position, "_num_workers": self.num_workers, "_base_seed": 0}}
        return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}


class DataModule(LightningDataModule):
    """Provides the loaders of a corpus to Lightning. The whole run (trainer.max_steps steps) is one epoch of Lightning.

    A checkpoint that is saved during fit contains the position of the training loader. A later checkpoint does not, because
    Lightning discards the position after fit.

    Args:
        config: the data options. config.batch_size is the number of rows per batch in this process.
        tbptt: the number of segments of each document stream per training step; 0 to train on windows.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, ctx_len: int, seed: int, tbptt: int = 0) -> None:
        super().__init__()
        self.corpus = corpus
        self.config = config
        self.ctx_len = ctx_len
        self.seed = seed
        self.tbptt = tbptt

    def train_dataloader(self) -> StatefulDataLoader | StreamLoader:
        """Returns a loader of batches. A batch is (x, y), each (B,T), or Packed, Pairs or Segments.

        The state_dict of the loader contains its position.
        """
        data: Dataset
        sampler: Sampler
        trainer = self.trainer
        layout = StepLayout(self.config.batch_size)
        batches = 0                      # batches of the whole run, or of one epoch if the number of steps is unknown
        if trainer is not None:
            layout = StepLayout(layout.rows, trainer.accumulate_grad_batches, trainer.global_rank, trainer.world_size)
            batches = max(0, trainer.max_steps) * trainer.accumulate_grad_batches
        if streams := self.corpus.streams:
            if not batches:
                raise UserError("data.streaming requires trainer.max_steps, because a stream has no end. Set trainer.max_steps")
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
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 causes this with torch 2.13
            return TrainingLoader(data, batch_sampler=sampler, collate_fn=_identity, num_workers=self.config.num_workers,
                                  worker_init_fn=_init_worker, generator=_own_generator(self.seed))

    def val_dataloader(self) -> DataLoader:
        """Returns a loader of batches (x, y), each (B,T), or of Packed, Pairs, Whole or SourceBatch.

        Unless the data are conversations, every token except the first one of each source is a target exactly once. The last
        batch may be smaller. With tbptt, a batch is Whole if any conversation is longer than ctx_len, because an answer may
        begin after ctx_len.
        """
        if self.corpus.parts:
            mixed = MixedValidation([Windows(part.corpus.val, self.ctx_len, partial=True) for part in self.corpus.parts])
            return DataLoader(mixed, batch_sampler=mixed.batches(self.config.batch_size), collate_fn=_identity,
                              generator=_own_generator(self.seed))
        windows: Any = Windows(self.corpus.val, self.ctx_len, partial=True)
        if self.corpus.conversations:
            windows = validation_rows(self.corpus.conversations[1], self.ctx_len, self.tbptt)
        return DataLoader(windows, self.config.batch_size, collate_fn=_identity, generator=_own_generator(self.seed))

    def state_dict(self) -> StateDict:
        mixed = {"shares": {part.name: part.share for part in self.corpus.parts}} if self.corpus.parts else {}
        return {"sha256": self.corpus.sha256} | mixed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Checks a checkpoint's state. Raises UserError if the run began with different data."""
        shares = {part.name: part.share for part in self.corpus.parts}
        if state_dict.get("shares", {}) != shares:
            before, now = (", ".join(f"{name} {100 * share:.4g} %" for name, share in each.items())
                           for each in (state_dict.get("shares", {}), shares))
            raise UserError(f"a resumed run must have the same data.sources as before ({before}); got {now}. Pass the same "
                            "names and weights, or begin a new run with init_from=")
        require_same_data(state_dict["sha256"], self.corpus)


def require_same_data(before: str, corpus: Corpus) -> None:
    """Raises UserError if a resumed run began with data of another SHA-256 than `corpus`."""
    if before != corpus.sha256:
        raise UserError(f"the data have changed since the run began: the SHA-256 was {before[:12]} and is now "
                        f"{corpus.sha256[:12]}. To resume, restore the data, or pass the path of the original data as "
                        "data.path= or data.sources=. To train on other data, begin a new run with init_from=")


def validation_rows(split: Tokenised, ctx_len: int, tbptt: int) -> WholeConversations | ConversationRows:
    """Returns the dataset of a validation split of conversations. Raises UserError if it has nothing to validate."""
    if tbptt and count_longer_than(split.tokens, ctx_len):
        return WholeConversations(split.tokens, split.learnt, ctx_len)
    try:
        return rows_of(split, ctx_len)
    except UserError as error:
        count = count_of(len(split.tokens.starts) // (1 + split.paired), "pair" if split.paired else "conversation")
        raise UserError(f"the validation split has {count}: {error}. A larger data.val_fraction enlarges the split") from None


def _identity(batch: Batch) -> Batch:
    return batch


def _init_worker(worker: int) -> None:
    ForkingPickler.register(torch.Tensor, _pickle_by_value)
    _ignore_interrupts()


def _pickle_by_value(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what pickle needs to store a tensor by value.

    By default torch puts the values into /dev/shm, which is small in containers. A batch that does not fit there never arrives.
    """
    return torch.from_numpy, (tensor.numpy(),)


def worker_error(error: BaseException) -> UserError | None:
    """Returns the UserError that replaces torch's error about a worker process, or None for any other error.

    The first case is a worker that raised UserError, because torch shows the traceback instead of the message. The second case
    is a worker that was killed, which torch's signal handler reports at any place in this process.
    """
    if isinstance(error, UserError) and IN_WORKER in str(error):
        return UserError(str(error).strip().splitlines()[-1].partition(": ")[2])
    ended = WORKER_ENDED.search(str(error)) if isinstance(error, RuntimeError) else None
    if ended is None:
        return None
    end = f"killed ({ended[1]})" if ended[1] else "killed"
    return UserError(f"a process that loads batches was {end}, perhaps because the machine ran out of memory. Continue the run "
                     "with resume=auto and a smaller data.num_workers. With data.num_workers=0, the training process loads the "
                     "batches")


def _ignore_interrupts() -> None:
    """Makes this worker process ignore stop signals, because the training process ends its workers after saving a checkpoint.

    systemd and SLURM send stop signals to every process of a job, and the terminal sends Ctrl-C to the process group.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = os.getppid()

        def end_for_parent() -> None:
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
                pass
            os._exit(0)

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=end_for_parent, daemon=True).start()


def _own_generator(seed: int) -> torch.Generator:
    """Returns a generator for the seeds of a loader's workers, so that the loader leaves the global random state unchanged."""
    return torch.Generator().manual_seed(seed)
