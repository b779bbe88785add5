"""Several processes that train one model: who starts them, how they agree, and what the first one does for all.

    python train.py trainer=ddp trainer.devices=2            starts two, and waits for them
    torchrun --nproc-per-node=2 train.py trainer=ddp         torch's own launcher starts them; also on several machines

Either way torch's launcher numbers them (their rank), gives each the whole command line, and ends all where one fails.
"""

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
PATIENCE = timedelta(days=30)            # for what the first process does for all, as tokenising a large corpus
POLLED = 0.5                             # seconds between two looks at whether the launcher lives
ENDED = 1                                # exit status of a process whose launcher died

_patient: "distributed.ProcessGroup | None" = None     # all processes, where they wait for the first one


def launched() -> bool:
    """Whether this process is one of several, or of one, that torch's launcher started."""
    return distributed.is_available() and distributed.is_torchelastic_launched()


def launch(count: int) -> int:
    """Runs this program's command line in `count` processes on this machine; the exit status of the first that failed, or 0.

    Ctrl-C and SIGTERM are passed on to them, and they have half a minute to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)        # the processes speak for themselves
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=0, run_id=uuid.uuid4().hex,
                          rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    try:
        elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else ENDED
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


@contextmanager
def connected() -> Iterator[None]:
    """Inside, the processes that were launched together can talk."""
    global _patient
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    _patient = distributed.new_group(backend="gloo", timeout=PATIENCE)
    _share_cores()
    try:
        yield
    except RuntimeError as error:
        if "peer" not in str(error) and not isinstance(error, distributed.DistError):
            raise
        raise ValueError("another process of this run ended, and this one with it; resume=auto continues the run") from None
    distributed.destroy_process_group()


def rank() -> int:
    """This process's number, from 0."""
    return distributed.get_rank() if _connected() else 0


def world_size() -> int:
    return distributed.get_world_size() if _connected() else 1


def agreed(decide: Callable[[], T]) -> T:
    """What the first process decides, in all of them. Where it raises, the others end without a word: it says why."""
    if not _connected():
        return decide()
    outcome: list[Any] = [None]
    if rank() == 0:
        outcome = [_outcome(decide)]
    distributed.broadcast_object_list(outcome, group=_patient)
    value, error = outcome[0]
    if error is None:
        return value
    if rank() == 0:
        raise error
    sys.exit(ENDED)


def fail_together(error: Exception) -> NoReturn:
    """What all processes came upon: the first one raises it, once it is there, and the others end without a word."""
    def fail() -> NoReturn:
        raise error

    agreed(fail)


def in_turn(do: Callable[[], T]) -> T:
    """The first process does it before the others, which then find what it left on the disk."""
    done: list[T] = []
    agreed(lambda: done.append(do()))
    return done[0] if done else do()


def gathered(value: T) -> list[T]:
    """The value of each process, by rank, in all of them."""
    values: list[Any] = [value] * world_size()
    if _connected():
        distributed.all_gather_object(values, value)
    return values


def summed(*values: float) -> list[float]:
    """Each value's sum over all processes, in float64."""
    sums = torch.tensor(values, dtype=torch.float64)
    if _connected():
        distributed.all_reduce(sums)
    return sums.tolist()


def _connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _outcome(decide: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return decide(), None
    except Exception as error:
        return None, error


def _end_with(parent: int) -> None:
    """A launcher that was killed cannot end its processes: they would train on beside the run that continues theirs."""
    while os.getppid() == parent:
        time.sleep(POLLED)
    os._exit(ENDED)


def _share_cores() -> None:
    """Of the processes on one machine; where the user asked for fewer threads, for fewer."""
    here = gathered(socket.gethostname()).count(socket.gethostname())
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // here)))
