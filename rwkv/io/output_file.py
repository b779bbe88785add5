"""Checks that an output file can be written, before long work begins."""

import os
from collections.abc import Iterable
from pathlib import Path

from rwkv.errors import UserError

WEIGHTS = (".ckpt", ".pth", ".safetensors", ".bin", ".gguf")
BESIDE = ("config.json", "config.yaml", "tokenizer.json", "tokenizer_config.json", "kernel.json", "metrics.csv",
          "samples.jsonl", "report.html")                # files in the directory of a run or of a Hugging Face checkpoint


def require_writable(option: str, file: str | Path | None, read: Iterable[str | Path | None] = ()) -> None:
    """Raises UserError where `file` cannot be written, or where the program also reads it.

    option: the option that names the file, for the message. read: files and folders that the program reads; None is skipped.
    """
    if file is None:
        return
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {option}={path}: it is a folder, or there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {option}={path}: it, or its folder, is not writable for this user; name another")
    for one in read:
        if one and path.exists() and Path(one).exists() and _is_or_holds(Path(one), path):
            raise UserError(f"{option}={path} would replace what this command reads from {one}: name another file")


def _is_or_holds(read: Path, path: Path) -> bool:
    """Whether `path` is the file `read`, or a file of a checkpoint or run in the folder `read`."""
    if not read.is_dir():
        return path.samefile(read)
    belongs = path.suffix in WEIGHTS or path.name in BESIDE
    return belongs and path.resolve().is_relative_to(read.resolve())
