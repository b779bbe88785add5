"""Writes the files of data=binidx, a .bin and an .idx, in the layouts of Megatron's and RWKV-LM's writers."""

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write(base: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16", sentences: int = 1,
          modes: bool = False) -> Path:
    """Writes the two files, with each document split into up to `sentences` sequences."""
    parts = [part for document in documents for part in np.array_split(np.array(document, dtype), sentences)]
    places = itertools.accumulate((part.nbytes for part in parts[:-1]), initial=0)
    base.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    base.with_suffix(".idx").write_bytes(b"".join([
        b"MMIDIDX\0\0", struct.pack("<QBQQ", 1, CODES[dtype], len(parts), len(documents) + 1),
        np.array([len(part) for part in parts], np.int32).tobytes(), np.array(list(places), np.int64).tobytes(),
        np.arange(0, len(parts) + 1, sentences, dtype=np.int64).tobytes(), b"\0" * len(parts) * modes]))
    return base
