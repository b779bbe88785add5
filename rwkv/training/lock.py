"""One process for a run: a lock on its directory, which the system ends with the process that holds it, however that ends."""

import sys
import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from rwkv.errors import UserError

NAME = ".lock"
PATIENCE = 6.0                           # seconds, for what is left of a run that was killed just now: loaders take up to 5


class RunLock:
    """Held from hold() until release(), or until nobody refers to it any more. A copy for another process holds nothing."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def hold(self, out_dir: Path) -> None:
        """Of a directory that is there. Raises ValueError where another process, or another lock of this one, holds it.

        Where files cannot be locked it says so: nothing protects the run there.
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
            warnings.simplefilter("ignore")          # the library's word on what is said below
            lock.acquire(timeout=PATIENCE, poll_interval=0.05)
    except Timeout:
        if _is_a_lock(lock):
            raise UserError(f"another process is training the run in {out_dir}: wait until it ends or stop it, or choose "
                            "another out_dir") from None
    except OSError as error:
        _say_unprotected(out_dir, error.strerror or "no locks")
        return None
    if _is_a_lock(lock):
        return lock
    lock.release(force=True)
    _say_unprotected(out_dir, "not on this file system")
    return None


def _is_a_lock(lock: Any) -> bool:
    """A file that stands for one, into which the library turns it where the system has none, outlives its process."""
    return not isinstance(lock, SoftFileLock)


def _say_unprotected(out_dir: Path, reason: str) -> None:
    print(f"files cannot be locked in {out_dir} ({reason}): see to it yourself that no second process trains this run",
          file=sys.stderr)
