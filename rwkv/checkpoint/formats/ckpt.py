"""Reads and writes this program's .ckpt, a Lightning checkpoint: the weights in state_dict, and the entry `timemix`.

The entry consists of plain containers. With trainer=fsdp a .ckpt is a folder (_fsdp_folder.py).
"""

from dataclasses import replace
from pathlib import Path

from rwkv.checkpoint.content import ENTRY, Content, Outgoing, plain_entry
from rwkv.checkpoint.formats import _fsdp_folder, _torch_file
from rwkv.checkpoint.formats._torch_file import Dictionary, load, stored_tensors, weights_in
from rwkv.errors import CheckpointError
from rwkv.io.atomic import write_file

SUFFIXES = (".ckpt",)
PREFIX = "model."                        # Lightning's prefix for the attribute LanguageModel.model in rwkv/training/task.py


def recognises(path: Path) -> bool:
    return _fsdp_folder.recognises(path) or (_torch_file.recognises(path) and path.suffix == ".ckpt")


def read(path: Path) -> Content:
    if not path.is_dir():
        return parse(path, load(path))
    rest = _fsdp_folder.read_rest(path)
    content = parse(path / _fsdp_folder.REST, {"state_dict": {}} | rest)
    return replace(content, path=path, tensors=content.tensors | _fsdp_folder.weights(path, rest[_fsdp_folder.SHARDED]))


def parse(path: Path, content: Dictionary) -> Content:
    """Parses the dictionary of any Lightning checkpoint, with or without the entry `timemix`, or a dictionary of tensors."""
    entry = plain_entry(path, content[ENTRY]) if ENTRY in content else None
    tensors = content.get("state_dict", {}) if "state_dict" in content or entry else weights_in(path, content)
    step = content.get("global_step", 0)
    if entry is None and not isinstance(step, int):              # another program wrote the file
        step = 0
    if not isinstance(tensors, dict) or not isinstance(step, int):
        raise CheckpointError(f"{path} has a state_dict or a global_step of the wrong type. A newer version of this program "
                              "may have written the file")
    return Content(path, stored_tensors(path, tensors), entry, step=step)


def write(path: Path, outgoing: Outgoing) -> None:
    state_dict = {PREFIX + name: tensor for name, tensor in outgoing.tensors.items()}
    write_file(path, lambda file: _torch_file.save(file, {"state_dict": state_dict, ENTRY: outgoing.entry}))
