"""A lock on a run's directory: one process trains it at a time. The system releases it when the process ends."""

import sys
from pathlib import Path
from typing import Self

from filelock import FileLock

from rwkv.io.locked import NAME as NAME
from rwkv.io.locked import lock_folder

PATIENCE = 6.0                           # seconds to wait for the lock: data workers of a killed run end within 5


class RunLock:
    """The lock. It is held from hold() until release(), or until the object is deleted. A pickled copy does not hold it."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def hold(self, out_dir: Path) -> None:
        """Locks an existing directory. Raises UserError if another process, or another RunLock of this one, holds the lock.

        If files cannot be locked there, it warns on standard error that the run is not protected.
        """
        if self._lock is None:
            in_use = (f"another process is training the run in {out_dir}: wait until it ends or stop it, or choose another "
                      "out_dir")
            self._lock = lock_folder(out_dir, PATIENCE, in_use, lambda reason: _warn_unprotected(out_dir, reason))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _warn_unprotected(out_dir: Path, reason: str) -> None:
    print(f"files cannot be locked in {out_dir} ({reason}): make sure that no other process trains this run",
          file=sys.stderr)
