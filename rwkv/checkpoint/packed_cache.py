"""Caches quantised checkpoints in the user's cache folder (cache_packed=true).

    KEY.safetensors     a checkpoint in int8 or int4, as `timemix convert --dtype` writes it
    KEY.json            a sample of that file, and the parts of the checkpoint that .safetensors cannot contain

KEY is the beginning of a SHA-256. The hash covers VERSION, the dtype, and for each of the checkpoint's files the size, the
modification time, a sample and, in a directory, the name. A sample is the hash of a file's first and last MiB and of evenly
spaced blocks between them. A change outside the sample that preserves size and time goes unnoticed. If an entry's sample
differs from the sample in KEY.json, the entry is damaged and is written again. The cache has at most MAX_BYTES; the least
recently used entries are deleted.
"""

import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rwkv.checkpoint.files import Checkpoint, read_checkpoint, write_checkpoint
from rwkv.checkpoint.formats._packed import VERSION
from rwkv.config import BITS
from rwkv.errors import CheckpointError, UserError
from rwkv.io import hub
from rwkv.io.atomic import write_file
from rwkv.io.cache import json_bytes, read_json

MAX_BYTES = 32 * 2**30
ENDS = 2**20                             # a sample covers this many bytes at each end of a file
BLOCKS, BLOCK = 64, 2**16                # the number of blocks between the two ends, and the bytes in each block
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.)")              # this is in the name of each part of a split file
ABANDONED = 24 * 3600                    # an incomplete file is deleted after this many seconds


def folder() -> Path:
    """Returns the cache's folder. Raises UserError for a user without a home directory, as in some containers."""
    try:
        return Path.home() / ".cache" / "timemix" / "packed"
    except RuntimeError:
        raise UserError("cache_packed=true requires a home directory, but this user has none: set HOME to a folder, or omit "
                        "cache_packed=true") from None


def entry_of(path: Path, dtype: str) -> Path:
    """Returns the path of the cached copy, in `dtype`, of the checkpoint at `path`. The file may not exist."""
    digest = hashlib.sha256(f"{VERSION} {dtype}".encode())
    for file in _files_of(path):
        status = file.stat()
        digest.update(f"\n{PART.sub('', file.name) if path.is_dir() else ''} {status.st_size} {status.st_mtime_ns} ".encode())
        digest.update(sample(file).encode())
    return folder() / f"{digest.hexdigest()[:32]}.safetensors"


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    if match := PART.search(path.name):
        return sorted(path.parent.glob(f"{path.name[:match.start()]}-*-of-*{path.suffix}"))
    return [path, path.parent / hub.CONFIG] if hub.has_configuration(path) else [path]


def sample(path: Path) -> str:
    """Returns a hash of a file's size, beginning, end and some blocks between; of the whole content if the file is small."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(ENDS))
        for index in range(1, BLOCKS + 1):
            file.seek(max(file.tell(), size * index // (BLOCKS + 1)))
            digest.update(file.read(BLOCK))
        file.seek(max(file.tell(), size - ENDS))
        digest.update(file.read())
    return digest.hexdigest()


def read(path: Path, dtype: str) -> Checkpoint | None:
    """Reads the cached copy of the checkpoint at `path`. Returns None if the copy is missing or damaged."""
    entry = entry_of(path, dtype)
    about = read_json(entry.with_suffix(".json"))
    try:
        if about is None or about["sample"] != sample(entry):
            return None
        packed = read_checkpoint(entry)
        os.utime(entry)                  # records the time of use
        return replace(packed, path=path, run=about["run"], step=about["step"], notes=about["notes"])
    except (OSError, CheckpointError, KeyError, TypeError):
        return None


def can_hold(checkpoint: Checkpoint) -> bool:
    """Returns True if the cache can contain the checkpoint: it has no adapters and no tuned state."""
    return not (checkpoint.unadapted or checkpoint.adapter_kind or checkpoint.time_states is not None)


def write(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Writes a checkpoint to the cache and returns the checkpoint with the packed weights. Requires can_hold(checkpoint).

    Raises UserError if the file cannot be written.
    """
    entry = entry_of(checkpoint.path, dtype)
    needed = checkpoint.weights.count * BITS[dtype] // 8
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _make_room(needed, entry)
        if (free := shutil.disk_usage(entry.parent).free) < needed:
            raise UserError(f"cache_packed=true requires {needed / 2**30:.1f} GiB in {entry.parent}, but only "
                            f"{free / 2**30:.1f} GiB are free: delete other files, or omit cache_packed=true")
        write_checkpoint(checkpoint, entry, dtype)
        about = {"sample": sample(entry), "run": checkpoint.run, "step": checkpoint.step, "notes": checkpoint.notes}
        write_file(entry.with_suffix(".json"), lambda file: file.write(json_bytes(about)))
    except OSError as error:
        raise UserError(f"cache_packed=true cannot write {entry}: {error.strerror or error}. Omit cache_packed=true") from None
    packed = read_checkpoint(entry)
    return replace(checkpoint, weights=packed.weights, packed=packed.packed, fingerprint=packed.fingerprint)


def _make_room(needed: int, entry: Path) -> None:
    """Deletes incomplete files of killed processes, and the least recently used entries until `needed` bytes fit."""
    used = []
    for file in entry.parent.iterdir():
        with suppress(OSError):          # another process may delete the file first
            status = file.stat()
            if file.name.startswith(".") and time.time() - status.st_mtime > ABANDONED:
                file.unlink()
            elif file.suffix == ".safetensors" and not file.name.startswith(".") and file != entry:
                used.append((status.st_mtime, status.st_size, file))
    total = needed + sum(size for _, size, _ in used)
    for _, size, file in sorted(used):
        if total <= MAX_BYTES:
            return
        with suppress(OSError):          # Windows cannot delete a file that another process has mapped
            file.unlink()
            file.with_suffix(".json").unlink(missing_ok=True)
            total -= size
