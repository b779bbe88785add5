"""Makes token arrays with files written from NumPy arrays."""

from pathlib import Path

import numpy as np

from rwkv.data.token_array import DocumentOffsets, Part, TokenArray


def token_array_of(folder: Path, *parts: np.ndarray) -> TokenArray:
    """Returns a token array with one file per array. Each array begins a document."""
    for number, part in enumerate(parts):
        part.tofile(folder / f"{number}.ids")
    np.save(folder / "starts.npy", np.cumsum([0, *map(len, parts)])[:-1])
    return TokenArray([Part(folder / f"{number}.ids", part.dtype.name, 0, len(part)) for number, part in enumerate(parts)],
                      DocumentOffsets(folder / "starts.npy", 0, len(parts), 0))
