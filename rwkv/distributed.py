"""Starts and connects the processes of a training run, divides the CPU's threads among them, and runs functions in rank 0.

    python train.py trainer=ddp trainer.devices=2            starts two processes and waits for them
    torchrun --nproc-per-node=2 train.py trainer=ddp         torch's launcher starts the processes, also on several machines

In both cases torch's launcher assigns ranks from 0, passes the command line to each process, and ends all processes when one
fails.
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
from contextlib import contextmanager, suppress
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from rwkv.errors import UserError

T = TypeVar("T")
RANK0_TIMEOUT = timedelta(days=30)       # rank 0 may tokenise a large corpus while the others wait
POLL_SECONDS = 0.5                       # interval between checks that the launcher is alive
SAVE_SECONDS = 30.0                      # time for saving after the launcher has died
LOOPBACK = "127.0.0.1"                   # some machines cannot resolve their own name, or localhost
CONNECT_TIMEOUT = timedelta(minutes=1)   # torchrun starts processes only when all machines are up
STORE_TIMEOUT = timedelta(minutes=30)    # torch's default
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"    # environment variables of gloo and of the launcher
ADDRESS = "MASTER_ADDR"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
TASKS = "SLURM_STEP_NUM_TASKS"           # environment variable of srun
FAILED = 1                               # exit status of a process that ends because another process failed
STOPPED = 130                            # exit status after a signal

_waiting_group: "distributed.ProcessGroup | None" = None       # group of all processes, with RANK0_TIMEOUT


def is_launched() -> bool:
    """Returns True if torch's launcher started this process."""
    return distributed.is_available() and distributed.is_torchelastic_launched()


def srun_tasks() -> int:
    """Returns the number of processes that srun started: 1 outside SLURM, or if torch's launcher started this process."""
    return 1 if is_launched() else int(os.environ.get(TASKS) or 1)


def launch(count: int, signals: Iterable[int]) -> int:
    """Runs this program's command line in `count` local processes, and returns 0 or the exit status of the first failure.

    Raises UserError if the processes cannot connect. `signals` are the signals to pass on to the processes. After such a signal
    the processes have half a minute to save, and the returned status is `STOPPED`.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _use_loopback()
    for name in logging.root.manager.loggerDict:         # these loggers would repeat each process's error
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with TemporaryDirectory(prefix="timemix-", ignore_cleanup_errors=True) as logs:      # torch leaves its own log folder
            config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=0, run_id=uuid.uuid4().hex,
                                  rdzv_backend="c10d", rdzv_endpoint=f"{LOOPBACK}:0", local_addr=LOOPBACK,
                                  signals_to_handle=",".join(signal.Signals(number).name for number in signals),
                                  logs_specs=DefaultLogsSpecs(log_dir=logs))
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else FAILED
    except SignalException:
        return STOPPED
    except RendezvousError as error:
        raise UserError(f"cannot connect processes on this machine: {_torch_message(error)}") from None
    return 0


def _use_loopback() -> None:
    """Makes gloo use the loopback interface, unless the user names another. Raises UserError if the interface does not exist.

    By default gloo uses the address of the hostname, which may be missing or blocked by a firewall.
    """
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    for name in names & {"lo", "lo0"}:               # lo is the loopback interface of Linux, lo0 of macOS
        os.environ.setdefault(GLOO_INTERFACE, name)
    try:
        for name in filter(None, os.environ.get(GLOO_INTERFACE, "").split(",")):
            distributed.ProcessGroupGloo.create_device(interface=name)
    except RuntimeError as error:
        raise UserError(f"cannot connect processes on this machine: {_torch_message(error)}. The loopback interface must be "
                        f"up, and {GLOO_INTERFACE}, if set, must name an existing network interface") from None


@contextmanager
def connect_processes() -> Iterator[None]:
    """Connects the launched processes for the `with` block, and divides each machine's cores among its processes.

    Raises UserError if the processes cannot connect, or if another process of the run has ended.
    """
    threading.Thread(target=_exit_after_parent, args=(os.getppid(),), daemon=True).start()
    with _exiting_on_signal():
        _connect()
        processes_here = all_gather(socket.gethostname()).count(socket.gethostname())
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // processes_here)))
    try:
        yield
    except RuntimeError as error:
        if "peer" not in str(error) and not isinstance(error, distributed.DistError):
            raise
        raise UserError("this process ended because another process of the run ended: continue the run with "
                        "resume=auto") from None
    distributed.destroy_process_group()


def _connect() -> None:
    """Creates torch's default group from the launcher's environment variables, and the group for waiting for rank 0."""
    global _waiting_group
    try:
        _require_address(os.environ.get(ADDRESS, ""))
        store, number, count = next(distributed.rendezvous("env://", timeout=CONNECT_TIMEOUT))
        store.set_timeout(STORE_TIMEOUT)
        # the prefix is needed because torchrun's store keeps the addresses of ended processes after a restart
        store = distributed.PrefixStore(f"attempt {os.environ.get(RESTARTS, '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=number, world_size=count)
        _waiting_group = distributed.new_group(backend="gloo", timeout=RANK0_TIMEOUT)
    except ValueError as error:          # such as "environment variable RANK expected, but not set"
        if isinstance(error, UserError):
            raise
        raise UserError(f"the environment variable TORCHELASTIC_RUN_ID is set, but torchrun's other variables are missing or "
                        f"invalid ({error}). Start the processes with torchrun, or unset TORCHELASTIC_RUN_ID") from None
    except RuntimeError as error:
        raise UserError(f"this process cannot connect to the other processes of the run: {_torch_message(error)}") from None


def _require_address(host: str) -> None:
    """Waits until the host name of rank 0 resolves, because the cluster may still be starting. Raises UserError after
    `CONNECT_TIMEOUT`.
    """
    start = time.monotonic()
    announced = False
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if not announced:
                announced = True
                print(f"waiting    for an address of {ADDRESS}={host}", file=sys.stderr, flush=True)
            if time.monotonic() > start + CONNECT_TIMEOUT.total_seconds():
                raise UserError(f"this machine cannot resolve {ADDRESS}={host}, the name of the machine with rank 0 "
                                f"({error.strerror}). Start torchrun with --local-addr=ADDRESS or --master-addr=ADDRESS. On "
                                f"a single machine, ADDRESS is {LOOPBACK}") from None
        time.sleep(POLL_SECONDS)


@contextmanager
def _exiting_on_signal() -> Iterator[None]:
    """Makes signals end the process even while torch waits for others in C++ code, where Python's handlers do not run."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handled = threading.Event()

    def watch() -> None:
        with reader:
            number = reader.recv(1)
        if number and not handled.wait(POLL_SECONDS):
            print(f"interrupted by {signal.Signals(number[0]).name}", file=sys.stderr, flush=True)
            os._exit(STOPPED)

    previous = signal.set_wakeup_fd(writer.fileno())
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        handled.set()
        signal.set_wakeup_fd(previous)
        writer.close()                   # ends the thread


def _torch_message(error: Exception) -> str:
    """Returns the first line of an error's text, without the source location and the condition that torch adds."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2].removeprefix("ifa != nullptr. ").rstrip(". ")


def rank() -> int:
    """Returns the rank of this process, from 0; 0 without several processes."""
    return distributed.get_rank() if _has_group() else 0


def world_size() -> int:
    return distributed.get_world_size() if _has_group() else 1


def broadcast_from_rank0(decide: Callable[[], T]) -> T:
    """Calls decide() only in rank 0 and returns its result in all processes.

    If decide() raises an error, rank 0 raises the error and the other processes exit silently, so that only rank 0 prints it.
    """
    if not _has_group():
        return decide()
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome = [(decide(), None)]
        except Exception as failure:
            outcome = [(None, failure)]
    distributed.broadcast_object_list(outcome, group=_waiting_group)
    value, error = outcome[0]
    if error is None:
        return value
    if rank() == 0:
        raise error
    with suppress(RuntimeError):         # rank 0 must print the error before this process exits and the launcher ends rank 0
        distributed.barrier(_waiting_group)
    sys.exit(FAILED)


def fail_together(error: Exception) -> NoReturn:
    """Raises in rank 0 an error that occurred in all processes. The other processes exit silently."""
    def fail() -> NoReturn:
        raise error

    broadcast_from_rank0(fail)


def rank0_first(load: Callable[[], T]) -> T:
    """Calls load() in rank 0, then in the other processes, which use the files that rank 0 wrote. Returns the result."""
    loaded: list[T] = []
    broadcast_from_rank0(lambda: loaded.append(load()))
    return loaded[0] if loaded else load()


def all_gather(value: T) -> list[T]:
    """Returns the values of all processes, in the order of ranks, in every process."""
    values: list[Any] = [value] * world_size()
    if _has_group():
        distributed.all_gather_object(values, value)
    return values


def all_sum(*values: float) -> list[float]:
    """Returns the sum of each value over all processes, computed in float64."""
    sums = torch.tensor(values, dtype=torch.float64)
    if _has_group():
        distributed.all_reduce(sums)
    return sums.tolist()


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _exit_after_parent(parent: int) -> None:
    """Sends this process SIGTERM when its launcher has died, for example torchrun after SIGUSR1.

    Without the signal, the process would keep running at the same time as the resumed run.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_SECONDS)
    os._exit(FAILED)


def log(text: str) -> None:
    """Prints `text` to standard error in rank 0."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)
