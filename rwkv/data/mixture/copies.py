"""Finds copies of documents in different sources of data=mix.

Validation omits documents that are in another source's training split. Documents are copies if their texts are equal except
for white space (rwkv/data/documents/copies.py). White space is ignored because a text file ends with a newline that the same
text in JSON lines lacks. Documents are compared by a 64-bit hash.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from rwkv.data.documents.copies import fingerprint
from rwkv.data.token_array import TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import sha256, write
from rwkv.tokenizer.tokenizers import Tokenizer

COMPARED = "text"                        # is part of the cache key, because earlier versions hashed ids instead of text
CHUNK = 1 << 16                          # ids decoded at a time


def copies_in_training(splits: Sequence[tuple[TokenArray, TokenArray]], identities: Sequence[str], tokenizer: Tokenizer,
                       cache: Path) -> list[np.ndarray]:
    """Finds the validation documents of each source that are in the training split of another source.

    Returns a mask (D,) per source, which is true for these documents.

    Args:
        splits: the training and the validation split of each source.
        identities: a string per source that identifies its splits in the cache.
    """
    hashes = [[_cached_hashes(tokens, f"{identity} {number}", tokenizer, cache) for number, tokens in enumerate(both)]
              for both, identity in zip(splits, identities, strict=True)]
    copies = []
    for source, (_, val) in enumerate(hashes):
        others = [train for other, (train, _) in enumerate(hashes) if other != source]
        copies.append(np.isin(val, np.concatenate([np.empty(0, np.uint64), *others])))
    return copies


def remove_documents(tokens: TokenArray, left_out: np.ndarray) -> TokenArray:
    """Returns the tokens without the documents for which `left_out` (D,) is true."""
    bounds = tokens.bounds.tolist()
    edges = np.flatnonzero(np.diff((~left_out).astype(np.int8), prepend=0, append=0)).reshape(-1, 2).tolist()
    return TokenArray.concatenate([tokens.between(bounds[first], bounds[last]) for first, last in edges])


def _cached_hashes(tokens: TokenArray, identity: str, tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    path = cache / f"hashes-{sha256([identity, str(tokenizer.end_of_text), COMPARED])[:16]}.npy"
    try:
        cached = np.load(path)
        if len(cached) == len(tokens.bounds) - 1:
            return cached
    except (OSError, ValueError, EOFError):              # the file is missing or damaged
        pass
    hashes = document_hashes(tokens, tokenizer)
    with suppress(UserError):            # a cache that cannot be written only makes the next run slower
        write(path, lambda file: np.save(file, hashes))
    return hashes


def document_hashes(tokens: TokenArray, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the 64-bit hash of each document's text: (D,) uint64."""
    hashes = np.empty(len(tokens.starts), np.uint64)
    for number, (begin, end) in enumerate(pairwise(tokens.bounds.tolist())):
        hashes[number] = fingerprint(decode_chunks(tokens, begin, end, tokenizer))
    return hashes


def decode_chunks(tokens: TokenArray, begin: int, end: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of the ids [begin, end) in chunks, without end_of_text."""
    decoder = tokenizer.decoder()
    for start in range(begin, end, CHUNK):
        ids = tokens[start:min(start + CHUNK, end)]
        yield "".join(map(decoder.push, ids[ids != tokenizer.end_of_text].tolist()))
    yield decoder.flush()
