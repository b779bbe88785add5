"""Locks a folder, such as a run's or the server's, so that only one process can use it."""

import warnings
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from rwkv.errors import UserError

NAME = ".lock"


def lock_folder(folder: Path, patience: float, in_use: str, unprotected: Callable[[str], object]) -> FileLock | None:
    """Locks an existing folder, until release() is called or the lock object is deleted.

    Raises UserError(in_use) if another process, or another lock object, still holds the lock after `patience` seconds. If the
    file system does not support locks, calls unprotected(reason) and returns None.
    """
    lock = FileLock(folder / NAME, thread_local=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")          # unprotected() replaces the library's warning
            lock.acquire(timeout=patience, poll_interval=0.05)
    except Timeout:
        if not isinstance(lock, SoftFileLock):
            raise UserError(in_use) from None
    except OSError as error:
        unprotected(error.strerror or "no locks")
        return None
    if not isinstance(lock, SoftFileLock):
        return lock
    lock.release(force=True)             # the library's fallback, a lock file, would remain after a crash
    unprotected("not on this file system")
    return None
