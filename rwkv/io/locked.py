"""Locks a folder, such as a run's or the server's, so that only one process can use it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from rwkv.errors import UserError

NAME = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
FOREVER = -1                             # patience without a time limit


def lock_folder(folder: Path, patience: float, in_use: str, unprotected: Callable[[str], object]) -> FileLock | None:
    """Locks an existing folder, until release() is called or the lock object is deleted.

    Waits `patience` seconds, or FOREVER. Raises UserError(in_use) if another process, or another lock object, still holds the
    lock then, and OSError if the lock's file cannot be written. If the file system does not support locks, calls
    unprotected(reason) and returns None.
    """
    lock = FileLock(folder / NAME, thread_local=False, fallback_to_soft=False)       # a lock file would remain after a crash
    try:
        lock.acquire(timeout=patience, poll_interval=0.05)
    except Timeout:
        raise UserError(in_use) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        unprotected(os.strerror(error.errno))
        return None
    return lock
