"""Locks a run's directory, so that only one process at a time trains the run.

The operating system releases the lock when the process ends.
"""

import sys
from pathlib import Path
from typing import Self

from filelock import FileLock

from rwkv.io.locked import NAME as NAME
from rwkv.io.locked import lock_folder

PATIENCE = 6.0                           # seconds to wait for the lock; data workers of a killed run end within 5


class RunLock:
    """A lock that is held from hold() until release() or until the object is deleted. A pickled copy does not hold the lock."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def hold(self, out_dir: Path) -> None:
        """Locks an existing directory. Raises UserError if another process or another RunLock holds the lock.

        If the file system does not support locks, this method prints a warning on standard error.
        """
        if self._lock is None:
            in_use = (f"another process is training the run in {out_dir}. Wait until that process ends, stop that process, or "
                      "choose another out_dir=")
            try:
                self._lock = lock_folder(out_dir, PATIENCE, in_use, lambda reason: _warn_unprotected(out_dir, reason))
            except OSError as error:     # such as a read-only folder, in which a plan is possible
                _warn_unprotected(out_dir, error.strerror or str(error))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _warn_unprotected(out_dir: Path, reason: str) -> None:
    print(f"files cannot be locked in {out_dir} ({reason}): make sure that no other process trains this run",
          file=sys.stderr)
