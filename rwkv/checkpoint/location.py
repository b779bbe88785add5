"""Find the checkpoint at a path, or download it from the Hub. Does not import PyTorch: programs call it before they do."""

import re
import sys
from functools import cache
from pathlib import Path

from rwkv.config import LATEST
from rwkv.errors import CheckpointError
from rwkv.io import hub

ADAPTER = "adapter_config.json"          # of PEFT
WEIGHT_SUFFIXES = (*hub.WEIGHTS, ".pt")         # of files of weights
FOLDER = "checkpoints"                   # in a run's directory
LAST = Path(FOLDER) / "last.ckpt"
COMPLETE = "complete.json"               # in the folder that is a checkpoint of trainer=fsdp: formats/_fsdp_folder.py


def locate(path: str | Path) -> Path:
    """The checkpoint at a path: a file or Hugging Face directory itself, or the last checkpoint of a run's directory.

    Downloads a name on the Hub (rwkv/io/hub.py).
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
    """Whether this is a complete checkpoint of trainer=fsdp."""
    return (path / COMPLETE).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether this is a file, or a checkpoint of trainer=fsdp."""
    return path.is_file() or is_sharded(path)


def _single_file(folder: Path) -> Path:
    """The only file of weights in a folder; for a split GGUF, its first part."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in WEIGHT_SUFFIXES and file.is_file()
             and not re.search(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4]) + (", ..." if files[4:] else "")
        raise CheckpointError(f"{folder} contains {len(files)} files of weights: name one of them ({names})")
    raise CheckpointError(f"no checkpoint in {folder}: expected {folder / LAST} of a run, config.json of a Hugging Face "
                          "directory, or one file of weights")


def follow(path: Path) -> Path:
    """The run's directory for runs/latest: a link, or a file with one line where creating links needs special rights.

    If that run is gone, the most recently trained run beside the link, which is reported on standard error.
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
    """The run with the newest last checkpoint in a folder or in its sweeps; None if no run has one."""
    saved = [*folder.glob(f"*/{LAST}"), *folder.glob(f"*/*/{LAST}")]
    return max(saved, key=lambda last: last.stat().st_mtime_ns).parents[1] if saved else None


@cache
def _report_replacement(link: Path, run: Path) -> None:
    print(f"{link} names a run that no longer exists: using {run}, the newest", file=sys.stderr, flush=True)
