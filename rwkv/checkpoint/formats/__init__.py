"""Defines the file formats for weights. Each module is one format and names the suffixes that stand for it.

    pth           a file written by torch.save: the official .pth, zipped or not, with time_mix [1,1,C] or [C], and any prefix
    ckpt          this program's Lightning checkpoint: weights, and the entry `timemix` with the configuration and the tokenizer
    safetensors   weights by official name, and the entry `timemix` in the metadata
    st            .safetensors for web-rwkv and ai00: float16, with transposed low-rank matrices
    huggingface   a directory with config.json, weights by transformers' or fla's names, and the tokenizer
    ggmf          rwkv.cpp's format, FP32 and FP16; time_decay is stored as -exp(time_decay)
    gguf          llama.cpp's format, also quantised, with the tokenizer; RWKV-7 only

A format module has SUFFIXES ("": a directory), recognises(path), read(path) -> Content and write(path, Outgoing). If the format
restricts dtypes, the module also has dtype_for(tensor, group, dtype); group is what the generation's group() returns for the
tensor's name. The generation (rwkv/checkpoint/rwkvN.py) defines the names and layouts of a format's tensors. Reading detects
the format from the content, and writing chooses it by the suffix. Modules named _NAME are shared by several formats. This file
does not import PyTorch.
"""

import ast
import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

from rwkv.errors import CheckpointError, UserError
from rwkv.io import hub
from rwkv.io.utf8 import LFS, LFS_POINTER

QUANTISED = {"gguf": ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"), "safetensors": ("int8", "int4")}     # block formats
LAYOUTS = ("fla", "official", "transformers-rwkv")       # layouts of RWKV-7's Hugging Face directories
TEXT = frozenset(b"\t\n\r") | frozenset(range(32, 127))
BYTES_SHOWN = 16                         # bytes that an error shows of an unknown file; no format begins with 16 bytes of TEXT
# For the first bytes of files that are not checkpoints: what such a file is, and what to do
NOT_WEIGHTS = {
    LFS: LFS_POINTER,
    b"# xet version": "a Xet pointer, not the file itself: fetch the file with git xet, or download the file",
    b"<!doctype html": "a web page, not the file: download the file", b"<html": "a web page, not the file: download the file",
    b"\x1f\x8b": "compressed with gzip: decompress the file", b"7z\xbc\xaf": "a 7z archive: unpack the archive",
    b"Rar!": "a RAR archive: unpack the archive", b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress the file"}


def names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def load(name: str) -> ModuleType:
    """Returns the module of a format. Raises UserError for an unknown name."""
    if name not in names():
        raise UserError(f"the format must be one of {', '.join(names())}; got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def recognise(path: Path) -> ModuleType:
    """Returns the format module of an existing file or directory. Raises CheckpointError for an unknown format."""
    require_no_pointer(path)
    if path.is_file() and len(start := first_bytes(path, BYTES_SHOWN)) >= 8 and TEXT.issuperset(start):
        is_part = path.suffix == ".json" and any((path.parent / mark).is_file() for mark in hub.MARKS)
        remedy = f". Pass the directory, {path.parent}" if is_part else ""
        raise CheckpointError(f"{path} is a text file that begins with {start!r}: expected a file with weights{remedy}")
    for format in map(load, names()):
        if format.recognises(path):
            return format
    if path.is_dir():
        raise CheckpointError(f"{path} contains no checkpoint: expected a Hugging Face directory with a config.json")
    start = first_bytes(path, BYTES_SHOWN)
    content = f"the file begins with {start!r}" if start else "the file is empty (0 bytes). The copy may have been interrupted"
    raise CheckpointError(f"{path} cannot be read as a checkpoint: {content}. Expected a file in one of these formats: "
                          "torch.save, .safetensors, ggmf (rwkv.cpp) or GGUF")


def require_no_pointer(path: Path) -> None:
    """Raises CheckpointError if the path is a Git LFS or Xet pointer, a web page or an archive."""
    if path.is_file():
        start = first_bytes(path, 2 * BYTES_SHOWN).lstrip().lower()
        for prefix, kind in NOT_WEIGHTS.items():
            if start.startswith(prefix.lower()):
                raise CheckpointError(f"{path} is {kind}")


@cache
def suffixes() -> dict[str, str]:
    """Maps each suffix to its format. Reads SUFFIXES from the modules' source, because importing them would import PyTorch."""
    result: dict[str, str] = {}
    for name in names():
        source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        stated = next(node.value for node in ast.parse(source).body
                      if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUFFIXES")
        result |= dict.fromkeys(ast.literal_eval(stated), name)
    return result


def by_suffix(path: Path) -> str:
    """Returns the name of the format that a path's suffix stands for. Raises UserError for an unknown suffix."""
    suffix = "" if path.is_dir() else path.suffix
    if suffix not in suffixes():
        known = ", ".join(suffix or "no suffix" for suffix in suffixes())
        raise UserError(f"{path.name} must have a suffix that implies a format ({known}). With any other suffix, name the "
                        f"format ({', '.join(names())})")
    return suffixes()[suffix]


def first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
