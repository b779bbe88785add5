"""The token files of Megatron and RWKV-LM, read in place: NAME.bin has the ids end to end, NAME.idx where documents begin.

The .idx, little-endian: 9 bytes, "MMIDIDX" and two zeros; version 1 (8 bytes); the type of the ids (1 byte); the numbers of
sequences S and of document entries D (8 bytes each); lengths of the sequences in ids (S int32); their places in the .bin in
bytes (S int64); the first sequence of each document, and S at the end (D int64). Sources: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py; BlinkDL/RWKV-LM, RWKV-v5/src/binidx.py.

RWKV-LM puts end_of_text at the end of each document, our own shards put it at the beginning. Here a document begins at the
end_of_text before it, if there is one, so that except for the first document the ids are the same.

The first run scans all ids, to refuse ids outside the vocabulary. The result is cached while the size and time of both files do
not change. The ids are never copied.
"""

import hashlib
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from rwkv.data.text_files import stamp, unchanged
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import read_json, sha256, write, write_json
from rwkv.io.lines import counted
from rwkv.io.utf8 import open_file
from rwkv.tokenizer.lost import LossCounter
from rwkv.tokenizer.tokenizers import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34                              # bytes
DTYPES = {1: "uint8", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK = 1 << 22                          # ids scanned at a time
SAMPLE = 1 << 22                         # ids of the validation split that are decoded to estimate its bytes


class Index(NamedTuple):
    """The content of an .idx: dtype of the ids, their number, and the place (D,) of each document's first id, int64."""

    dtype: str
    tokens: int
    starts: np.ndarray


class Tokens(NamedTuple):
    """sha256: of the index and the checksum of the ids. bytes_per_token: bytes of the validation text per predicted token.

    gzip_bpb: bits per byte of `gzip -9` on that text. unknown: the share of its ids that are the unknown token; None if the
    tokenizer's definition shows that it loses nothing.
    """

    train: TokenArray
    val: TokenArray
    documents: int
    sha256: str
    bytes_per_token: float
    gzip_bpb: float
    unknown: float | None


def files(path: str | None) -> tuple[Path, Path]:
    """The paths NAME.bin and NAME.idx, from NAME or either path. Raises UserError if a file is missing."""
    if not path:
        raise UserError("data=binidx needs data.path: NAME, of the files NAME.bin and NAME.idx")
    base = path.removesuffix(".bin").removesuffix(".idx")
    pair = Path(f"{base}.bin"), Path(f"{base}.idx")
    missing = [file.name for file in pair if not file.is_file()]
    if missing:
        raise UserError(f"data.path={path}: there is no {' and no '.join(missing)}; data=binidx needs NAME.bin and NAME.idx")
    return pair


def read(path: str, tokenizer: Tokenizer, val_fraction: float, cache: Path) -> Tokens:
    """The tokens of both splits. Validation has the last documents, with val_fraction of the ids, or a single one's end."""
    bin_file, idx_file = files(path)
    entry, starts = _checked(bin_file, idx_file, tokenizer, cache)
    if entry["largest"] >= tokenizer.vocab_size or entry["smallest"] < 0:
        wrong = entry["smallest"] if entry["smallest"] < 0 else entry["largest"]
        raise UserError(f"{bin_file} has the id {wrong}, and data.tokenizer has the ids 0 to {tokenizer.vocab_size - 1}: "
                        "name the tokenizer that made the ids")
    places = np.load(starts, mmap_mode="r")
    cut, first = _split(places, entry["tokens"], val_fraction, bin_file)
    train = TokenArray([Part(bin_file, entry["dtype"], 0, cut)], DocumentOffsets(starts, 0, first, 0))
    val = TokenArray([Part(bin_file, entry["dtype"], cut, entry["tokens"] - cut)],
                 DocumentOffsets(starts, first, len(places) - first, cut))
    return Tokens(train, val, len(places), entry["sha256"], *_measured(val, tokenizer))


def read_index(path: Path) -> Index:
    """Raises UserError for another kind of file, or a truncated one."""
    with open_file(path) as file:
        data = file.read(HEADER)
    if data[:9] != MAGIC or len(data) < HEADER:
        raise UserError(f"{path} is not the index of a .bin file: it does not begin with MMIDIDX and a header")
    version, code, sequences, documents = (int.from_bytes(data[start:stop], "little")
                                           for start, stop in ((9, 17), (17, 18), (18, 26), (26, 34)))
    if version != 1 or code not in DTYPES:
        raise UserError(f"{path} has version {version} and ids of type {code}: supported are version 1 and the types "
                        f"{', '.join(map(str, DTYPES))} (uint8, int32, int64, uint16)")
    wanted = HEADER + 12 * sequences + 8 * documents
    size = path.stat().st_size
    if size not in (wanted, wanted + sequences):             # Megatron may add a byte for each sequence's mode
        raise UserError(f"{path} has {size} bytes, and {sequences} sequences in {documents} entries need {wanted}: "
                        "it is truncated or damaged")
    return _read_tables(path, DTYPES[code], sequences, documents)


def _read_tables(path: Path, dtype: str, sequences: int, documents: int) -> Index:
    with open_file(path) as file:
        file.seek(HEADER)
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        places = np.fromfile(file, "<i8", sequences)
        firsts = np.fromfile(file, "<i8", documents)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if not np.array_equal(places, begins[:-1] * np.dtype(dtype).itemsize) or (lengths < 0).any():
        raise UserError(f"{path}: its sequences do not lie end to end in the .bin file; it is damaged or foreign")
    if not documents or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(f"{path}: its documents do not go from sequence 0 to sequence {sequences}; it is damaged")
    return Index(dtype, int(begins[-1]), np.unique(begins[firsts[:-1]]))


def _checked(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, cache: Path) -> tuple[dict[str, Any], Path]:
    """The result of the scan, and the file of the places of documents, both from the cache if nothing has changed."""
    key = sha256([str(bin_file.absolute()), str(tokenizer.end_of_text)])[:16]
    cached = cache / f"binidx-{key}.json"
    starts = cache / f"binidx-{key}-starts.npy"
    entry = read_json(cached)
    valid = entry and starts.is_file() and zlib.crc32(starts.read_bytes()) == entry["starts"] and all(
        unchanged(file, {"stamp": entry[name], "time": entry["time"]}) for name, file in (("bin", bin_file), ("idx", idx_file)))
    return entry if entry and valid else _check(bin_file, idx_file, tokenizer, cached, starts), starts


def _check(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, cached: Path, starts: Path) -> dict[str, Any]:
    entry = {"time": time.time_ns(), "bin": stamp(bin_file), "idx": stamp(idx_file)}
    index = read_index(idx_file)
    ids = _require_ids(bin_file, index)
    scanned = _scan(ids)
    write(starts, lambda file: np.save(file, _document_places(ids, index.starts, tokenizer.end_of_text)))
    with open_file(idx_file) as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(scanned.pop("crc32").to_bytes(4, "little"))
    entry |= {"dtype": index.dtype, "tokens": index.tokens, **scanned, "sha256": digest.hexdigest(),
              "starts": zlib.crc32(starts.read_bytes())}
    write_json(cached, entry)
    return entry


def _require_ids(path: Path, index: Index) -> np.ndarray:
    """The ids of the .bin file, memory-mapped. Raises UserError if the file has another size than the index says."""
    wanted = index.tokens * np.dtype(index.dtype).itemsize
    size = path.stat().st_size
    if size != wanted:
        raise UserError(f"{path} has {size} bytes, and by its .idx file it should have {wanted}: the two files do not match")
    if not index.tokens:
        raise UserError(f"{path} is empty")
    return np.memmap(path, index.dtype, "r")


def _scan(ids: np.ndarray) -> dict[str, int]:
    """The smallest and the largest id, and the CRC-32 of all."""
    smallest = largest = int(ids[0])
    crc32 = 0
    with tqdm(total=len(ids), desc="checking ids", unit="", unit_scale=True, delay=2, file=sys.stderr, leave=False) as bar:
        for start in range(0, len(ids), BLOCK):
            block = ids[start:start + BLOCK]
            smallest = min(smallest, int(block.min()))
            largest = max(largest, int(block.max()))
            crc32 = zlib.crc32(block.data, crc32)
            bar.update(BLOCK)
    return {"smallest": smallest, "largest": largest, "crc32": crc32}


def _document_places(ids: np.ndarray, starts: np.ndarray, end_of_text: int) -> np.ndarray:
    """Places where documents begin: at their `starts` in the index, or one id earlier if that id is end_of_text."""
    inner = starts[(starts > 0) & (starts < len(ids))]
    moved = inner - ((ids[inner - 1] == end_of_text) & (ids[inner] != end_of_text))
    return np.unique(np.concatenate([np.zeros(1, np.int64), moved]))


def _split(places: np.ndarray, tokens: int, val_fraction: float, path: Path) -> tuple[int, int]:
    """The place of the validation split's first id, and the number of documents before it."""
    wanted = int(tokens * (1 - val_fraction))
    if len(places) > 1:
        first = int(np.clip(np.searchsorted(places, wanted), 1, len(places) - 1))
        return int(places[first]), first
    if not 0 < wanted < tokens:
        raise UserError(f"{path} has {counted(tokens, 'id')}: too few to split into training and validation")
    return wanted, 1


def _measured(val: TokenArray, tokenizer: Tokenizer) -> tuple[float, float, float | None]:
    """Bytes per predicted token, bits per byte of gzip -9 and the share of unknown tokens, of the split's first SAMPLE ids."""
    ids = val[:SAMPLE]
    counter = LossCounter(tokenizer)
    unknown = None
    if counter.uncertain:
        unknown = 0.0 if counter.unknown_token is None else float((ids == counter.unknown_token).mean())
    text = tokenizer.decode(ids.tolist()).encode()
    return len(text) / max(len(ids) - 1, 1), 8 * len(zlib.compress(text, 9, 31)) / max(len(text), 1), unknown
