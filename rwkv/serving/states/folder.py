"""The folder of states_dir=, which servers may share (sharing.py). They read only files that a server may have written."""

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
UNFINISHED = re.compile(r"\.(state_[0-9a-f]{32}\.safetensors|resp_[0-9a-f]{32}\.json)\.\d+")      # rwkv/io/atomic.py's names


def claim(folder: Path) -> FileLock | None:
    """Makes the folder. Its first server locks it until the object is released or deleted, and deletes the unfinished files
    of a killed server; the others get None, as do all where files cannot be locked.

    Raises UserError if the folder cannot be used.
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
        say("states", f"another server uses states_dir={folder}: each sees the states of both")
        return None
    return lock


def files_in(folder: Path, name: re.Pattern[str], subject: str, among: Iterable[str]) -> Iterator[tuple[Path, int]]:
    """The matching files, each with its size in bytes, the least recently used first.

    subject: of the log lines about skipped folders, pipes and broken links.
    """
    files = []
    for path in (folder / file_name for file_name in among):
        if not name.fullmatch(path.name):
            continue
        try:
            status = path.stat()
            reason = "" if stat.S_ISREG(status.st_mode) else "it is not a file"
        except OSError as error:         # a broken link
            reason = str(error.strerror)
        if reason:
            say(subject, f"skipped {path}: {reason}")
        else:
            files.append((status.st_mtime, path, status.st_size))
    for _, path, size in sorted(files):
        yield path, size
