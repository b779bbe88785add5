"""Tokenises a source once, into a folder of files, on all cores and in bounded memory.

    cache/tokens-KEY/manifest.json              properties of the data, and size and checksum of every other file; written last
                     00000-train.ids  -val.ids  the ids of shard 0, with end_of_text before each document
                     00000.json                 sizes and checksums of these two files; written after them
                     train-starts.npy  val-...  offsets of documents

KEY is a hash of the content, the split and the tokenizer. A shard is SHARD characters of consecutive documents. So the content
of a shard depends only on the data, not on the number of workers or on interruptions. Files are written atomically. A later run
reuses the finished files, which the .json of a shard or the manifest lists. A concurrent run waits for a lock.

Workers are threads, because most of the time is spent in the tokenizers' libraries, which release the GIL. The libraries use
all cores even for one shard. The tokenizers byte and char are written in Python and use one core.
"""

import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from rwkv.data.documents.copies import repeated_share
from rwkv.data.documents.separators import marks
from rwkv.data.documents.source import Source
from rwkv.data.files import crc32, is_unchanged, size_and_mtime
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.errors import UserError
from rwkv.io.cache import cannot_write, read_json, sha256, write, write_bytes, write_json
from rwkv.io.json_types import JsonObject
from rwkv.io.locked import FOREVER, lock_folder
from rwkv.tokenizer.lost_bytes import NOTHING, LossCounter, Lost
from rwkv.tokenizer.split import SafeSplit, pieces, safe_split
from rwkv.tokenizer.tokenizers import Tokenizer

BATCH = 1 << 20                          # characters per call of the tokenizer, which bounds the call's memory
SHARD = 1 << 23                          # characters in a shard
MAX_WORKERS = 4                          # default maximum of concurrent shards: more would need memory without using more cores
GZIP_BYTES = 16_000_000                  # bytes of validation text to compress with gzip -9, rounded up to whole documents
SPLITS = ("train", "val")
VERSION = 3                              # version of the files' layout and of the rules for splitting texts
SHOWN_AFTER = 2.0                        # seconds before the progress bar appears
Result = TypeVar("Result")


class Piece(NamedTuple):
    """A document, or a part of a document that is tokenised by itself.

    `starts_document` is true for the first part of a document. `copy` is as in Document for the first part, and False for the
    others. The remaining fields are as in Document.
    """

    text: str
    val: bool
    starts_document: bool
    where: str
    weight: int
    before: int = 0
    copy: bool = False


class Shard(NamedTuple):
    number: int
    pieces: list[Piece]


def cache_key(identity: Sequence[str], tokenizer: Tokenizer) -> str:
    """Returns the KEY in the folder's name, a hash of `identity` (the text and its split), the tokenizer and the layout."""
    return sha256([*identity, tokenizer.data_key, str(VERSION), str(SHARD)])[:16]


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path, workers: int = 0) -> JsonObject:
    """Creates the missing and damaged files of `folder`, and returns the manifest.

    `workers` is the number of concurrent shards; 0 stands for one per core, but at most MAX_WORKERS.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        with _lock(folder):
            workers = workers or min(os.cpu_count() or 1, MAX_WORKERS)
            manifest = read_manifest(folder) or _write_all(source, tokenizer, LossCounter(tokenizer), folder, workers)
    return manifest


def token_array(folder: Path, manifest: JsonObject, split: str) -> TokenArray:
    parts = [Part(folder / _ids_file(number, split), manifest["dtype"], 0, shard[split]["tokens"])
             for number, shard in enumerate(manifest["shards"])]
    return TokenArray(parts, DocumentOffsets(folder / f"{split}-starts.npy", 0, manifest["documents"][split], 0))


def text_bytes(manifest: JsonObject) -> tuple[int, int]:
    """Returns the bytes of UTF-8 text in the training and in the validation split."""
    def total(split: str) -> int:
        return sum(shard[split]["bytes"] for shard in manifest["shards"])

    return total("train"), total("val")


def copies(manifest: JsonObject) -> int:
    """Returns the number of documents in both splits that equal an earlier one (rwkv/data/documents/copies.py)."""
    return sum(shard[split]["copies"] for shard in manifest["shards"] for split in SPLITS)


def all_marks(manifest: JsonObject) -> dict[str, int]:
    """Counts the marks such as <|endoftext|> in the texts of both splits (rwkv/data/documents/separators.py)."""
    total: Counter[str] = Counter()
    for shard in manifest["shards"]:
        for split in SPLITS:
            total.update(shard[split]["marks"])
    return total


def lost_bytes(manifest: JsonObject) -> tuple[Lost, Lost]:
    """Returns the parts of the training text and of the validation text that the tokenizer cannot represent."""
    def total(split: str) -> Lost:
        entries = [shard[split] for shard in manifest["shards"]]
        return sum((Lost(entry["lost"], entry["bytes"], entry["unknown"]) for entry in entries), NOTHING)

    return total("train"), total("val")


def read_manifest(folder: Path) -> JsonObject | None:
    """Reads the manifest of `folder`. Returns None if the manifest or a file that it lists is missing or damaged."""
    manifest = read_json(folder / "manifest.json")
    if not manifest or manifest["version"] != VERSION:
        return None
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or not (is_unchanged(path, entry) or crc32(path) == entry["crc32"]):
            return None
    return manifest


def encode(parts: list[Piece], tokenizer: Tokenizer, counter: LossCounter,
           dtype: np.dtype) -> Iterator[tuple[np.ndarray, Lost]]:
    """Yields for each batch of pieces the ids, with end_of_text before each document, and the text that the tokenizer lost."""
    for batch in _batches(parts):
        ids = []
        encoded = encode_batch(batch, tokenizer)
        for piece, piece_ids in zip(batch, encoded, strict=True):
            if piece.starts_document:
                ids.append(np.array([tokenizer.end_of_text], dtype))
            ids.append(np.array(piece_ids, dtype))
        yield np.concatenate(ids), counter.count([part.text for part in batch], encoded)


def encode_batch(batch: list[Piece], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids of each piece. Raises UserError with the location of the text if it cannot be encoded."""
    try:
        return tokenizer.encode_batch([part.text for part in batch])
    except ValueError:
        for part in batch:               # finds the piece with the error, which encode_batch does not name
            try:
                tokenizer.encode(part.text, part.before)
            except ValueError as error:
                raise UserError(f"{part.where}: {error}") from None
        raise


def _batches(parts: Sequence[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    length = 0
    for part in parts:
        batch.append(part)
        length += len(part.text)
        if length >= BATCH:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Creates the folder, locks it, and deletes what a killed process left unfinished.

    If another process holds the lock, says so and waits.
    """
    in_use = f"another run is tokenising the same data into {folder}: waiting for that run"

    def warn_unlocked(reason: str) -> None:
        print(f"files cannot be locked in {folder} ({reason}): make sure that no other run is tokenising the same data",
              file=sys.stderr)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(folder, 0, in_use, warn_unlocked)
        except UserError as waiting:
            print(waiting, file=sys.stderr)
            lock = lock_folder(folder, FOREVER, in_use, warn_unlocked)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from None
    if lock is not None:
        for leftover in folder.glob(".*.*"):     # not the lock
            leftover.unlink()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _write_all(source: Source, tokenizer: Tokenizer, counter: LossCounter, folder: Path, workers: int) -> JsonObject:
    dtype = dtype_of(tokenizer)
    shards = _write_shards(source, tokenizer, counter, folder, dtype, workers)
    documents = {split: _write_starts(folder, shards, split, dtype, tokenizer.end_of_text) for split in SPLITS}
    names = [_ids_file(number, split) for number, shard in enumerate(shards) for split in SPLITS if shard[split]["tokens"]]
    files = {name: _file_entry(folder / name) for name in [*names, *(f"{split}-starts.npy" for split in SPLITS)]}
    single = [documents[split] for split in SPLITS] == [1, 1]
    manifest = {"version": VERSION, "dtype": dtype.name, "about": source.about, "sha256": source.sha256,
                "tokenizer": tokenizer.hash, "shards": shards, "documents": documents, "files": files,
                "gzip_bpb": _gzip_bpb(source), "repeated": repeated_share(source.documents()) if single else 0.0}
    write_json(folder / "manifest.json", manifest)
    return manifest


def _write_shards(source: Source, tokenizer: Tokenizer, counter: LossCounter, folder: Path, dtype: np.dtype,
                 workers: int) -> list[JsonObject]:
    bar = tqdm(total=source.size, desc="tokenising", unit="B", unit_scale=True, delay=SHOWN_AFTER, file=sys.stderr, leave=False)
    with ThreadPoolExecutor(workers) as pool, bar:
        tasks = (partial(_create_shard, shard, tokenizer, counter, folder, dtype)
                 for shard in shards_of(source, safe_split(tokenizer)))
        entries = []
        for entry, weight in _in_order(pool, tasks, workers):
            entries.append(entry)
            bar.update(weight)
    return entries


def _in_order(pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], Result]], ahead: int) -> Iterator[Result]:
    """Runs tasks in the pool and yields their results in order. Never more than `ahead` + 1 results are pending."""
    running: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) > ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            print("\nfinishing the shards in progress: the next run will reuse them", file=sys.stderr)
        pool.shutdown(cancel_futures=True)
        raise


def shards_of(source: Source, split: SafeSplit) -> Iterator[Shard]:
    """Divides the source into consecutive shards of SHARD characters."""
    number = length = 0
    shard: list[Piece] = []
    for piece in _pieces(source, split):
        shard.append(piece)
        length += len(piece.text)
        if length >= SHARD:
            yield Shard(number, shard)
            number += 1
            shard = []
            length = 0
    if shard:
        yield Shard(number, shard)


def _pieces(source: Source, split: SafeSplit) -> Iterator[Piece]:
    for document in source.documents():
        weight = document.weight
        before = document.before
        for number, text in enumerate(pieces(document.chunks, split)):
            size = len(text.encode()) if weight is None else weight
            first = number == 0
            yield Piece(text, document.val, first, document.where, size, before, first and document.copy)
            weight = None if weight is None else 0       # the first piece gets all of a document's weight
            before += len(text)


def _create_shard(shard: Shard, tokenizer: Tokenizer, counter: LossCounter, folder: Path,
                  dtype: np.dtype) -> tuple[JsonObject, int]:
    """Creates the files of a shard if they are missing or damaged. Returns the entry and the weight for the progress bar."""
    path = folder / f"{shard.number:05}.json"
    entry = read_json(path)
    files = {split: folder / _ids_file(shard.number, split) for split in SPLITS}
    non_empty = {split: file for split, file in files.items() if entry and entry[split]["tokens"]}
    if entry is None or not all(file.is_file() and crc32(file) == entry[split]["crc32"] for split, file in non_empty.items()):
        entry = {split: _write_split([piece for piece in shard.pieces if piece.val == (split == "val")], tokenizer, counter,
                                     dtype, files[split]) for split in SPLITS}
        write_json(path, entry)
    return entry, sum(piece.weight for piece in shard.pieces)


def _write_split(parts: list[Piece], tokenizer: Tokenizer, counter: LossCounter, dtype: np.dtype, path: Path) -> JsonObject:
    batches = list(encode(parts, tokenizer, counter, dtype))
    ids = np.concatenate([np.empty(0, dtype), *(batch_ids for batch_ids, _ in batches)])
    if len(ids):
        write_bytes(path, ids.tobytes())
    split_lost = sum((batch_lost for _, batch_lost in batches), NOTHING)
    return {"tokens": len(ids), "bytes": split_lost.of, "crc32": zlib.crc32(ids.tobytes()), "lost": split_lost.bytes,
            "unknown": split_lost.unknown, "copies": sum(part.copy for part in parts),
            "marks": marks(part.text for part in parts)}


def _write_starts(folder: Path, shards: list[JsonObject], split: str, dtype: np.dtype, end_of_text: int) -> int:
    """Writes the offsets of documents and returns their number. Every end_of_text is the beginning of a document."""
    offsets = [np.empty(0, np.int64)]
    before = 0
    for number, shard in enumerate(shards):
        if shard[split]["tokens"]:
            offsets.append(before + np.flatnonzero(np.fromfile(folder / _ids_file(number, split), dtype) == end_of_text))
            before += shard[split]["tokens"]
    starts = np.concatenate(offsets)
    write(folder / f"{split}-starts.npy", lambda file: np.save(file, starts))
    return len(starts)


def _gzip_bpb(source: Source) -> float:
    """Returns the bits per byte of `gzip -9` on the beginning of the validation text, with U+0000 between documents."""
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


def _file_entry(path: Path) -> JsonObject:
    now = time.time_ns()                 # must be before the file is read: `is_unchanged` compares it with the file's timestamp
    checksum = crc32(path)
    return {"stamp": size_and_mtime(path), "time": now, "crc32": checksum}


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Returns uint16 if all of the tokenizer's ids fit into it, otherwise uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _ids_file(number: int, split: str) -> str:
    return f"{number:05}-{split}.ids"
