"""Reads the token files of other programs in place. There is one module per kind of data, with the NAME of data=NAME.

Each kind consists of one or several files of ids with an index of the documents. RWKV-LM and datatrove put end_of_text after
each document, but this program's own shards put end_of_text before each document. Here a document begins at the end_of_text
before it, if there is one. So documents have the same ids as in this program's shards, except for the first document of a file.

The first run scans all ids, to reject ids outside the vocabulary. The result is cached until the size or the modification time
of a file changes. The ids are never copied. Each module has a function files(path) -> list[TokenFile].
"""

import hashlib
import importlib
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from rwkv.config import DataConfig
from rwkv.data.files import crc32, is_unchanged, size_and_mtime
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import read_json, sha256, write, write_json
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of
from rwkv.io.utf8 import open_file, require_no_pointer
from rwkv.tokenizer.lost_bytes import LossCounter
from rwkv.tokenizer.tokenizers import Tokenizer

VERSION = "2"                            # version of the cache files' format
BLOCK = 1 << 22                          # number of ids to scan at a time
SAMPLE = 1 << 22                         # number of validation ids to decode, to estimate the split's bytes


class Index(NamedTuple):
    """The content of an index file: the dtype and the number of the ids, and where each document begins.

    `starts` (D,) int64 contains the offset of each document's first id.
    """

    dtype: str
    tokens: int
    starts: np.ndarray


class TokenFile(NamedTuple):
    """A file of ids and its index.

    `kind` is the value of data=, and `tokenizer` the name of the tokenizer that made the ids; "" if the files do not say.
    """

    kind: str
    ids: Path
    index_file: Path
    read_index: Callable[[], Index]
    tokenizer: str = ""


class Tokens(NamedTuple):
    """The tokens of both splits, as read() returns them.

    Attributes:
        sha256: a hash of the index and of the checksum of the ids.
        bytes_per_token: the bytes of validation text per predicted token.
        gzip_bpb: the bits per byte of `gzip -9` on the validation text.
        unknown: the fraction of validation ids that are the unknown token; None if the tokenizer certainly loses nothing.
        copies: the number of documents that equal an earlier document.
    """

    train: TokenArray
    val: TokenArray
    documents: int
    sha256: str
    bytes_per_token: float
    gzip_bpb: float
    unknown: float | None
    copies: int


class Places(NamedTuple):
    """The paths of two files: the offsets of the documents (D,) int64, and their hashes (D,) uint64."""

    starts: Path
    hashes: Path


def open_files(config: DataConfig) -> list[TokenFile]:
    """Finds the files that data.name and data.path name. Raises UserError if a file is missing or is a Git LFS pointer."""
    files: list[TokenFile] = importlib.import_module(f"{__name__}.{config.name}").files(config.path)
    for file in files:
        require_no_pointer(file.ids)
        require_no_pointer(file.index_file)
    return files


def read(files: Sequence[TokenFile], tokenizer: Tokenizer, val_fraction: float, cache: Path) -> Tokens:
    """Reads the tokens and splits them. Validation gets the last documents, or the end of a single document.

    The validation documents have `val_fraction` of the ids. If a document would have copies in both splits, validation gets
    the smallest number of last documents that, with all their copies, have `val_fraction` of the ids.
    """
    entries, arrays, hashes = [], [], []
    for file in files:
        entry, places = _read_or_scan(file, tokenizer, cache)
        _require_ids_in_vocabulary(file.ids, entry, tokenizer)
        entries.append(entry)
        hashes.append(np.load(places.hashes))
        arrays.append(TokenArray([Part(file.ids, entry["dtype"], 0, entry["tokens"])],
                                 DocumentOffsets(places.starts, 0, len(hashes[-1]), 0)))
    whole = TokenArray.concatenate(arrays)
    digest = entries[0]["sha256"] if len(entries) == 1 else sha256(entry["sha256"] for entry in entries)
    starts = whole.starts
    cut, first = _validation_start(starts, len(whole), val_fraction, files[0].ids)
    _, group = np.unique(np.concatenate(hashes), return_inverse=True)
    copies = len(starts) - 1 - int(group.max())
    plain = np.arange(len(starts)) >= first
    in_val = _join_copies(group, np.diff(starts, append=len(whole)), plain, val_fraction) if copies else plain
    train, val = whole.between(0, cut), whole.between(cut, len(whole))
    if (in_val != plain).any():
        train, val = (_select(whole, in_val == is_val, cache / f"{files[0].kind}-{digest[:12]}-{val_fraction}-{split}.npy")
                      for is_val, split in ((False, "train"), (True, "val")))
    return Tokens(train, val, len(starts), digest, *_measure(val, tokenizer), copies)


def _require_ids_in_vocabulary(path: Path, entry: JsonObject, tokenizer: Tokenizer) -> None:
    if entry["largest"] >= tokenizer.vocab_size or entry["smallest"] < 0:
        invalid = entry["smallest"] if entry["smallest"] < 0 else entry["largest"]
        raise UserError(f"{path} contains the id {invalid}, but data.tokenizer has only the ids 0 to "
                        f"{tokenizer.vocab_size - 1}. Pass the tokenizer that made the ids")


def _join_copies(group: np.ndarray, lengths: np.ndarray, plain: np.ndarray, val_fraction: float) -> np.ndarray:
    """Returns for each document (D,) whether it is for validation, such that equal documents are in the same split.

    Args:
        group (D,): a number that equal documents share.
        lengths (D,): the lengths of the documents in ids.
        plain (D,): the split that ignores copies. `plain` is returned if all equal documents are already in the same split.
    """
    groups = int(group.max()) + 1
    in_val = np.bincount(group, plain, groups)
    if groups == 1 or not ((in_val > 0) & (in_val < np.bincount(group))).any():
        return plain
    last = np.zeros(groups, np.int64)
    np.maximum.at(last, group, np.arange(len(group)))
    sizes = np.bincount(group, lengths, groups)
    target = val_fraction * lengths.sum()
    order = np.lexsort((-last, sizes > target))          # documents whose copies exceed the whole validation split come last
    count = int(np.clip(np.searchsorted(np.cumsum(sizes[order]), target) + 1, 1, groups - 1))
    chosen = np.zeros(groups, bool)
    chosen[order[:count]] = True
    return chosen[group]


def _select(whole: TokenArray, selected: np.ndarray, starts: Path) -> TokenArray:
    """Returns the tokens of the documents for which `selected` (D,) is true, and writes their offsets to the file `starts`."""
    lengths = np.diff(whole.bounds)
    begins = np.cumsum(np.append(0, lengths[selected]))[:-1]
    _save_if_changed(starts, begins)
    edges = np.flatnonzero(np.diff(selected.astype(np.int8), prepend=0, append=0))     # bounds of runs of selected documents
    runs = whole.bounds[edges].reshape(-1, 2).tolist()
    parts = [part for begin, end in runs for part in whole.between(begin, end).parts]
    return TokenArray(parts, DocumentOffsets(starts, 0, len(begins), 0))


def _read_or_scan(file: TokenFile, tokenizer: Tokenizer, cache: Path) -> tuple[JsonObject, Places]:
    """Returns the result of scanning a file and the paths of its offsets and hashes, from the cache if nothing has changed."""
    key = sha256([VERSION, str(file.ids.absolute()), str(tokenizer.end_of_text)])[:16]
    cached = cache / f"{file.kind}-{key}.json"
    places = Places(cache / f"{file.kind}-{key}-starts.npy", cache / f"{file.kind}-{key}-hashes.npy")
    entry = read_json(cached)
    sources = (("bin", file.ids), ("idx", file.index_file))
    valid = entry and all(path.is_file() for path in places) and _checksums(places) == entry["places"] and all(
        is_unchanged(path, {"stamp": entry[name], "time": entry["time"]}) for name, path in sources)
    return entry if entry and valid else _scan_file(file, tokenizer, cached, places), places


def _checksums(places: Places) -> list[int]:
    return [crc32(path) for path in places]


def _scan_file(file: TokenFile, tokenizer: Tokenizer, cached: Path, places: Places) -> JsonObject:
    entry = {"time": time.time_ns(), "bin": size_and_mtime(file.ids), "idx": size_and_mtime(file.index_file)}
    index = file.read_index()
    ids = _map_ids(file, index)
    scanned = _scan_ids(ids)
    starts = _document_offsets(ids, index.starts, tokenizer.end_of_text)
    _save_if_changed(places.starts, starts)
    _save_if_changed(places.hashes, _document_hashes(ids, starts, tokenizer.end_of_text))
    with open_file(file.index_file) as opened:
        digest = hashlib.file_digest(opened, "sha256")
    digest.update(scanned.pop("crc32").to_bytes(4, "little"))
    entry |= {"dtype": index.dtype, "tokens": index.tokens, **scanned, "sha256": digest.hexdigest(),
              "places": _checksums(places)}
    with suppress(UserError):            # a cache that cannot be written may still contain the files in `places`
        write_json(cached, entry)
    return entry


def _save_if_changed(path: Path, array: np.ndarray) -> None:
    try:
        same = np.array_equal(np.load(path), array)
    except (OSError, ValueError, EOFError):              # the file is missing or damaged
        same = False
    if not same:
        write(path, lambda file: np.save(file, array))


def _document_hashes(ids: np.ndarray, starts: np.ndarray, end_of_text: int) -> np.ndarray:
    """Returns the 64-bit hash of each document's ids, without end_of_text at both ends: (D,) uint64."""
    hashes = np.empty(len(starts), np.uint64)
    plain = np.asarray(ids)              # a plain array is faster to slice than a memmap
    ends = [*starts[1:].tolist(), len(ids)]
    with tqdm(total=len(starts), desc="comparing documents", unit="", delay=2, file=sys.stderr, leave=False) as bar:
        for number, (begin, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            while begin < end and plain[begin] == end_of_text:
                begin += 1
            while begin < end and plain[end - 1] == end_of_text:
                end -= 1
            digest = hashlib.blake2b(plain[begin:end].tobytes(), digest_size=8).digest()
            hashes[number] = int.from_bytes(digest)
            bar.update()
    return hashes


def _map_ids(file: TokenFile, index: Index) -> np.ndarray:
    expected = index.tokens * np.dtype(index.dtype).itemsize
    size = file.ids.stat().st_size
    if size != expected:
        raise UserError(f"{file.ids} and the index {file.index_file.name} do not match: according to the index, the file must "
                        f"have {expected} bytes; got {size}")
    if not index.tokens:
        raise UserError(f"{file.ids} is empty")
    return np.memmap(file.ids, index.dtype, "r")


def _scan_ids(ids: np.ndarray) -> dict[str, int]:
    smallest = largest = int(ids[0])
    checksum = 0
    with tqdm(total=len(ids), desc="checking ids", unit="", unit_scale=True, delay=2, file=sys.stderr, leave=False) as bar:
        for start in range(0, len(ids), BLOCK):
            block = ids[start:start + BLOCK]
            smallest = min(smallest, int(block.min()))
            largest = max(largest, int(block.max()))
            checksum = zlib.crc32(block.data, checksum)
            bar.update(BLOCK)
    return {"smallest": smallest, "largest": largest, "crc32": checksum}


def _document_offsets(ids: np.ndarray, starts: np.ndarray, end_of_text: int) -> np.ndarray:
    """Returns the offsets of documents: `starts` from the index, or one id earlier if the earlier id is end_of_text."""
    inner = starts[(starts > 0) & (starts < len(ids))]
    moved = inner - ((ids[inner - 1] == end_of_text) & (ids[inner] != end_of_text))
    return np.unique(np.concatenate([np.zeros(1, np.int64), moved]))


def _validation_start(places: np.ndarray, tokens: int, val_fraction: float, path: Path) -> tuple[int, int]:
    """Returns the offset of the first validation id, and the number of documents before it."""
    target = int(tokens * (1 - val_fraction))
    if len(places) > 1:
        first = int(np.clip(np.searchsorted(places, target), 1, len(places) - 1))
        return int(places[first]), first
    if not 0 < target < tokens:
        raise UserError(f"{path} is too short to split into training and validation: it has {count_of(tokens, 'id')}. Use a "
                        "longer file")
    return target, 1


def _measure(val: TokenArray, tokenizer: Tokenizer) -> tuple[float, float, float | None]:
    """Measures the first SAMPLE ids: bytes per predicted token, bits per byte of gzip -9, and fraction of unknown tokens."""
    ids = val[:SAMPLE]
    counter = LossCounter(tokenizer)
    unknown = None
    if counter.uncertain:
        unknown = 0.0 if counter.unknown_token is None else float((ids == counter.unknown_token).mean())
    text = tokenizer.decode_bytes(ids[1:].tolist())      # the first id is not predicted
    return len(text) / max(len(ids) - 1, 1), 8 * len(zlib.compress(text, 9, 31)) / max(len(text), 1), unknown
