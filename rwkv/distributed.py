"""Training in several processes: starting them, collective operations, and work that rank 0 does for all.

    python train.py trainer=ddp trainer.devices=2            starts two, and waits for them
    torchrun --nproc-per-node=2 train.py trainer=ddp         torch's own launcher starts them; also on several machines

Either way torch's launcher numbers the processes (their rank, from 0), gives each the whole command line, and ends all of
them when one fails.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from rwkv.errors import UserError

T = TypeVar("T")
RANK0_TIMEOUT = timedelta(days=30)       # rank 0 may tokenise a large corpus while the others wait
POLL_SECONDS = 0.5                       # between two checks that the launcher is alive
SAVE_SECONDS = 30.0                      # time to save for a process whose launcher has died
FAILED = 1                               # exit status of a process that ends because another process failed
STOPPED = 130                            # exit status after a signal

_waiting_group: "distributed.ProcessGroup | None" = None       # all processes, with RANK0_TIMEOUT


def launched() -> bool:
    """Whether torch's launcher started this process."""
    return distributed.is_available() and distributed.is_torchelastic_launched()


def launch(count: int, signals: Iterable[int]) -> int:
    """Runs this program's command line in `count` processes on this machine. Returns 0, or the first failure's exit status.

    signals: these are passed on to the processes, which then have half a minute to save. The status is STOPPED then.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)        # each process prints its own error
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=0, run_id=uuid.uuid4().hex,
                          rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          signals_to_handle=",".join(signal.Signals(number).name for number in signals))
    try:
        elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else FAILED
    except SignalException:
        return STOPPED
    return 0


@contextmanager
def connected() -> Iterator[None]:
    """Connects the processes that were launched together, for the `with` block, and divides a machine's cores among them.

    Raises UserError in this process when another one of the run has ended, and where the launcher's variables are incomplete.
    """
    global _waiting_group
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as error:          # such as "environment variable RANK expected, but not set"
        raise UserError(f"TORCHELASTIC_RUN_ID is set, but not torchrun's other variables ({error}): start the processes with "
                        "torchrun, or unset it") from None
    _waiting_group = distributed.new_group(backend="gloo", timeout=RANK0_TIMEOUT)
    processes_here = all_gather(socket.gethostname()).count(socket.gethostname())
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // processes_here)))
    try:
        yield
    except RuntimeError as error:
        if "peer" not in str(error) and not isinstance(error, distributed.DistError):
            raise
        raise UserError("another process of this run ended, and this one with it: continue the run with resume=auto") from None
    distributed.destroy_process_group()


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if _connected() else 0


def world_size() -> int:
    return distributed.get_world_size() if _connected() else 1


def broadcast_from_rank0(decide: Callable[[], T]) -> T:
    """Calls decide() in rank 0 alone and returns its result in all processes.

    If it raises, rank 0 raises the error and the other processes exit silently, so that it is printed once.
    """
    if not _connected():
        return decide()
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome = [(decide(), None)]
        except Exception as problem:
            outcome = [(None, problem)]
    distributed.broadcast_object_list(outcome, group=_waiting_group)
    value, error = outcome[0]
    if error is None:
        return value
    if rank() == 0:
        raise error
    sys.exit(FAILED)


def fail_together(error: Exception) -> NoReturn:
    """For an error that has happened in all processes: rank 0 raises it, and the others exit silently."""
    def fail() -> NoReturn:
        raise error

    broadcast_from_rank0(fail)


def rank0_first(load: Callable[[], T]) -> T:
    """Calls load() in rank 0 first, and then in the other processes, for which rank 0 has written files."""
    loaded: list[T] = []
    broadcast_from_rank0(lambda: loaded.append(load()))
    return loaded[0] if loaded else load()


def all_gather(value: T) -> list[T]:
    """In every process, the values of all processes in the order of their ranks."""
    values: list[Any] = [value] * world_size()
    if _connected():
        distributed.all_gather_object(values, value)
    return values


def all_sum(*values: float) -> list[float]:
    """The sum of each value over all processes, computed in float64."""
    sums = torch.tensor(values, dtype=torch.float64)
    if _connected():
        distributed.all_reduce(sums)
    return sums.tolist()


def _connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _exit_with(parent: int) -> None:
    """Stops this process by a SIGTERM when its launcher has died; torchrun dies of SIGUSR1. Otherwise the process would go on
    beside the run that continues it.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_SECONDS)
    os._exit(FAILED)


def log(text: str) -> None:
    """Prints `text` to standard error, in rank 0 alone."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)
