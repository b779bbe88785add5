"""Reads and writes the official .pth, a dictionary of tensors by name, and defines its suffixes.

The dictionary may be nested (DeepSpeed's {"module": ...}, {"model": ...}). Also reads Lightning's layout (ckpt.py).
"""

from pathlib import Path

from rwkv.checkpoint.content import ENTRY, Content, Outgoing
from rwkv.checkpoint.formats import _torch_file, ckpt
from rwkv.checkpoint.formats._torch_file import load, stored_tensors, weights_in
from rwkv.errors import CheckpointError
from rwkv.io.atomic import write_file

SUFFIXES = (".pth",)
STRATEGY = "_strategy"                   # the package rwkv adds this key if it converts a file with convert_and_save_and_exit


def recognises(path: Path) -> bool:
    return _torch_file.recognises(path) and path.suffix != ".ckpt"


def read(path: Path) -> Content:
    content = load(path)
    if STRATEGY in content:
        raise CheckpointError(f"{path} was converted by the package rwkv for the strategy {str(content[STRATEGY])[:60]!r}, "
                              "which changes the weights: pass the .pth that it was converted from")
    if ENTRY in content or isinstance(content.get("state_dict"), dict):
        return ckpt.parse(path, content)
    return Content(path, stored_tensors(path, weights_in(path, content)))


def write(path: Path, outgoing: Outgoing) -> None:
    """Writes only the tensors, because the official layout has no metadata."""
    write_file(path, lambda file: _torch_file.save(file, outgoing.tensors))
