"""Reads streams of documents during training (data.streaming): lines of JSON files, or rows of a dataset.

    stream = open_stream(config)
    reader = stream.read(position)       # None: from the beginning
    row = next(reader); reader.position()                          # the next row's position, where another reader can begin

A stream is always read in the same order. Several files are sorted by name, with numbers in numerical order, so that part-2
comes before part-10. The text of a row is extracted only when it is needed, because extraction is most of the work.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rwkv.config import DataConfig
from rwkv.data.files import natural_key
from rwkv.data.sources import hf, jsonl
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.compressed import BROKEN, decompressed_stream
from rwkv.io.json_lines import parse
from rwkv.io.lines import count_of
from rwkv.io.utf8 import open_file

ENDS = 1 << 16                           # bytes to hash at the beginning and at the end of a file, to identify the file
Position = list[Any]                     # a reader's position, as lists, dicts, strings and numbers


class Row(NamedTuple):
    """A line of JSON, or the value of a dataset's column, which may be anything. `where` is the location for error messages."""

    content: Any
    where: str

    def encode(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        return ("" if self.content is None else str(self.content)).encode(errors="surrogatepass")

    def size(self) -> int:
        """Returns the number of bytes or characters of a text, and 0 for anything else."""
        return len(self.content) if isinstance(self.content, (bytes, str)) else 0


class Reader(Iterator[Row]):
    """Yields rows in order, beginning at a position. `size` is the number of bytes read so far, counted as in Stream.size."""

    size = 0

    @abstractmethod
    def position(self) -> Position:
        """Returns the position of the next row."""


class Stream(ABC):
    """A stream of rows.

    Attributes:
        about: one line about the stream, for messages.
        sha256: a hash that identifies the data and is computed without reading all of them.
        size: the total number of bytes; None if unknown.
    """

    about: str
    sha256: str
    size: int | None = None

    @abstractmethod
    def read(self, position: Position | None = None) -> Reader:
        """Returns a reader that begins at `position`, or at the first row."""

    @abstractmethod
    def text(self, row: Row) -> str:
        """Returns the text of a row. Raises UserError if the row has no text."""


def open_stream(config: DataConfig) -> Stream:
    return JsonLines(config) if config.name == "jsonl" else Dataset(config)


class JsonLines(Stream):
    """A stream of the lines of one or several files.

    A position is the number of a file, and the numbers of bytes and lines before the position in this file.
    """

    def __init__(self, config: DataConfig) -> None:
        path = str(config.path)
        named = sorted(jsonl.files(path), key=lambda pair: natural_key(pair[0]))
        self.files = [file for _, file in named]
        self.field = config.field
        self.about = f"{self.files[0].name if len(named) == 1 else f'{len(named)} files of {path}'}, field {config.field}"
        self.size = sum(file.stat().st_size for file in self.files)
        self.sha256 = sha256([config.field, *(part for name, file in named for part in (name, ends_of(file)))])

    def read(self, position: Position | None = None) -> Reader:
        return LineReader(self.files, *(position or (0, 0, 0)))

    def text(self, row: Row) -> str:
        return jsonl.text_in(parse(row.encode(), row.where), self.field, row.where)


class LineReader(Reader):
    def __init__(self, files: list[Path], number: int, offset: int, line: int) -> None:
        self._place = [number, offset, line]
        # _rows must not refer to the reader: the cycle would leave the file open until Python's garbage collector runs
        self._rows = _rows(files, self._place)

    def __next__(self) -> Row:
        row, self.size = next(self._rows)
        return row

    def position(self) -> list[int]:
        return [*self._place]


def _rows(files: list[Path], place: list[int]) -> Iterator[tuple[Row, int]]:
    """Yields each row after `place`, with the number of bytes read so far. `place` becomes the position of the next row."""
    before = sum(file.stat().st_size for file in files[:place[0]])
    while place[0] < len(files):
        path = files[place[0]]
        if jsonl.is_list(path):
            raise UserError(f"data.streaming conflicts with {path}, because the file is a JSON list. Write one object per "
                            "line, or omit data.streaming")
        with open_file(path) as raw:
            file = decompressed_stream(raw, path)
            _skip_bytes(file, raw, place[1], path)
            for line in jsonl.read_lines(file, path):
                place[1] += len(line)
                place[2] += 1
                if line.strip():
                    yield Row(line, f"{path}, line {place[2]}"), before + (place[1] if file is raw else raw.tell())
            before += os.fstat(raw.fileno()).st_size
        place[:] = [place[0] + 1, 0, 0]


def _skip_bytes(file: BinaryIO, raw: BinaryIO, offset: int, path: Path) -> None:
    """Skips the first `offset` bytes of a file's decompressed content. `raw` is the file itself."""
    if file is raw:
        raw.seek(offset)
        return
    try:
        while offset and (block := file.read(min(offset, ENDS))):
            offset -= len(block)
    except BROKEN as error:
        raise UserError(f"data.path={path} cannot be read: {error}") from None


def ends_of(path: Path) -> str:
    """Returns a hash of the size, the beginning and the end of a file."""
    hashed = hashlib.sha256()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        hashed.update(f"{size} ".encode() + file.read(ENDS))
        file.seek(max(0, size - ENDS))
        hashed.update(file.read(ENDS))
    return hashed.hexdigest()


class Dataset(Stream):
    """A stream of the rows of a dataset of the library `datasets`, which also provides the positions."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.about = f"{hf.describe(config)}, column {config.field}"
        files = hf.local_files(str(config.path))
        named = [part for name, file in files for part in (name, ends_of(file))] or [str(config.path)]
        self.sha256 = sha256([config.split, config.field, *filter(None, [config.config]), *named])

    def read(self, position: Position | None = None) -> Reader:
        return DatasetReader(self.config, position)

    def text(self, row: Row) -> str:
        if row.content is not None and not isinstance(row.content, str):
            raise UserError(f"{row.where}: the column {self.config.field!r} must contain a string; got {str(row.content)[:60]}")
        return row.content or ""


class DatasetReader(Reader):
    def __init__(self, config: DataConfig, position: Position | None) -> None:
        self._config = config
        self._data = hf.open_streamed(config)
        self._number = 0
        if position is not None:
            self._number, state = position
            self._data.load_state_dict(state)
        self._rows = iter(self._data)

    def __next__(self) -> Row:
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:       # the library raises exceptions of many classes
            raise UserError(f"reading data.path={self._config.path} failed after {count_of(self._number, 'row')}: "
                            f"{hf.reason(error)}. Continue the run with resume=auto") from None
        self._number += 1
        return Row(row[self._config.field], f"{self._config.path}, row {self._number - 1}")

    def position(self) -> Position:
        return [self._number, self._data.state_dict()]
