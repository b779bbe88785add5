"""A source tokenised once, into files in a folder of its own: on all cores, in bounded memory, and never twice.

    cache/tokens-KEY/manifest.json              what follows, with sizes and checksums; written last: it vouches for the rest
                     00000-train.ids  -val.ids  ids of shard 0, end_of_text before each document
                     00000.json                 vouches for the two above it
                     train-starts.npy  val-...  where documents begin

KEY is made of the content, the split and the tokenizer. A shard is SHARD characters of documents in the source's order, so
that nothing but the data decides what is in it: not the number of workers, and not where an earlier run was stopped. Every
file appears whole or not at all; a later run keeps the finished ones. A lock lets the second of two runs wait for the first.

Workers are threads: what costs time, the tokenizers' own libraries, runs outside Python's lock, and on all cores for one
shard too. The tokenizers byte and char are Python and take one core, which is as fast.
"""

import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout
from tqdm import tqdm

from rwkv.corpus.files import stamp, unchanged
from rwkv.corpus.source import Source, sha256
from rwkv.cutting import Cut, cutter, pieces
from rwkv.encoding import Piece, encode
from rwkv.files import cannot_write, read_json, write, write_bytes, write_json
from rwkv.stream import Part, Starts, Stream
from rwkv.tokenizer import Tokenizer

SHARD = 1 << 23                          # characters of a shard
AT_ONCE = 4                              # shards, where nobody says: more of them take memory, and no more cores
GZIP_BYTES = 16_000_000                  # of validation text that gzip -9 is measured on, or a document more
SPLITS = ("train", "val")
VERSION = 1                              # of the layout, and of the rules by which texts are cut
SHOWN_AFTER = 2.0                        # seconds: a progress bar for less would be noise


class Work(NamedTuple):
    number: int
    pieces: list[Piece]


def key(identity: Sequence[str], tokenizer: Tokenizer) -> str:
    """The part of a folder's name that another text, split, tokenizer or layout changes."""
    return sha256([*identity, tokenizer.hash, str(VERSION), str(SHARD)])[:16]


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path, workers: int = 0) -> dict[str, Any]:
    """The manifest of `folder`, after everything that it lacks was made. `workers`: shards at a time, 0 for one per core to 4.

    Raises ValueError where a text cannot be read or encoded, or a file not be written.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        with _alone(folder):
            manifest = read_manifest(folder) or _make(source, tokenizer, folder, workers or min(os.cpu_count() or 1, AT_ONCE))
    return manifest


def stream(folder: Path, manifest: dict[str, Any], split: str) -> Stream:
    parts = [Part(folder / _file(number, split), manifest["dtype"], 0, shard[split]["tokens"])
             for number, shard in enumerate(manifest["shards"])]
    return Stream(parts, Starts(folder / f"{split}-starts.npy", 0, manifest["documents"][split], 0))


def text_bytes(manifest: dict[str, Any]) -> tuple[int, int]:
    """Of the UTF-8 of (train, val)."""
    train, val = (sum(shard[split]["bytes"] for shard in manifest["shards"]) for split in SPLITS)
    return train, val


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none, or where one of the files that it vouches for is missing or damaged."""
    manifest = read_json(folder / "manifest.json")
    if not manifest or manifest["version"] != VERSION:
        return None
    return manifest if all(_sound(folder / name, entry) for name, entry in manifest["files"].items()) else None


def _sound(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is what it was: by size and time where they are certain to tell, by its checksum elsewhere."""
    return path.is_file() and (unchanged(path, entry) or _entry(path)["crc32"] == entry["crc32"])


def _alone(folder: Path) -> AcquireReturnProxy:
    """A lock that ends with its process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            print(f"another run is tokenising the same data into {folder}: waiting for it", file=sys.stderr)
            return lock.acquire()
    except OSError as error:
        raise ValueError(cannot_write(folder, error)) from None


def _make(source: Source, tokenizer: Tokenizer, folder: Path, workers: int) -> dict[str, Any]:
    for leftover in folder.glob(".*"):   # of a process that was killed
        leftover.unlink()
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    shards = _shards(source, tokenizer, folder, dtype, workers)
    documents = {split: _write_starts(folder, shards, split, dtype, tokenizer.end_of_text) for split in SPLITS}
    names = [_file(number, split) for number, shard in enumerate(shards) for split in SPLITS if shard[split]["tokens"]]
    files = {name: _entry(folder / name) for name in [*names, *(f"{split}-starts.npy" for split in SPLITS)]}
    manifest = {"version": VERSION, "dtype": dtype.name, "about": source.about, "sha256": source.sha256,
                "tokenizer": tokenizer.hash, "shards": shards, "documents": documents, "files": files,
                "gzip_bpb": _gzip_bpb(source)}
    write_json(folder / "manifest.json", manifest)
    return manifest


def _shards(source: Source, tokenizer: Tokenizer, folder: Path, dtype: np.dtype, workers: int) -> list[dict[str, Any]]:
    """One entry per shard: those that are there, and those that are made now."""
    with ThreadPoolExecutor(workers) as pool, _bar(source) as bar:
        tasks = (partial(_shard, work, tokenizer, folder, dtype) for work in works(source, cutter(tokenizer)))
        shards = []
        for shard, weight in _in_order(pool, tasks, workers):
            shards.append(shard)
            bar.update(weight)
    return shards


def _in_order(pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], Any]], ahead: int) -> Iterator[Any]:
    """The result of each task; the next one is made when no more than `ahead` of them are unfinished."""
    under_way: deque[Future[Any]] = deque()
    try:
        for task in tasks:
            under_way.append(pool.submit(task))
            if len(under_way) > ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            print("\nfinishing the shards under way; the next run goes on from there", file=sys.stderr)
        pool.shutdown(cancel_futures=True)
        raise


def works(source: Source, cut: Cut) -> Iterator[Work]:
    """The source in shards of SHARD characters, in order."""
    number, found, length = 0, [], 0
    for piece in _pieces(source, cut):
        found.append(piece)
        length += len(piece.text)
        if length >= SHARD:
            yield Work(number, found)
            number, found, length = number + 1, [], 0
    if found:
        yield Work(number, found)


def _pieces(source: Source, cut: Cut) -> Iterator[Piece]:
    for document in source.documents():
        weight, before = document.weight, document.before
        for number, text in enumerate(pieces(document.chunks, cut)):
            size = len(text.encode()) if weight is None else weight
            yield Piece(text, document.val, number == 0, document.where, size, before)
            weight = None if weight is None else 0
            before += len(text)


def _shard(work: Work, tokenizer: Tokenizer, folder: Path, dtype: np.dtype) -> tuple[dict[str, Any], int]:
    """What vouches for the shard, read where it is there and right, else made; and its weight in the progress bar."""
    weight, voucher = sum(piece.weight for piece in work.pieces), folder / f"{work.number:05}.json"
    found = _read_voucher(voucher, folder, work.number)
    if found is not None:
        return found, weight
    made = {split: _write_split([piece for piece in work.pieces if piece.val == (split == "val")], tokenizer, dtype,
                                folder / _file(work.number, split)) for split in SPLITS}
    write_json(voucher, made)
    return made, weight


def _read_voucher(voucher: Path, folder: Path, number: int) -> dict[str, Any] | None:
    """None where the shard is not there, or damaged."""
    found = read_json(voucher)
    files = [(folder / _file(number, split), found[split]) for split in SPLITS if found[split]["tokens"]] if found else []
    return found if all(path.is_file() and _entry(path)["crc32"] == entry["crc32"] for path, entry in files) else None


def _write_split(parts: list[Piece], tokenizer: Tokenizer, dtype: np.dtype, path: Path) -> dict[str, int]:
    ids = np.concatenate([np.empty(0, dtype), *encode(parts, tokenizer, dtype)])
    if len(ids):
        write_bytes(path, ids.tobytes())
    return {"tokens": len(ids), "bytes": sum(len(part.text.encode()) for part in parts), "crc32": zlib.crc32(ids.tobytes())}


def _write_starts(folder: Path, shards: list[dict[str, Any]], split: str, dtype: np.dtype, end_of_text: int) -> int:
    """Places where documents begin: those of end_of_text, which no text has. Returns how many there are."""
    found, before = [np.empty(0, np.int64)], 0
    for number, shard in enumerate(shards):
        if shard[split]["tokens"]:
            found.append(before + np.flatnonzero(np.fromfile(folder / _file(number, split), dtype) == end_of_text))
            before += shard[split]["tokens"]
    starts = np.concatenate(found)
    write(folder / f"{split}-starts.npy", lambda file: np.save(file, starts))
    return len(starts)


def _gzip_bpb(source: Source) -> float:
    """Bits per byte of `gzip -9` on the validation text, its documents joined by U+0000."""
    packer = zlib.compressobj(9, wbits=31)
    text_bytes = size = 0
    documents = (document for document in source.documents() if document.val)
    for number, document in enumerate(documents):
        size += len(packer.compress(b"\0" if number else b""))
        for chunk in document.chunks:
            size += len(packer.compress(chunk.encode()))
            text_bytes += len(chunk.encode())
        if text_bytes >= GZIP_BYTES:
            break
    return 8 * (size + len(packer.flush())) / max(text_bytes, 1)


def _entry(path: Path) -> dict[str, Any]:
    now, crc32 = time.time_ns(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc32 = zlib.crc32(block, crc32)
    return {"stamp": stamp(path), "time": now, "crc32": crc32}


def _file(number: int, split: str) -> str:
    return f"{number:05}-{split}.ids"


def _bar(source: Source) -> "tqdm[Any]":
    return tqdm(total=source.size, desc="tokenising", unit="B", unit_scale=True, delay=SHOWN_AFTER, file=sys.stderr,
                leave=False)
