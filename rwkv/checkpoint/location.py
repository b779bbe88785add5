"""Finds the checkpoint at a path, or downloads it from the Hub. Does not import PyTorch, so that programs can call it first."""

import re
import sys
from functools import cache
from pathlib import Path

from rwkv.config import LATEST
from rwkv.errors import CheckpointError
from rwkv.io import hub

ADAPTER = "adapter_config.json"          # PEFT's
WEIGHT_SUFFIXES = (*hub.WEIGHTS, ".pt")         # suffixes of files with weights
FOLDER = "checkpoints"                   # the folder in a run's directory
LAST = Path(FOLDER) / "last.ckpt"
COMPLETE = "complete.json"               # a file in checkpoints of trainer=fsdp, which are folders (formats/_fsdp_folder.py)


def locate(path: str | Path) -> Path:
    """The path of a checkpoint: a file or Hugging Face directory itself, or the last checkpoint in a run's directory.

    A name on the Hub is downloaded (rwkv/io/hub.py).
    """
    path = follow(hub.local(path))
    last = path / LAST
    if path.is_dir() and not is_sharded(path) and not any((path / mark).is_file() for mark in hub.MARKS):
        if is_checkpoint(last):
            return last
        if runs := sorted(path.glob(f"*/{LAST}")):
            raise CheckpointError(f"{path} is a folder of runs: name one of them, such as {runs[0].parents[1]}")
        return _single_file(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: expected a file, a Hugging Face directory, a run of train.py, or a "
                              "name on the Hub such as ORG/REPO/FILE.pth")
    return path


def is_sharded(path: Path) -> bool:
    """Whether the path is a complete checkpoint of trainer=fsdp."""
    return (path / COMPLETE).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether the path is a file or a checkpoint of trainer=fsdp."""
    return path.is_file() or is_sharded(path)


def _single_file(folder: Path) -> Path:
    """The only file with weights in a folder, or the first part of a split GGUF."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in WEIGHT_SUFFIXES and file.is_file()
             and not re.search(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4]) + (", ..." if files[4:] else "")
        raise CheckpointError(f"{folder} contains {len(files)} files with weights: name one of them ({names})")
    raise CheckpointError(f"no checkpoint in {folder}: expected a run's {folder / LAST}, a Hugging Face directory's "
                          "config.json, or one file with weights")


def follow(path: Path) -> Path:
    """The run that runs/latest points to; any other path is returned unchanged.

    runs/latest is a link, or a file with the run's name where creating links requires special rights. If the run no longer
    exists, the most recently trained run in the folder is used instead, and standard error reports it.
    """
    if path.name != LATEST.name:
        return path
    target = path.parent / path.read_text(encoding="utf-8").strip() if path.is_file() else path
    if target.exists():
        return target
    newest = _newest_run(path.parent)
    if newest is None:
        return path
    _report_replacement(path, newest)
    return newest


def _newest_run(folder: Path) -> Path | None:
    """The run in a folder, or in a sweep in it, that saved its last checkpoint most recently; None if no run has one."""
    saved = [*folder.glob(f"*/{LAST}"), *folder.glob(f"*/*/{LAST}")]
    return max(saved, key=lambda last: last.stat().st_mtime_ns).parents[1] if saved else None


@cache
def _report_replacement(link: Path, run: Path) -> None:
    print(f"{link} names a run that no longer exists: using {run}, the newest", file=sys.stderr, flush=True)
