"""Locks and lists the folder states_dir=, which several servers may share, and deletes what killed servers left unfinished.

Servers read only files with names that a server writes.
"""

import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from rwkv.errors import UserError
from rwkv.io.locked import lock_folder
from rwkv.serving.log import say

STATE = re.compile(r"(state_[0-9a-f]{32})\.safetensors")
RESPONSE = re.compile(r"(resp_[0-9a-f]{32})\.json")
UNFINISHED = re.compile(r"\.(state_[0-9a-f]{32}\.safetensors|resp_[0-9a-f]{32}\.json)\.\d+")      # as in rwkv/io/atomic.py


def claim(folder: Path) -> FileLock | None:
    """Locks the folder, which is created if necessary. Raises UserError if the folder cannot be used.

    The server with the lock deletes files that a killed server left unfinished. Returns the lock, which holds until it is
    released or garbage-collected, or None if another server has the lock or if files cannot be locked.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = lock_folder(folder, 0, "in use", lambda reason: say("states", f"files cannot be locked in {folder} ({reason})"))
        if lock is not None:
            for path in folder.iterdir():
                if UNFINISHED.fullmatch(path.name) and path.is_file():
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"states_dir={folder} cannot be used: {error.strerror}") from None
    except UserError:                    # another server has the lock
        say("states", f"another server uses states_dir={folder}: each server sees the states of both")
        return None
    return lock


def files_in(folder: Path, name: re.Pattern[str], subject: str, among: Iterable[str]) -> Iterator[tuple[Path, int]]:
    """Yields (path, size in bytes) of each file whose name matches `name`, the least recently used first.

    Args:
        subject: the subject of log lines about skipped folders, pipes and broken links.
        among: the file names to look at.
    """
    files = []
    for path in (folder / file_name for file_name in among):
        if not name.fullmatch(path.name):
            continue
        try:
            status = path.stat()
            reason = "" if stat.S_ISREG(status.st_mode) else "not a regular file"
        except OSError as error:         # stat fails for a broken link
            reason = str(error.strerror)
        if reason:
            say(subject, f"skipped {path}: {reason}")
        else:
            files.append((status.st_mtime, path, status.st_size))
    for _, path, size in sorted(files):
        yield path, size
