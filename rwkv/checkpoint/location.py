"""Finds the checkpoint at a path, or downloads it from the Hub. Needs no PyTorch: programs call it before they import that."""

from pathlib import Path

from rwkv.config import LATEST
from rwkv.errors import CheckpointError
from rwkv.io import hub

FOLDER = "checkpoints"                   # in a run's directory
LAST = Path(FOLDER) / "last.ckpt"


def locate(path: str | Path) -> Path:
    """The checkpoint at a path: a file or Hugging Face directory itself, or the last checkpoint of a run's directory. A name on
    the Hub (rwkv/io/hub.py) is downloaded."""
    path = follow(hub.local(path))
    last = path / LAST
    if path.is_dir() and not any((path / mark).is_file() for mark in hub.MARKS):
        if last.is_file():
            return last
        if runs := sorted(path.glob(f"*/{LAST}")):
            raise CheckpointError(f"{path} is a folder of runs: name one of them, such as {runs[0].parents[1]}")
        raise CheckpointError(f"no checkpoint in {path}: expected {last} of a run, or config.json of a Hugging Face directory")
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: expected a file, a Hugging Face directory, a run's directory, which "
                              "train.py makes, or a name on the Hub, as ORG/REPO/FILE.pth")
    return path


def follow(path: Path) -> Path:
    """The run's directory for runs/latest, which is a link, or a file with one line where making links needs special rights."""
    if path.name == LATEST.name and path.is_file():
        return path.parent / path.read_text(encoding="utf-8").strip()
    return path
