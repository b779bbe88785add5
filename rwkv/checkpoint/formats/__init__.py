"""Files of weights: one module per format; the folder is the registry.

    pth           what torch.save writes: the official .pth, with or without zip, time_mix [1,1,C] or [C], any prefix
    ckpt          our Lightning checkpoint: weights, and the entry `timemix` with the configuration and the tokenizer
    safetensors   weights by official names; the same entry in the metadata
    huggingface   a directory of config.json, weights by transformers' or fla's names, and the tokenizer
    ggmf          rwkv.cpp's, FP32 and FP16; time_decay is stored as -exp(raw)
    gguf          llama.cpp's, quantised ones too, with the tokenizer; RWKV-7 alone

A format module has SUFFIXES, recognises(path), read(path) -> Content and write(path, Outgoing); where it cannot hold every
tensor in every dtype, dtype_for(tensor, group, dtype), group being the generation's for the tensor's name; and where it has
block formats, QUANTISED. How a format names and arranges tensors is their generation's to say (rwkv/checkpoint/rwkvN.py).
The content of a file decides how it is read, the suffix of a name which format is written.
Modules that begin with _ are shared.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from rwkv.errors import CheckpointError, UserError

BYTES_SHOWN = 16                         # in the message about a file of no known format


def names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def load(name: str) -> ModuleType:
    """The module of a format. Raises UserError for an unknown name."""
    if name not in names():
        raise UserError(f"there is no format {name!r}: choose one of {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def quantised() -> dict[str, tuple[str, ...]]:
    """The block formats of each format that has any."""
    return {name: blocks for name in names() if (blocks := getattr(load(name), "QUANTISED", ()))}


def recognise(path: Path) -> ModuleType:
    """The format of an existing file or directory. Raises CheckpointError where it has none of these."""
    for format in map(load, names()):
        if format.recognises(path):
            return format
    if path.is_dir():
        raise CheckpointError(f"{path} holds no checkpoint: expected a config.json as Hugging Face's directories have")
    start = first_bytes(path, BYTES_SHOWN)
    found = f"begins with {start!r}" if start else "is empty (0 bytes), as an interrupted copy or download leaves it"
    raise CheckpointError(f"{path} cannot be read as a checkpoint: it {found}; expected a file of torch.save, .safetensors, "
                          "rwkv.cpp's ggmf, or GGUF")


def by_suffix(path: Path) -> ModuleType:
    """The format that a path's suffix chooses. Raises UserError for another suffix."""
    suffix = "" if path.is_dir() else path.suffix
    for format in map(load, names()):
        if suffix in format.SUFFIXES:
            return format
    known = ", ".join(suffix or "no suffix" for name in names() for suffix in load(name).SUFFIXES)
    raise UserError(f"{path.name} does not say its format: choose one of these suffixes ({known}), or name a format "
                    f"({', '.join(names())})")


def first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
