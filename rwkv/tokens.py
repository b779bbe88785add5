"""Text tokenised once: two flat arrays of ids, memory-mapped from files in data.cache_dir.

    corpus = prepare(config.data, config.model.ctx_len)
    corpus.tokenizer, corpus.train, corpus.val, corpus.sizes

A split is end_of_text, document, end_of_text, document, ...: one before each document, so that every token of text is
predicted exactly once. A cache file's name tells its contents (by SHA-256 of text and tokenizer), it appears whole or
not at all, and it is checked before it is used: runs may share a cache_dir and start at the same time.
"""

import gzip
import json
import math
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rwkv.config import DataConfig
from rwkv.corpus import Text, read, sha256, utf8_bytes
from rwkv.tokenizer import JsonTokenizer, Tokenizer, build

ENCODED_AT_ONCE = 4_000_000  # characters: bounds the memory of the ids while they are Python's integers


@dataclass(frozen=True)
class Sizes:
    """Of both splits. Tokens count end_of_text; bytes, those of the UTF-8, do not.

    gzip_bpb: bits per byte of `gzip -9` on the validation split, for comparison with the model's.
    """

    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int
    gzip_bpb: float


@dataclass(frozen=True)
class Corpus:
    """train, val: .npy files, each one array of ids (N,), uint16 or uint32. source, sha256: those of the Text."""

    tokenizer: Tokenizer
    train: Path
    val: Path
    sizes: Sizes
    source: str
    sha256: str

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of the validation text for each token that is predicted of it."""
        return self.sizes.val_bytes / (self.sizes.val_tokens - 1)

    def bits_per_byte(self, val_loss: float) -> float:
        """From nats per predicted token of the validation split to bits per byte of its text."""
        return val_loss / math.log(2) / self.val_bytes_per_token

    def describe(self) -> str:
        """One line for people."""
        return (f"{self.source}: {self.sizes.train_tokens:,} training and {self.sizes.val_tokens:,} validation "
                f"tokens, {(self.sizes.train_bytes + self.sizes.val_bytes) / 1e6:.1f} MB, SHA-256 {self.sha256[:12]}")


def prepare(config: DataConfig, ctx_len: int) -> Corpus:
    """Reads the text that `config` names, and tokenises it or finds it tokenised in config.cache_dir.

    Raises ValueError where that cannot be done, or where a split is shorter than one context, ctx_len + 1 tokens.
    """
    text = read(config)
    if not config.tokenizer.endswith(".json"):  # byte, char and bpe give at most one token per byte
        train, val = (utf8_bytes(split) + len(split) for split in (text.train, text.val))
        _require_context(ctx_len, train, val, "at most ")
    cache = Path(config.cache_dir)
    corpus = _tokenised(text, _tokenizer(config, text, cache), cache)
    _require_context(ctx_len, corpus.sizes.train_tokens, corpus.sizes.val_tokens)
    return corpus


def load(path: Path) -> np.ndarray:
    """A file of ids, memory-mapped."""
    return np.load(path, mmap_mode="r")


def _require_context(ctx_len: int, train: int, val: int, about: str = "") -> None:
    for split, tokens in (("training", train), ("validation", val)):
        if tokens < ctx_len + 1:
            raise ValueError(f"the {split} text is shorter than one context: it has {about}{tokens} tokens, and "
                             f"model.ctx_len={ctx_len} needs {ctx_len + 1}; use more text or a smaller model.ctx_len")


def _tokenizer(config: DataConfig, text: Text, cache: Path) -> Tokenizer:
    """char covers both splits; bpe is trained on one, and cached."""
    if config.tokenizer != "bpe":
        return build(config.tokenizer, [*text.train, *text.val])
    path = cache / f"bpe-{config.vocab_size}-{sha256(text.train)[:16]}.json"
    try:
        return Tokenizer.from_file(path)
    except ValueError:  # not there, or damaged
        tokenizer = JsonTokenizer.train(text.train, config.vocab_size)
        _write(path, lambda file: file.write(tokenizer.definition.encode()))
        return tokenizer


def _tokenised(text: Text, tokenizer: Tokenizer, cache: Path) -> Corpus:
    key = sha256([sha256(text.train), sha256(text.val), tokenizer.hash])[:16]
    train, val, sizes_file = (cache / f"tokens-{key}{ending}" for ending in ("-train.npy", "-val.npy", ".json"))
    sizes = _read_sizes(sizes_file, train, val) or _write_tokens(text, tokenizer, train, val, sizes_file)
    return Corpus(tokenizer, train, val, sizes, text.source, text.sha256)


def _read_sizes(path: Path, train: Path, val: Path) -> Sizes | None:
    """None where the file, or one of those that it vouches for, is missing or damaged."""
    try:
        entry = json.loads(path.read_text())
        sound = [_checksum(load(train)), _checksum(load(val))] == entry["checksums"]
        return Sizes(**entry["sizes"]) if sound else None
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None


def _write_tokens(text: Text, tokenizer: Tokenizer, train: Path, val: Path, sizes_file: Path) -> Sizes:
    arrays = [_encode(tokenizer, split) for split in (text.train, text.val)]
    sizes = _sizes(text, *map(len, arrays))
    for path, array in zip((train, val), arrays, strict=True):
        _write(path, partial(np.save, arr=array))
    entry = {"sizes": asdict(sizes), "checksums": [_checksum(array) for array in arrays]}
    _write(sizes_file, lambda file: file.write(json.dumps(entry).encode()))  # last: it vouches for the others
    return sizes


def _sizes(text: Text, train_tokens: int, val_tokens: int) -> Sizes:
    val_bytes = utf8_bytes(text.val)
    gzip_bytes = len(gzip.compress("\0".join(text.val).encode(), 9))
    return Sizes(train_tokens, val_tokens, utf8_bytes(text.train), val_bytes, 8 * gzip_bytes / val_bytes)


def _encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Documents -> ids (N,), end_of_text before each."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    encoded = (ids for group in _groups(documents) for ids in tokenizer.encode_batch(group))
    return np.concatenate([np.array([tokenizer.end_of_text, *ids], dtype) for ids in encoded])


def _groups(documents: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive documents, of about ENCODED_AT_ONCE characters together."""
    group: list[str] = []
    for document in documents:
        group.append(document)
        if sum(map(len, group)) >= ENCODED_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _checksum(array: np.ndarray) -> list[Any]:
    return [len(array), str(array.dtype), zlib.crc32(array.data)]


def _write(path: Path, save: Callable[[BinaryIO], Any]) -> None:
    """Writes `path` so that it appears whole or not at all. Raises ValueError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_rename(path, save)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; data.cache_dir must be a folder with room") from None


def _write_and_rename(path: Path, save: Callable[[BinaryIO], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            save(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
