"""Checks that an output file can be written, before long work begins."""

import os
from collections.abc import Iterable
from pathlib import Path

from rwkv.errors import UserError

WEIGHTS = (".ckpt", ".pth", ".pt", ".safetensors", ".st", ".bin", ".ggmf", ".gguf")
BESIDE = ("config.json", "config.yaml", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "generation_config.json", "chat_template.jinja", "adapter_config.json", "model.safetensors.index.json",
          "pytorch_model.bin.index.json", "kernel.json", "metrics.csv", "samples.jsonl",
          "report.html")                 # a run, a Hugging Face or a PEFT directory also has these


def require_writable(option: str, file: str | Path | None, read: Iterable[str | Path | None] = ()) -> None:
    """Raises UserError if `file` cannot be written, or if the program also reads it.

    The name - is refused, because prompt=- stands for standard input, so a user would expect standard output.

    Args:
        option: the option that names the file, for error messages.
        read: the files and folders that the program reads; None is ignored.
    """
    if file is None:
        return
    if str(file) == "-":
        raise UserError(f"{option}=- must name a file, because standard output is not supported here")
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {option}={path}: the path is a folder, or the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {option}={path}: you have no permission to write to this file or folder. Choose a "
                        "different file")
    require_other_file(option, path, read)


def require_other_file(option: str, path: Path, read: Iterable[str | Path | None]) -> None:
    """Raises UserError if the program reads the file `path` that it will write. The arguments are as for require_writable."""
    for source in read:
        if source and path.exists() and Path(source).exists() and _is_input(path, Path(source)):
            raise UserError(f"{option}={path} would overwrite a file that this command reads from {source}: choose a "
                            "different file")


def _is_input(path: Path, source: Path) -> bool:
    """Returns True if `path` is the file `source`, or belongs to a checkpoint or run in the folder `source`."""
    if not source.is_dir():
        return path.samefile(source)
    is_content = path.suffix in WEIGHTS or path.name in BESIDE
    return is_content and path.resolve().is_relative_to(source.resolve())
