"""Locks a folder, such as a run's or the server's, so that only one process can use it."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from rwkv.errors import UserError

NAME = ".lock"
FOREVER = -1                             # in place of seconds


def lock_folder(folder: Path, patience: float, in_use: str, unprotected: Callable[[str], object]) -> FileLock | None:
    """Locks an existing folder, until release() is called or the lock object is deleted.

    Waits `patience` seconds, or FOREVER. Raises UserError(in_use) if another process, or another lock object, still holds the
    lock then. If the file system does not support locks, calls unprotected(reason) and returns None.
    """
    lock = FileLock(folder / NAME, thread_local=False, fallback_to_soft=False)       # a lock file would remain after a crash
    try:
        lock.acquire(timeout=patience, poll_interval=0.05)
    except Timeout:
        raise UserError(in_use) from None
    except OSError as error:
        unprotected(error.strerror or "no locks")
        return None
    return lock
