"""Tokens as Megatron and RWKV-LM keep them: NAME.bin, ids end to end, and NAME.idx, where they begin. Read as they are.

The .idx, little-endian: 9 bytes "MMIDIDX" and two of zero; version 1 (8 bytes); the type of the ids (1 byte); the numbers of
sequences S and of document entries D (8 bytes each); lengths of the sequences in ids (S int32); their places in the .bin in
bytes (S int64); the first sequence of each document, and S at the end (D int64). Sources: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py; BlinkDL/RWKV-LM, RWKV-v5/src/binidx.py.

RWKV-LM ends each document with end_of_text, where our own shards begin each with it. The stream of ids is the same, but for
the first document's; a document is taken to begin at the end_of_text before it, where there is one.

The first reading goes through all ids: it refuses those that the vocabulary lacks, and keeps the largest, a checksum and the
places of documents in the cache, as long as size and time of both files stay what they are. The ids are never copied.
"""

import hashlib
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from rwkv.data.sources.files import open_file, stamp, unchanged
from rwkv.data.sources.source import sha256
from rwkv.data.token_array import Part, Starts, Stream
from rwkv.errors import UserError
from rwkv.io.cache import read_json, write, write_json
from rwkv.tokenizer.tokenizers import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34                              # bytes
DTYPES = {1: "uint8", 4: "<i4", 5: "<i8", 8: "<u2"}
AT_ONCE = 1 << 22                        # ids
SAMPLE = 1 << 22                         # ids of the validation split whose text is measured


class Index(NamedTuple):
    """dtype of the ids, their number, and the first id of each document (D,), int64."""

    dtype: str
    tokens: int
    starts: np.ndarray


class Tokens(NamedTuple):
    """sha256: of the index, with the checksum of the ids. bytes_per_token, gzip_bpb: of the validation split's text."""

    train: Stream
    val: Stream
    documents: int
    sha256: str
    bytes_per_token: float
    gzip_bpb: float


def files(path: str) -> tuple[Path, Path]:
    """NAME.bin and NAME.idx, of NAME or of either. Raises ValueError where one is missing."""
    base = path.removesuffix(".bin").removesuffix(".idx")
    pair = Path(f"{base}.bin"), Path(f"{base}.idx")
    missing = [file.name for file in pair if not file.is_file()]
    if missing:
        raise UserError(f"data.path={path}: there is no {' and no '.join(missing)}; data=binidx needs NAME.bin and NAME.idx")
    return pair


def read(path: str, tokenizer: Tokenizer, val_fraction: float, cache: Path) -> Tokens:
    """The last documents that hold val_fraction of the ids, or the last part of a single one, are for validation.

    Raises ValueError where a file is missing, damaged or does not fit the other, and where an id is not the tokenizer's.
    """
    bin_file, idx_file = files(path)
    entry, starts = _checked(bin_file, idx_file, tokenizer, cache)
    if entry["largest"] >= tokenizer.vocab_size or entry["smallest"] < 0:
        wrong = entry["smallest"] if entry["smallest"] < 0 else entry["largest"]
        raise UserError(f"{bin_file} has the id {wrong}, and data.tokenizer has the ids 0 to {tokenizer.vocab_size - 1}: "
                        "name the tokenizer that it was made with")
    places = np.load(starts, mmap_mode="r")
    cut, first = _split(places, entry["tokens"], val_fraction, bin_file)
    train = Stream([Part(bin_file, entry["dtype"], 0, cut)], Starts(starts, 0, first, 0))
    val = Stream([Part(bin_file, entry["dtype"], cut, entry["tokens"] - cut)],
                 Starts(starts, first, len(places) - first, cut))
    return Tokens(train, val, len(places), entry["sha256"], *_measured(val, tokenizer))


def read_index(path: Path) -> Index:
    """Raises ValueError for a file that is something else, or cut off."""
    data, size = _header(path)
    version, code, sequences, documents = (int.from_bytes(data[start:stop], "little")
                                           for start, stop in ((9, 17), (17, 18), (18, 26), (26, 34)))
    if version != 1 or code not in DTYPES:
        raise UserError(f"{path} has version {version} and ids of type {code}: known are version 1 and the types "
                        f"{', '.join(map(str, DTYPES))} (uint8, int32, int64, uint16)")
    wanted = HEADER + 12 * sequences + 8 * documents
    if size not in (wanted, wanted + sequences):             # Megatron may add a byte per sequence, its mode
        raise UserError(f"{path} has {size} bytes, and {sequences} sequences in {documents} entries need {wanted}: "
                        "it is cut off or damaged")
    return _read_tables(path, DTYPES[code], sequences, documents)


def _header(path: Path) -> tuple[bytes, int]:
    with open_file(path) as file:
        data = file.read(HEADER)
    if data[:9] != MAGIC or len(data) < HEADER:
        raise UserError(f"{path} is not the index of a .bin file: it does not begin with MMIDIDX and a header")
    return data, path.stat().st_size


def _read_tables(path: Path, dtype: str, sequences: int, documents: int) -> Index:
    with open_file(path) as file:
        file.seek(HEADER)
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        places = np.fromfile(file, "<i8", sequences)
        firsts = np.fromfile(file, "<i8", documents)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if not np.array_equal(places, begins[:-1] * np.dtype(dtype).itemsize) or (lengths < 0).any():
        raise UserError(f"{path}: its sequences do not lie end to end in the .bin file; it is damaged, or of another program")
    if not documents or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(f"{path}: its documents do not go from sequence 0 to sequence {sequences}; it is damaged")
    return Index(dtype, int(begins[-1]), np.unique(begins[firsts[:-1]]))


def _checked(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, cache: Path) -> tuple[dict[str, Any], Path]:
    """What the first reading finds, and the file with the places of documents; from the cache where nothing has changed."""
    key = sha256([str(bin_file.absolute()), str(tokenizer.end_of_text)])[:16]
    remembered, starts = cache / f"binidx-{key}.json", cache / f"binidx-{key}-starts.npy"
    entry = _remembered(remembered, bin_file, idx_file, starts)
    return entry or _check(bin_file, idx_file, tokenizer, remembered, starts), starts


def _remembered(remembered: Path, bin_file: Path, idx_file: Path, starts: Path) -> dict[str, Any] | None:
    entry = read_json(remembered)
    sound = entry and starts.is_file() and zlib.crc32(starts.read_bytes()) == entry["starts"] and all(
        unchanged(file, {"stamp": entry[name], "time": entry["time"]}) for name, file in (("bin", bin_file), ("idx", idx_file)))
    return entry if sound else None


def _check(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, remembered: Path, starts: Path) -> dict[str, Any]:
    now, stamps = time.time_ns(), {"bin": stamp(bin_file), "idx": stamp(idx_file)}
    index = read_index(idx_file)
    ids = _require_ids(bin_file, index)
    found = _go_through(ids)
    write(starts, lambda file: np.save(file, _openings(ids, index.starts, tokenizer.end_of_text)))
    digest = _sha256(idx_file, found.pop("crc32"))
    entry = {**stamps, "time": now, "dtype": index.dtype, "tokens": index.tokens, **found, "sha256": digest,
             "starts": zlib.crc32(starts.read_bytes())}
    write_json(remembered, entry)
    return entry


def _sha256(idx_file: Path, crc32: int) -> str:
    with open_file(idx_file) as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(crc32.to_bytes(4, "little"))
    return digest.hexdigest()


def _require_ids(path: Path, index: Index) -> np.ndarray:
    """The .bin file, memory-mapped. Raises ValueError where it is not of the size that the index says."""
    wanted, size = index.tokens * np.dtype(index.dtype).itemsize, path.stat().st_size
    if size != wanted:
        raise UserError(f"{path} has {size} bytes, and its .idx file says {wanted}: the two do not belong together")
    if not index.tokens:
        raise UserError(f"{path} is empty")
    return np.memmap(path, index.dtype, "r")


def _go_through(ids: np.ndarray) -> dict[str, int]:
    """The smallest and the largest id, and a checksum of all."""
    smallest, largest, crc32 = int(ids[0]), int(ids[0]), 0
    for block in _blocks(ids):
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
        crc32 = zlib.crc32(block.data, crc32)
    return {"smallest": smallest, "largest": largest, "crc32": crc32}


def _blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    with tqdm(total=len(ids), desc="checking ids", unit="", unit_scale=True, delay=2, file=sys.stderr, leave=False) as bar:
        for start in range(0, len(ids), AT_ONCE):
            yield ids[start:start + AT_ONCE]
            bar.update(AT_ONCE)


def _openings(ids: np.ndarray, starts: np.ndarray, end_of_text: int) -> np.ndarray:
    """Where documents begin: one id earlier than the index says, where that is the end_of_text of the one before."""
    inner = starts[(starts > 0) & (starts < len(ids))]
    moved = inner - ((ids[inner - 1] == end_of_text) & (ids[inner] != end_of_text))
    return np.unique(np.concatenate([np.zeros(1, np.int64), moved]))


def _split(places: np.ndarray, tokens: int, val_fraction: float, path: Path) -> tuple[int, int]:
    """The id that validation begins with, and the number of documents before it."""
    wanted = int(tokens * (1 - val_fraction))
    if len(places) > 1:
        first = int(np.clip(np.searchsorted(places, wanted), 1, len(places) - 1))
        return int(places[first]), first
    if not 0 < wanted < tokens:
        raise UserError(f"{path} has {tokens} ids: too few to split into training and validation")
    return wanted, 1


def _measured(val: Stream, tokenizer: Tokenizer) -> tuple[float, float]:
    """Bytes per predicted token, and bits per byte of gzip -9, of the text that the first ids of the split stand for."""
    ids = val[:SAMPLE]
    text = tokenizer.decode(ids.tolist()).encode()
    return len(text) / max(len(ids) - 1, 1), 8 * len(zlib.compress(text, 9, 31)) / max(len(text), 1)
