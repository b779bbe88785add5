"""Data tokenised once: two long arrays of ids, memory-mapped from files in data.cache_dir, or from a .bin file as it is.

    corpus = prepare(config.data, config.model.ctx_len)
    corpus.tokenizer, corpus.train, corpus.val, corpus.sizes

A split is end_of_text, document, end_of_text, document, ...: one before each document, so that every token of text is
predicted exactly once. Runs may share a cache_dir and start at the same time.

What is for validation is fixed by the data alone, and the rest is for training (val_fraction = f):
- stdlib, and several text files: whole files in a random order that hangs on their names, the first that hold f of all bytes;
- a single text file: the last f of its characters;
- jsonl and hf: by number, the first document and one of every 1/f that follow; of a single document, its last part;
- binidx: the last documents, from the first one on that begins after 1-f of all ids.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rwkv import binidx, shards
from rwkv.config import DataConfig
from rwkv.corpus import Source, open_source
from rwkv.corpus.source import sha256
from rwkv.cutting import last_line_end, pieces
from rwkv.files import read_json, write_json
from rwkv.stream import Stream
from rwkv.tokenizer import NAMES, CharTokenizer, JsonTokenizer, Tokenizer

BPE_BYTES = 100_000_000                  # of text that a bpe tokenizer is made from, spread evenly over what there is
FROM_TEXT = ("bpe", "char")              # tokenizers that are made from the data


@dataclass(frozen=True)
class Sizes:
    """Of both splits. Tokens count end_of_text; bytes, those of the UTF-8, do not.

    gzip_bpb: bits per byte of `gzip -9` on the validation split, its first 16 MB, for comparison with the model's.
    """

    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int
    gzip_bpb: float


@dataclass(frozen=True)
class Corpus:
    """train, val: ids (N,), and where documents begin. source: a line for people. sha256: identifies the data."""

    tokenizer: Tokenizer
    train: Stream
    val: Stream
    sizes: Sizes
    source: str
    sha256: str

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of the validation text for each token that is predicted of it."""
        return self.sizes.val_bytes / (self.sizes.val_tokens - 1)

    @property
    def val_share(self) -> float:
        """Of the bytes of both splits, the part that is for validation."""
        return self.sizes.val_bytes / max(self.sizes.train_bytes + self.sizes.val_bytes, 1)

    def bits_per_byte(self, val_loss: float) -> float:
        """From nats per predicted token of the validation split to bits per byte of its text."""
        return val_loss / math.log(2) / self.val_bytes_per_token

    def describe(self) -> str:
        """One line for people."""
        return (f"{self.source}: {self.sizes.train_tokens:,} training and {self.sizes.val_tokens:,} validation "
                f"tokens, {(self.sizes.train_bytes + self.sizes.val_bytes) / 1e6:.1f} MB, SHA-256 {self.sha256[:12]}")


def prepare(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenises what `config` names, or finds it tokenised in config.cache_dir.

    `tokenizer`: what to use in the place of the one that `config` names. Raises ValueError where that cannot be done, or where
    a split is shorter than one context, ctx_len + 1 tokens.
    """
    cache = Path(config.cache_dir)
    return (_tokens_as_they_are if config.name == "binidx" else _from_text)(config, ctx_len, tokenizer, cache)


def _tokens_as_they_are(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None, cache: Path) -> Corpus:
    if not config.path:
        raise ValueError("data=binidx needs data.path: NAME, of the files NAME.bin and NAME.idx")
    if tokenizer is None and config.tokenizer in FROM_TEXT:
        raise ValueError(f"data=binidx holds ids, not text to make a {config.tokenizer} tokenizer from: name the one that it "
                         "was made with, data.tokenizer=world, FILE.json or FILE.txt")
    tokenizer = tokenizer or Tokenizer.named(config.tokenizer, "data.tokenizer")
    found = binidx.read(config.path, tokenizer, config.val_fraction, cache)
    _require_context(ctx_len, len(found.train), len(found.val))
    train, val = (round(found.bytes_per_token * (len(split) - 1)) for split in (found.train, found.val))
    sizes = Sizes(len(found.train), len(found.val), train, val, found.gzip_bpb)
    about = f"{Path(config.path).name}, {found.documents:,} documents, the last {100 * config.val_fraction:g} % for validation"
    return Corpus(tokenizer, found.train, found.val, sizes, about, found.sha256)


def _from_text(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None, cache: Path) -> Corpus:
    source = open_source(config, cache)
    if source.at_most and not config.tokenizer.endswith(".json"):  # the others give at most one token per byte
        _require_context(ctx_len, *source.at_most, "at most ")
    identity = [config.name, str(config.val_fraction), source.sha256]
    tokenizer = tokenizer or _tokenizer(config, source, sha256(identity)[:16], cache)
    folder = cache / f"tokens-{shards.key(identity, tokenizer)}"
    manifest = shards.tokenise(source, tokenizer, folder, config.tokenize_workers)
    train, val = (shards.stream(folder, manifest, split) for split in shards.SPLITS)
    _require_context(ctx_len, len(train), len(val))
    sizes = Sizes(len(train), len(val), *shards.text_bytes(manifest), manifest["gzip_bpb"])
    return Corpus(tokenizer, train, val, sizes, source.about, source.sha256)


def _require_context(ctx_len: int, train: int, val: int, about: str = "") -> None:
    for split, tokens in (("training", train), ("validation", val)):
        if tokens < ctx_len + 1:
            raise ValueError(f"the {split} text is shorter than one context: it has {about}{tokens} tokens, and "
                             f"model.ctx_len={ctx_len} needs {ctx_len + 1}; use more text or a smaller model.ctx_len")


def _tokenizer(config: DataConfig, source: Source, key: str, cache: Path) -> Tokenizer:
    """char covers both splits; bpe is trained on one; both are cached."""
    if config.tokenizer not in FROM_TEXT:
        return Tokenizer.named(config.tokenizer, "data.tokenizer", f"char, bpe, {NAMES}")
    path = cache / (f"bpe-{config.vocab_size}-{key}.json" if config.tokenizer == "bpe" else f"char-{key}.json")
    return _read_tokenizer(path) or _make_tokenizer(config, source, path)


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """None where it is not there, or damaged."""
    definition = read_json(path)
    return Tokenizer.from_dict(definition) if definition else None


def _make_tokenizer(config: DataConfig, source: Source, path: Path) -> Tokenizer:
    made = JsonTokenizer.train(_sample(source), config.vocab_size) if config.tokenizer == "bpe" else _characters(source)
    write_json(path, made.to_dict())
    return made


def _characters(source: Source) -> Tokenizer:
    found: set[str] = set()
    for document in source.documents():
        for chunk in document.chunks:
            found.update(chunk)
    return CharTokenizer(found)


def _sample(source: Source) -> Iterator[str]:
    """Training text for a bpe tokenizer: all of it, or evenly spread pieces of about BPE_BYTES together."""
    every, number = math.ceil(source.size / BPE_BYTES), 0
    for document in source.documents():
        for text in () if document.val else pieces(document.chunks, last_line_end):
            if number % every == 0:
                yield text
            number += 1
