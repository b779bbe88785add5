"""Tokenises the data of a configuration once, into memory-mapped files in data.cache_dir.

    corpus = prepare(config.data, config.model.ctx_len)
    corpus.tokenizer, corpus.train, corpus.val, corpus.sizes

The tokens of a split are end_of_text, document, end_of_text, document, ... Because end_of_text precedes each document, every
token of text is predicted exactly once. Runs may share a cache_dir and start at the same time.

The validation split depends only on the data and on f = val_fraction. Each kind of data has a rule for its content:
- stdlib, several text files: whole files, in a random order that depends on their names, up to a fraction f of all bytes
- a single text file: the last fraction f of its characters
- jsonl, chat, hf, texts with data.separator: the first document and one of every 1/f following documents, or the end of a
  single document
- binidx, datatrove: the last documents, from the first document that begins after a fraction 1-f of all ids
- mix: the validation split of each source
Copies of a document are in the same split (documents/copies.py).
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rwkv.config import TOKENS, DataConfig
from rwkv.data import shards, token_files
from rwkv.data.conversations import Tokenised, tokenise
from rwkv.data.documents.source import Source
from rwkv.data.mixture import MixedSource, mixed_sources, prefix_errors
from rwkv.data.mixture.copies import copies_in_training, decode_chunks, remove_documents
from rwkv.data.options import check_data
from rwkv.data.sources import open_source
from rwkv.data.streaming.encoding import Streamed, hold_out
from rwkv.data.token_array import TokenArray, TokensInMemory
from rwkv.distributed import log
from rwkv.errors import UserError
from rwkv.io.cache import read_json, sha256, write_bytes, write_json
from rwkv.io.lines import count_of, labelled_line
from rwkv.tokenizer.lost_bytes import NOTHING, WITHHELD, Lost, percent
from rwkv.tokenizer.split import last_line_end, pieces
from rwkv.tokenizer.tokenizers import MADE_FROM_DATA, CharTokenizer, JsonTokenizer, Tokenizer

BPE_BYTES = 100_000_000                  # bytes of text for training a bpe tokenizer, spread evenly over the training split


@dataclass(frozen=True)
class Sizes:
    """The sizes of both splits. Numbers of tokens include end_of_text, but numbers of bytes count only the text in UTF-8.

    Attributes:
        gzip_bpb: bits per byte of `gzip -9` on the first 16 MB of the validation text, for comparison with the model.
        train_lost, val_lost: the text that the tokenizer cannot represent; NOTHING if another program made the ids.
    """

    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int
    gzip_bpb: float
    train_lost: Lost = NOTHING
    val_lost: Lost = NOTHING


@dataclass(frozen=True)
class Corpus:
    """The tokenised data of a run.

    Attributes:
        source: one line about the origin of the data.
        sha256: a hash of the texts, their order and the names of their files.
        conversations: the training and the validation split of data=chat.
        unknown: the fraction of unknown tokens if another program made the ids and the tokenizer may lose text; else None.
        copies: the number of documents that equal an earlier document.
        repeated: the fraction of a single file's validation text that also occurs in its training text.
        marks: how often each mark such as <|endoftext|> occurs in the texts (documents/separators.py).
        parts: the sources of data=mix, whose tokens `train` and `val` join; () for other data.
        stream: the stream of data.streaming, for which `train` is empty; None for other data.
    """

    tokenizer: Tokenizer
    train: TokenArray
    val: TokenArray
    sizes: Sizes
    source: str
    sha256: str
    conversations: tuple[Tokenised, Tokenised] | None = None
    unknown: float | None = None
    copies: int = 0
    repeated: float = 0.0
    marks: Mapping[str, int] = field(default_factory=dict)
    parts: "tuple[CorpusPart, ...]" = ()
    stream: Streamed | None = None

    @property
    def streams(self) -> list[tuple[Streamed, float]]:
        """Returns the stream of each source and its share of the training tokens; [] without data.streaming."""
        if self.stream is not None:
            return [(self.stream, 1.0)]
        return [(part.corpus.stream, part.share) for part in self.parts if part.corpus.stream is not None]

    @property
    def val_lost(self) -> float:
        """Returns the fraction of the validation text that the tokenizer loses.

        For conversations, returns the fraction of the answers. For ids of another program, returns the fraction of unknown ids.
        """
        lost = self.conversations[1].learnt_lost if self.conversations else self.sizes.val_lost
        return lost.share if self.unknown is None else self.unknown

    @property
    def val_bytes_per_token(self) -> float | None:
        """Returns the bytes of validation text per predicted token.

        For conversations, returns the bytes of the answers per learnt token. Returns None if the tokenizer loses more than
        WITHHELD of the text, if the ids stand for no bytes, as special tokens do, and for pairs of answers, because their loss
        is not a loss per token.
        """
        if self.val_lost > WITHHELD or (self.conversations and self.conversations[1].paired):
            return None
        if self.conversations:
            val = self.conversations[1]
            return val.learnt_bytes / int(val.learnt[:].sum()) or None
        return self.sizes.val_bytes / (self.sizes.val_tokens - max(1, len(self.parts))) or None

    @property
    def learnt(self) -> TokenArray | None:
        """Returns a 1 for each training token that is a target and a 0 for each other one, or None if all are targets."""
        return self.conversations[0].learnt if self.conversations else None

    @property
    def val_share(self) -> float:
        """Returns the fraction of all bytes that is in the validation split; 0 for a stream, because its size is unknown."""
        if self.streams:
            return 0.0
        return self.sizes.val_bytes / max(self.sizes.train_bytes + self.sizes.val_bytes, 1)

    def describe_lost(self) -> str | None:
        """Returns a message about the text that the tokenizer loses and about val/bpb, or None if nothing is lost."""
        if self.unknown is not None:
            withheld = f"; val/bpb is not reported above {percent(WITHHELD)}" if self.unknown else ""
            return ("the text that the tokenizer loses is unknown, since another program made the ids: "
                    f"{percent(self.unknown)} of the validation ids are its unknown token{withheld}")
        texts = {"the training text": self.sizes.train_lost, "the validation text": self.sizes.val_lost}
        messages = [lost.describe(text) for text, lost in texts.items() if lost.bytes]
        withheld = (f"val/bpb is not reported, since more than {percent(WITHHELD)} is lost" if self.val_lost > WITHHELD else
                    f"val/bpb divides by all bytes, including lost ones, and is not reported above {percent(WITHHELD)}")
        return "; ".join([*messages, withheld]) if messages else None

    def describe(self) -> str:
        if self.streams:
            return f"{self.source}: {self.sizes.val_tokens:,} validation tokens, SHA-256 {self.sha256[:12]}"
        size = self.sizes.train_bytes + self.sizes.val_bytes
        size_text = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
        return (f"{self.source}: {self.sizes.train_tokens:,} training and {self.sizes.val_tokens:,} validation "
                f"tokens, {size_text}, SHA-256 {self.sha256[:12]}")


class CorpusPart(NamedTuple):
    """A prepared source of data=mix. `share` is its fraction of the training tokens."""

    name: str
    share: float
    corpus: Corpus


def prepare(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None = None, pairs: bool = False) -> Corpus:
    """Tokenises the data of `config`, or reads the tokens from config.cache_dir.

    Args:
        tokenizer: the tokenizer to use instead of the one that `config` names.
        pairs: whether data=chat reads pairs of answers. If so, `tokenizer` is required.
    """
    check_data(config, tokenizer is None)
    cache = Path(config.cache_dir)
    if config.name == "chat":
        return _from_conversations(config, tokenizer, cache, pairs)
    if config.name == "mix":
        return _from_sources(config, ctx_len, tokenizer, cache)
    if config.streaming:
        return _from_stream(config, ctx_len, tokenizer)
    return (_from_token_files if config.name in TOKENS else _from_text)(config, ctx_len, tokenizer, cache)


def _from_stream(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None) -> Corpus:
    tokenizer = tokenizer or Tokenizer.named(config.tokenizer, "data.tokenizer", end_of_text=config.end_of_text)
    stream, streamed, val = hold_out(config, tokenizer)
    if len(val.tokens) < ctx_len + 1:
        raise UserError(f"the validation text is shorter than one context: the first data.val_documents={config.val_documents} "
                        f"documents have {count_of(len(val.tokens), 'token')}, but model.ctx_len={ctx_len} requires at least "
                        f"{ctx_len + 1}. Raise data.val_documents or lower model.ctx_len")
    left = "" if streamed.tokens is None else f", with about {float(f'{streamed.tokens:.2g}'):,.0f} training tokens"
    about = f"{stream.about}{left}, read while training; the first {count_of(config.val_documents, 'document')} for validation"
    empty = TokensInMemory(val.tokens[:0], np.empty(0, np.int64))
    sizes = Sizes(0, len(val.tokens), 0, val.bytes, val.gzip_bpb, NOTHING, val.lost)
    return Corpus(tokenizer, empty, val.tokens, sizes, about, stream.sha256, marks=val.marks, stream=streamed)


def _from_sources(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None, cache: Path) -> Corpus:
    sources = mixed_sources(config)
    if tokenizer is None and config.tokenizer not in MADE_FROM_DATA:
        tokenizer = Tokenizer.named(config.tokenizer, "data.tokenizer", end_of_text=config.end_of_text)
    if tokenizer is None:
        texts = []
        for source in sources:
            with prefix_errors(source.name):
                texts.append((open_source(source.config, cache), source.share))
        identity = [part for source, (text, share) in zip(sources, texts, strict=True)
                    for part in (str(source.config.val_fraction), text.sha256, str(share))]
        tokenizer = _tokenizer(config, texts, sha256(identity)[:16], cache)
    parts = []
    for source in sources:
        with prefix_errors(source.name):
            parts.append(CorpusPart(source.name, source.share, prepare(source.config, ctx_len, tokenizer)))
    return join_sources(_without_held_out(parts) if config.streaming else _without_copies(parts, sources, ctx_len, cache))


def _without_copies(parts: Sequence[CorpusPart], sources: Sequence[MixedSource], ctx_len: int, cache: Path) -> list[CorpusPart]:
    """Removes the validation documents of each source that are in the training split of another source."""
    tokenizer = parts[0].corpus.tokenizer
    splits = [(part.corpus.train, part.corpus.val) for part in parts]
    identities = [f"{part.corpus.sha256} {source.config.name} {source.config.val_fraction} {tokenizer.data_key}"
                  for part, source in zip(parts, sources, strict=True)]
    changed = []
    for part, left_out in zip(parts, copies_in_training(splits, identities, tokenizer, cache), strict=True):
        corpus = part.corpus
        if left_out.any():
            val = remove_documents(corpus.val, left_out)
            with prefix_errors(part.name):
                if len(val) < ctx_len + 1:
                    raise UserError(f"{int(left_out.sum()):,} of {count_of(len(left_out), 'validation document')} are also in "
                                    "the training text of other sources, so too few documents are left for validation. Remove "
                                    "these documents from the other sources")
            removed = remove_documents(corpus.val, ~left_out)
            removed_bytes = sum(len(text.encode()) for text in decode_chunks(removed, 0, len(removed), tokenizer))
            sizes = replace(corpus.sizes, val_tokens=len(val), val_bytes=max(corpus.sizes.val_bytes - removed_bytes, 0))
            about = f"{corpus.source}; without {count_of(int(left_out.sum()), 'document')} that other sources train on"
            corpus = replace(corpus, val=val, sizes=sizes, source=about)
        changed.append(part._replace(corpus=corpus))
    return changed


def _without_held_out(parts: Sequence[CorpusPart]) -> list[CorpusPart]:
    """Makes each source's stream omit the validation documents of all sources."""
    streams = [part.corpus.stream for part in parts]
    held_out = frozenset[int]().union(*(stream.held_out for stream in streams if stream))
    return [part._replace(corpus=replace(part.corpus, stream=stream and replace(stream, held_out=held_out)))
            for part, stream in zip(parts, streams, strict=True)]


def join_sources(parts: Sequence[CorpusPart]) -> Corpus:
    """Returns the corpus of data=mix, which joins its sources.

    Sizes are sums. gzip_bpb and the fraction of unknown ids are means, weighted by each source's bytes of validation text.
    """
    corpora = [part.corpus for part in parts]
    val_bytes = [corpus.sizes.val_bytes for corpus in corpora]

    def mean(numbers: Iterable[float]) -> float:
        return sum(number * size for number, size in zip(numbers, val_bytes, strict=True)) / max(sum(val_bytes), 1)

    def total(name: str) -> Any:
        return sum(getattr(corpus.sizes, name) for corpus in corpora)

    lost = [sum((getattr(corpus.sizes, name) for corpus in corpora), NOTHING) for name in ("train_lost", "val_lost")]
    sizes = Sizes(total("train_tokens"), total("val_tokens"), total("train_bytes"), total("val_bytes"),
                  mean(corpus.sizes.gzip_bpb for corpus in corpora), *lost)
    marks: Counter[str] = Counter()
    for corpus in corpora:
        marks.update(corpus.marks)
    uncertain = any(corpus.unknown is not None for corpus in corpora)
    return Corpus(corpora[0].tokenizer, TokenArray.concatenate([corpus.train for corpus in corpora]),
                  TokenArray.concatenate([corpus.val for corpus in corpora]), sizes, f"{len(parts)} sources",
                  sha256(text for part in parts for text in (part.name, part.corpus.sha256)),
                  unknown=mean(corpus.val_lost for corpus in corpora) if uncertain else None,
                  copies=sum(corpus.copies for corpus in corpora), marks=marks, parts=tuple(parts))


def _from_conversations(config: DataConfig, tokenizer: Tokenizer | None, cache: Path, pairs: bool) -> Corpus:
    source = open_source(config, cache)
    identity = [config.name, str(config.val_fraction), source.sha256]
    tokenizer = tokenizer or _tokenizer(config, [(source, 1.0)], sha256(identity)[:16], cache)
    train, val, gzip_bpb = tokenise(config, identity, tokenizer, cache, pairs)
    sizes = Sizes(len(train.tokens), len(val.tokens), train.bytes, val.bytes, gzip_bpb, train.lost, val.lost)
    about = source.about + (f", {train.left_out:,} others omitted, without an answer to learn" if train.left_out else "")
    return Corpus(tokenizer, train.tokens, val.tokens, sizes, about, source.sha256, (train, val), copies=train.copies)


def _from_token_files(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None, cache: Path) -> Corpus:
    tokenizer = tokenizer or Tokenizer.named(config.tokenizer, "data.tokenizer", end_of_text=config.end_of_text)
    files = token_files.open_files(config)
    tokens = token_files.read(files, tokenizer, config.val_fraction, cache)
    _require_context(ctx_len, len(tokens.train), len(tokens.val))
    train, val = (round(tokens.bytes_per_token * (len(split) - 1)) for split in (tokens.train, tokens.val))
    sizes = Sizes(len(tokens.train), len(tokens.val), train, val, tokens.gzip_bpb)
    name = Path(str(config.path)).name if len(files) == 1 else f"{len(files)} files of {config.path}"
    tokenizers = {file.tokenizer for file in files} - {""}
    origin = f", tokenized with {' and '.join(sorted(tokenizers))}" if tokenizers else ""
    about = f"{name}{origin}, {count_of(tokens.documents, 'document')}, the last {100 * config.val_fraction:g} % for validation"
    return Corpus(tokenizer, tokens.train, tokens.val, sizes, about, tokens.sha256, unknown=tokens.unknown,
                  copies=tokens.copies)


def _from_text(config: DataConfig, ctx_len: int, tokenizer: Tokenizer | None, cache: Path) -> Corpus:
    source = open_source(config, cache)
    if source.at_most and not config.tokenizer.endswith(".json"):  # all other tokenizers make at most one token per byte
        _require_context(ctx_len, *source.at_most, "at most ")
    identity = [config.name, str(config.val_fraction), source.sha256]
    tokenizer = tokenizer or _tokenizer(config, [(source, 1.0)], sha256(identity)[:16], cache)
    folder = cache / f"tokens-{shards.cache_key(identity, tokenizer)}"
    manifest = shards.tokenise(source, tokenizer, folder, config.tokenize_workers)
    train, val = (shards.token_array(folder, manifest, split) for split in shards.SPLITS)
    lost = shards.lost_bytes(manifest)
    _require_context(ctx_len, len(train), len(val), lost=lost)
    sizes = Sizes(len(train), len(val), *shards.text_bytes(manifest), manifest["gzip_bpb"], *lost)
    return Corpus(tokenizer, train, val, sizes, source.about, source.sha256, copies=shards.copies(manifest),
                  repeated=manifest["repeated"], marks=shards.all_marks(manifest))


def _require_context(ctx_len: int, train: int, val: int, about: str = "", lost: tuple[Lost, Lost] = (NOTHING, NOTHING)) -> None:
    for split, tokens, split_lost in zip(("training", "validation"), (train, val), lost, strict=True):
        if tokens < ctx_len + 1:
            reason = f", and {split_lost.describe('the text')}" if split_lost.bytes else ""
            change = "lower" if split == "training" else "raise"
            raise UserError(f"the {split} text is shorter than one context: it has {about}{count_of(tokens, 'token')}, but "
                            f"model.ctx_len={ctx_len} requires at least {ctx_len + 1}{reason}. Use more text, lower "
                            f"model.ctx_len or {change} data.val_fraction")


def _tokenizer(config: DataConfig, sources: Sequence[tuple[Source, float]], key: str, cache: Path) -> Tokenizer:
    """Returns the tokenizer that `config` names. The tokenizers char and bpe are made from `sources`, or read from the cache.

    A char tokenizer contains the characters of both splits. A bpe tokenizer is trained on the training splits.
    """
    if config.tokenizer not in MADE_FROM_DATA:
        return Tokenizer.named(config.tokenizer, "data.tokenizer", end_of_text=config.end_of_text)
    path = cache / (f"bpe-{config.vocab_size}-{key}.json" if config.tokenizer == "bpe" else f"char-{key}.json")
    definition = read_json(path)
    if definition:
        return Tokenizer.from_dict(definition)
    write_bytes(path, b"")               # raises before training if the folder is not writable; read_json ignores an empty file
    log(labelled_line("loading", f"the text, to make a {config.tokenizer} tokenizer", sys.stderr))
    tokenizer = JsonTokenizer.train(_sample(sources), config.vocab_size) if config.tokenizer == "bpe" else _characters(sources)
    write_json(path, tokenizer.to_dict())
    return tokenizer


def _characters(sources: Sequence[tuple[Source, float]]) -> Tokenizer:
    characters: set[str] = set()
    for source, _ in sources:
        for document in source.documents():
            for chunk in document.chunks:
                characters.update(chunk)
    return CharTokenizer(characters)


def _sample(sources: Sequence[tuple[Source, float]]) -> Iterator[str]:
    """Yields evenly spread pieces of the training text of each source, up to the source's share of BPE_BYTES."""
    for source, share in sources:
        training = (document for document in source.documents() if not document.val)
        texts = (text for document in training for text in pieces(document.chunks, last_line_end))
        yield from islice(texts, None, None, math.ceil(source.size / (share * BPE_BYTES)))
