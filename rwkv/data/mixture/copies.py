"""Copies of documents across the sources of data=mix: validation omits documents that are in another source's training split.

Documents are copies if they have the same ids apart from end_of_text. They are compared by a 64-bit hash.
"""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from rwkv.data.token_array import TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import sha256, write


def trained_elsewhere(splits: Sequence[tuple[TokenArray, TokenArray]], identities: Sequence[str], end_of_text: int,
                      cache: Path) -> list[np.ndarray]:
    """For each source, a mask (D,): true for its validation documents that are in another source's training split.

    splits: (training, validation) of each source. identities: a string per source that identifies its splits, for the cache.
    """
    hashes = [[_cached(tokens, f"{identity} {number}", end_of_text, cache) for number, tokens in enumerate(both)]
              for both, identity in zip(splits, identities, strict=True)]
    copies = []
    for source, (_, val) in enumerate(hashes):
        others = [train for other, (train, _) in enumerate(hashes) if other != source]
        copies.append(np.isin(val, np.concatenate([np.empty(0, np.uint64), *others])))
    return copies


def without(tokens: TokenArray, left_out: np.ndarray) -> TokenArray:
    """The tokens without the documents for which left_out (D,) is true."""
    bounds = tokens.bounds.tolist()
    edges = np.flatnonzero(np.diff((~left_out).astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
    return TokenArray.joined([tokens.between(bounds[first], bounds[last]) for first, last in edges])


def _cached(tokens: TokenArray, identity: str, end_of_text: int, cache: Path) -> np.ndarray:
    path = cache / f"hashes-{sha256([identity, str(end_of_text)])[:16]}.npy"
    try:
        cached = np.load(path)
        if len(cached) == len(tokens.bounds) - 1:
            return cached
    except (OSError, ValueError, EOFError):              # missing or damaged
        pass
    hashes = document_hashes(tokens, end_of_text)
    with suppress(UserError):            # the cache cannot be written
        write(path, lambda file: np.save(file, hashes))
    return hashes


def document_hashes(tokens: TokenArray, end_of_text: int) -> np.ndarray:
    """The 64-bit hashes (D,) uint64 of the documents' ids."""
    hashes = np.empty(len(tokens.starts), np.uint64)
    for number, (begin, end) in enumerate(pairwise(tokens.bounds.tolist())):
        ids = tokens[begin:end].astype("<i4")
        text = np.flatnonzero(ids != end_of_text)
        content = ids[text[0]:text[-1] + 1] if len(text) else ids[:0]
        hashes[number] = int.from_bytes(blake2b(content.tobytes(), digest_size=8).digest())
    return hashes
