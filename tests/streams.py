"""Streams of tokens whose files are given arrays."""

from pathlib import Path

import numpy as np

from rwkv.data.token_array import Part, Starts, Stream


def stream_of(folder: Path, *parts: np.ndarray) -> Stream:
    """A stream whose files are these arrays, and whose documents begin with them."""
    for number, part in enumerate(parts):
        part.tofile(folder / f"{number}.ids")
    np.save(folder / "starts.npy", np.cumsum([0, *map(len, parts)])[:-1])
    return Stream([Part(folder / f"{number}.ids", part.dtype.name, 0, len(part)) for number, part in enumerate(parts)],
                  Starts(folder / "starts.npy", 0, len(parts), 0))
