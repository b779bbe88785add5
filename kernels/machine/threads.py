"""Shortens the spinning of torch's CPU threads while they wait, and counts the threads that compete for the cores.

A parallel operator finishes with its last thread. GNU OpenMP, which torch uses on Linux, lets the other threads spin until
then, and for milliseconds afterwards. If another program occupies a core, the waiting threads spin on the core that the last
thread needs, and a training step takes many times as long. Source: libgomp's manual, OMP_WAIT_POLICY and GOMP_SPINCOUNT.
"""

import os
import sys
import time
from functools import cache
from pathlib import Path

SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPINS = "20000"                          # about half a millisecond; the default, 300,000, takes several milliseconds


def wait_briefly() -> None:
    """Sets GOMP_SPINCOUNT to shorten spinning, unless the user has set one of SETTINGS. Call this before importing torch."""
    if sys.platform == "linux" and "torch" not in sys.modules and not settings():
        os.environ["GOMP_SPINCOUNT"] = SPINS


@cache
def one_thread_in_forks() -> None:
    """Makes torch use one thread in every process that is later forked from this process, directly or indirectly.

    A fork copies no threads, so that GNU OpenMP in the child would deadlock while it waits for the parent's threads. With one
    thread the child waits for no others. The results are the same. A child that calls torch.set_num_threads(2) still deadlocks.
    """
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def competing_threads() -> int:
    """Returns the number of other programs' threads that are running or waiting for a core, or 0 if the number is unknown.

    The result is the least of five samples.
    """
    samples = []
    for _ in range(5):
        try:
            samples.append(int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return 0
        time.sleep(0.01)
    return max(0, min(samples) - 1)        # this thread is running, too


def settings() -> list[str]:
    """Returns the SETTINGS in effect as NAME=VALUE, whether this program or the user has set them."""
    return [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
