"""A lock on a run's directory, so that one process trains it at a time. The system releases it when the process ends."""

import sys
import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from rwkv.errors import UserError

NAME = ".lock"
PATIENCE = 6.0                           # seconds to wait: the data workers of a killed run end within 5


class RunLock:
    """Held from hold() until release() or until the object is deleted. A pickled copy holds nothing."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def hold(self, out_dir: Path) -> None:
        """Locks an existing directory. Raises UserError if another process, or another RunLock of this one, holds the lock.

        If files cannot be locked there, it warns on standard error that the run is not protected.
        """
        if self._lock is None:
            self._lock = _acquired(out_dir)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __reduce__(self) -> Any:
        return RunLock, ()


def _acquired(out_dir: Path) -> FileLock | None:
    lock = FileLock(out_dir / NAME, thread_local=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")          # _warn_unprotected replaces the library's warning
            lock.acquire(timeout=PATIENCE, poll_interval=0.05)
    except Timeout:
        if not isinstance(lock, SoftFileLock):
            raise UserError(f"another process is training the run in {out_dir}: wait until it ends or stop it, or choose "
                            "another out_dir") from None
    except OSError as error:
        _warn_unprotected(out_dir, error.strerror or "no locks")
        return None
    if not isinstance(lock, SoftFileLock):
        return lock
    lock.release(force=True)             # the library falls back on a file as the lock, which would outlive its process
    _warn_unprotected(out_dir, "not on this file system")
    return None


def _warn_unprotected(out_dir: Path, reason: str) -> None:
    print(f"files cannot be locked in {out_dir} ({reason}): make sure yourself that no second process trains this run",
          file=sys.stderr)
