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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from rwkv.data.text_files import crc32, stamp, unchanged
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import read_json, sha256, write, write_json
from rwkv.io.lines import counted
from rwkv.io.utf8 import open_file
from rwkv.tokenizer.lost import LossCounter
from rwkv.tokenizer.tokenizers import Tokenizer

VERSION = "2"                            # of the files in the cache
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
    tokenizer's definition shows that it loses nothing. copies: the number of documents that repeat an earlier one; moved: of
    those that are in another split than without copies.
    """

    train: TokenArray
    val: TokenArray
    documents: int
    sha256: str
    bytes_per_token: float
    gzip_bpb: float
    unknown: float | None
    copies: int
    moved: int


class Places(NamedTuple):
    """Files of the place where each document begins (D,) int64, and of the documents' hashes (D,) uint64."""

    starts: Path
    hashes: Path


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
    """The tokens of both splits. Validation has the last documents, with val_fraction of the ids, or a single one's end.

    If a document has copies in both splits, validation has the fewest of the last documents that, with all their copies, have
    val_fraction of the ids.
    """
    bin_file, idx_file = files(path)
    entry, files_of_places = _checked(bin_file, idx_file, tokenizer, cache)
    if entry["largest"] >= tokenizer.vocab_size or entry["smallest"] < 0:
        wrong = entry["smallest"] if entry["smallest"] < 0 else entry["largest"]
        raise UserError(f"{bin_file} has the id {wrong}, and data.tokenizer has the ids 0 to {tokenizer.vocab_size - 1}: "
                        "name the tokenizer that made the ids")
    places = np.load(files_of_places.starts, mmap_mode="r")
    tokens = entry["tokens"]
    cut, first = _split(places, tokens, val_fraction, bin_file)
    _, group = np.unique(np.load(files_of_places.hashes), return_inverse=True)
    copies = len(places) - 1 - int(group.max())
    plain = np.arange(len(places)) >= first
    in_val = _copies_together(group, np.diff(places, append=tokens), plain, val_fraction) if copies else plain
    moved = int((in_val != plain).sum())
    if moved:
        name = f"{files_of_places.starts.stem}-{entry['sha256'][:12]}-{val_fraction}"
        train, val = (_selected(bin_file, entry, places, in_val == is_val, cache / f"{name}-{split}.npy")
                      for is_val, split in ((False, "train"), (True, "val")))
    else:
        train = TokenArray([Part(bin_file, entry["dtype"], 0, cut)], DocumentOffsets(files_of_places.starts, 0, first, 0))
        val = TokenArray([Part(bin_file, entry["dtype"], cut, tokens - cut)],
                         DocumentOffsets(files_of_places.starts, first, len(places) - first, cut))
    return Tokens(train, val, len(places), entry["sha256"], *_measured(val, tokenizer), copies, moved)


def _copies_together(group: np.ndarray, lengths: np.ndarray, plain: np.ndarray, val_fraction: float) -> np.ndarray:
    """Whether each document (D,) is for validation. group (D,): equal for equal documents; lengths (D,): in ids.

    plain (D,): the split without copies, which stays if each group is on one side of it.
    """
    groups = int(group.max()) + 1
    of_val = np.bincount(group, plain, groups)
    if groups == 1 or not ((of_val > 0) & (of_val < np.bincount(group))).any():
        return plain
    last = np.zeros(groups, np.int64)
    np.maximum.at(last, group, np.arange(len(group)))
    sizes = np.bincount(group, lengths, groups)
    wanted = val_fraction * lengths.sum()
    order = np.lexsort((-last, sizes > wanted))          # a document whose copies are more than all of validation comes last
    count = int(np.clip(np.searchsorted(np.cumsum(sizes[order]), wanted) + 1, 1, groups - 1))
    chosen = np.zeros(groups, bool)
    chosen[order[:count]] = True
    return chosen[group]


def _selected(bin_file: Path, entry: dict[str, Any], places: np.ndarray, selected: np.ndarray, starts: Path) -> TokenArray:
    """The documents (D,) that are selected, as parts of the .bin file. starts: the file for their places in the split."""
    lengths = np.diff(places, append=entry["tokens"])
    begins = np.cumsum(np.append(0, lengths[selected]))[:-1]
    _save(starts, begins)
    edges = np.flatnonzero(np.diff(selected.astype(np.int8), prepend=0, append=0))     # of runs of selected documents
    bounds = np.append(places, entry["tokens"])[edges].reshape(-1, 2)
    parts = [Part(bin_file, entry["dtype"], begin, end - begin) for begin, end in bounds.tolist()]
    return TokenArray(parts, DocumentOffsets(starts, 0, len(begins), 0))


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


def _checked(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, cache: Path) -> tuple[dict[str, Any], Places]:
    """The result of the scan, and the files about documents, all from the cache if nothing has changed."""
    key = sha256([VERSION, str(bin_file.absolute()), str(tokenizer.end_of_text)])[:16]
    cached = cache / f"binidx-{key}.json"
    places = Places(cache / f"binidx-{key}-starts.npy", cache / f"binidx-{key}-hashes.npy")
    entry = read_json(cached)
    valid = entry and all(path.is_file() for path in places) and _checksums(places) == entry["places"] and all(
        unchanged(file, {"stamp": entry[name], "time": entry["time"]}) for name, file in (("bin", bin_file), ("idx", idx_file)))
    return entry if entry and valid else _check(bin_file, idx_file, tokenizer, cached, places), places


def _checksums(places: Places) -> list[int]:
    return [crc32(path) for path in places]


def _check(bin_file: Path, idx_file: Path, tokenizer: Tokenizer, cached: Path, places: Places) -> dict[str, Any]:
    entry = {"time": time.time_ns(), "bin": stamp(bin_file), "idx": stamp(idx_file)}
    index = read_index(idx_file)
    ids = _require_ids(bin_file, index)
    scanned = _scan(ids)
    starts = _document_places(ids, index.starts, tokenizer.end_of_text)
    _save(places.starts, starts)
    _save(places.hashes, _hashes(ids, starts, tokenizer.end_of_text))
    with open_file(idx_file) as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(scanned.pop("crc32").to_bytes(4, "little"))
    entry |= {"dtype": index.dtype, "tokens": index.tokens, **scanned, "sha256": digest.hexdigest(),
              "places": _checksums(places)}
    with suppress(UserError):            # a cache that cannot be written may have the files about documents
        write_json(cached, entry)
    return entry


def _save(path: Path, array: np.ndarray) -> None:
    """Writes the array, unless the file has it already. Raises UserError if it cannot be written."""
    try:
        same = np.array_equal(np.load(path), array)
    except (OSError, ValueError, EOFError):              # missing, or damaged
        same = False
    if not same:
        write(path, lambda file: np.save(file, array))


def _hashes(ids: np.ndarray, starts: np.ndarray, end_of_text: int) -> np.ndarray:
    """64 bits of the hash of each document (D,) uint64, without end_of_text before and after it."""
    hashes = np.empty(len(starts), np.uint64)
    plain = np.asarray(ids)              # faster to slice than a memmap
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
    checksum = 0
    with tqdm(total=len(ids), desc="checking ids", unit="", unit_scale=True, delay=2, file=sys.stderr, leave=False) as bar:
        for start in range(0, len(ids), BLOCK):
            block = ids[start:start + BLOCK]
            smallest = min(smallest, int(block.min()))
            largest = max(largest, int(block.max()))
            checksum = zlib.crc32(block.data, checksum)
            bar.update(BLOCK)
    return {"smallest": smallest, "largest": largest, "crc32": checksum}


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
