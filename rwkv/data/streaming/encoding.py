"""Tokenises the documents of a stream (streams.py). The stream's first data.val_documents rows are the validation split."""

import itertools
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rwkv.config import DataConfig
from rwkv.data.documents.copies import fingerprint
from rwkv.data.documents.separators import LINE_ENDS, marks
from rwkv.data.shards import BATCH, Piece, dtype_of, encode_batch
from rwkv.data.streaming.streams import Position, Row, Stream, open_stream
from rwkv.data.token_array import TokensInMemory
from rwkv.errors import UserError
from rwkv.io.lines import count_of, labelled_line
from rwkv.tokenizer.lost_bytes import NOTHING, LossCounter, Lost
from rwkv.tokenizer.split import pieces, safe_split
from rwkv.tokenizer.tokenizers import Tokenizer

AT_ONCE = 1024                           # texts per call of the tokenizer
MOST_SKIPPED = 10                        # a run may skip the larger of this many rows and MOST_SKIPPED_FRACTION of all
MOST_SKIPPED_FRACTION = 1e-3


@dataclass(frozen=True)
class Streamed:
    """The training part of a stream.

    Attributes:
        begins: the position of the first training row, which follows the validation rows.
        held_out: the fingerprints of the validation texts.
        tokens: an estimate of the tokens in all training rows; None if unknown.
    """

    config: DataConfig
    sha256: str
    begins: Position
    held_out: frozenset[int]
    tokens: float | None


class HeldOut(NamedTuple):
    """The validation split of a stream. `bytes` is the size of the text. The other fields are as in rwkv/data/prepare.py."""

    tokens: TokensInMemory
    bytes: int
    lost: Lost
    gzip_bpb: float
    marks: Mapping[str, int]


def hold_out(config: DataConfig, tokenizer: Tokenizer) -> tuple[Stream, Streamed, HeldOut]:
    """Reads the validation rows. Returns the stream, the training part and the validation split.

    Raises UserError if no row follows the validation rows.
    """
    stream = open_stream(config)
    reader = stream.read()
    rows = list(itertools.islice(reader, config.val_documents))
    begins, read = reader.position(), reader.size
    if next(reader, None) is None:
        raise UserError(f"data.path={config.path} has {count_of(len(rows), 'document')}, but the first "
                        f"data.val_documents={config.val_documents} are for validation, so none are left for training. Lower "
                        "data.val_documents")
    encoded = TextEncoder(stream, tokenizer, config.separator).encode(rows)
    texts = [text for row in encoded for text in row.texts]
    documents = [ids for row in encoded for ids in row.ids]
    ids = np.concatenate([np.empty(0, dtype_of(tokenizer)), *documents])
    lost = LossCounter(tokenizer).count(texts, [document[1:].tolist() for document in documents]) if texts else NOTHING
    size = sum(len(text.encode()) for text in texts)
    val = HeldOut(TokensInMemory(ids, np.cumsum([0, *map(len, documents)])[:-1]), size, lost,
                  8 * len(zlib.compress("\0".join(texts).encode(), 9, 31)) / max(size, 1), marks(texts))
    left = None                          # unknown, even if a decompressor has read a small file to its end
    if stream.size is not None and 0 < read < stream.size:
        left = len(ids) * (stream.size / read - 1)
    return stream, Streamed(config, stream.sha256, begins, frozenset(fingerprint([text]) for text in texts), left), val


class Encoded(NamedTuple):
    """The texts of the documents in a row, and the ids of each document, which begin with end_of_text."""

    texts: list[str]
    ids: list[np.ndarray]


class TextEncoder:
    """Tokenises the documents in rows.

    Args:
        held_out: the fingerprints of the documents to omit.
        skips: True if a few rows without a readable text are skipped, with a line on standard error. An error at such a row
            would end a run of days, which could not be resumed, because a resumed run requires unchanged data.
    """

    def __init__(self, stream: Stream, tokenizer: Tokenizer, separator: str | None,
                 held_out: frozenset[int] = frozenset(), skips: bool = False) -> None:
        self.stream = stream
        self.tokenizer = tokenizer
        self.separator = separator
        self.held_out = held_out
        self.skips = skips
        self.n_rows = 0
        self.skipped: set[str] = set()   # the locations of the skipped rows, some of which are read in each epoch
        self.split = safe_split(tokenizer)
        self.dtype = dtype_of(tokenizer)

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        texts = [self._documents(row) for row in rows]
        parts = [Piece(piece, False, number == 0, row.where, 0, before)
                 for row, documents in zip(rows, texts, strict=True) for text in documents
                 for number, (piece, before) in enumerate(self._pieces_with_offsets(text))]
        ids: list[list[np.ndarray]] = []         # the ids of each document's pieces
        for piece, encoded in zip(parts, self._encode(parts), strict=True):
            if piece.starts_document:
                ids.append([np.array([self.tokenizer.end_of_text], self.dtype)])
            ids[-1].append(np.array(encoded, self.dtype))
        whole = iter([np.concatenate(document) for document in ids])
        return [Encoded(documents, list(itertools.islice(whole, len(documents)))) for documents in texts]

    def _documents(self, row: Row) -> list[str]:
        """Returns the texts in a row that are neither empty nor held out."""
        self.n_rows += 1
        try:
            text = self.stream.text(row)
        except UserError as error:
            self._skip(row, error)
            return []
        texts = [text] if self.separator is None else [part.strip(LINE_ENDS) for part in text.split(self.separator)]
        return [text for text in texts if text and not (self.held_out and fingerprint([text]) in self.held_out)]

    def _skip(self, row: Row, error: UserError) -> None:
        """Reports a row to skip, once. Raises `error` if too many rows have been skipped."""
        if row.where in self.skipped:
            return
        self.skipped.add(row.where)
        if not self.skips or len(self.skipped) > max(MOST_SKIPPED, MOST_SKIPPED_FRACTION * self.n_rows):
            raise error
        print(labelled_line("skipped", str(error), sys.stderr), file=sys.stderr, flush=True)

    def _pieces_with_offsets(self, text: str) -> Iterator[tuple[str, int]]:
        before = 0
        for piece in pieces([text], self.split) if len(text) > BATCH else [text]:
            yield piece, before
            before += len(piece)

    def _encode(self, parts: list[Piece]) -> Iterator[list[int]]:
        for start in range(0, len(parts), AT_ONCE):
            yield from encode_batch(parts[start:start + AT_ONCE], self.tokenizer)
