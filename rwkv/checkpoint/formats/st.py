"""Writes .st, which is .safetensors for web-rwkv and ai00: all tensors are float16; w1 .. g2 and tuned states are transposed.

The names are the official ones. Reading is the same as for .safetensors, because the shapes of w1 .. g2 show that they are
transposed. The file has no entry `timemix`.

Source: web-rwkv, assets/scripts/convert_safetensors.py, and src/runtime/loader.rs, which reads only float16.
"""

from pathlib import Path

import torch

from rwkv.checkpoint.content import Outgoing
from rwkv.checkpoint.formats.safetensors import read, recognises, write_tensors
from rwkv.checkpoint.generations import generation_of
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.errors import UserError
from rwkv.io.atomic import write_file

SUFFIXES = (".st",)

__all__ = ["dtype_for", "read", "recognises", "write"]


def dtype_for(tensor: Stored, group: str, dtype: str | None) -> torch.dtype:
    """Returns float16. Raises UserError if `dtype` is a different one."""
    if dtype not in (None, "float16"):
        raise UserError(f"the dtype of a .st file must be float16, as web-rwkv requires; got {dtype}")
    return torch.float16


def write(path: Path, outgoing: Outgoing) -> None:
    """Writes the file. Raises UserError for RWKV-7a, which web-rwkv cannot run."""
    tensors = generation_of(outgoing.config).to_format_layout(outgoing.tensors, "st")
    write_file(path, lambda file: write_tensors(file, tensors.values(), {}))
