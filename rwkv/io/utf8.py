"""Decodes UTF-8. Error messages state the first invalid byte, the probable kind of file, and how to convert it."""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from rwkv.errors import UserError

GZIP = b"\x1f\x8b"
LFS = b"version https://git-lfs"         # how a Git LFS pointer begins
LFS_POINTER = "a Git LFS pointer, not the file itself: run git lfs pull, or download the file"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")          # the first begins with the mark of UTF-16
BINARY = re.compile(rb"[\0-\x07\x0e-\x1a\x1c-\x1f]")     # these control characters do not occur in text
TRUNCATED = "unexpected end of data"     # Python's reason for text that ends within a character
BEGINNING = 4096                         # the kind of a file is guessed from this many bytes
BLOCK = 1 << 16                          # `chunks` reads this many bytes at a time
HOLE = bytes(4096)                       # a page of a file is zero if it was never written


def read_text(path: Path, name: str) -> str:
    """Returns the text of a file, without a byte order mark. `name` is the file's name for errors.

    Raises UserError if the file is unreadable, not UTF-8 or a Git LFS pointer.
    """
    content = read_bytes(path, name)
    if content.startswith(LFS):
        raise UserError(f"{name} is {LFS_POINTER}")
    return decode(content, name)


def read_bytes(path: Path, name: str, most: int = -1) -> bytes:
    """Returns the first `most` bytes of a file, by default all. `name` is the file's name for errors.

    Raises UserError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None


def decode(content: bytes, name: str) -> str:
    """Decodes a file's content, without a byte order mark. `name` is the file's name for errors.

    Raises UserError if the content is not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start + len(content) - len(error.object)       # error.object has no byte order mark
        raise UserError(not_utf8_message(name, place, content[place], content, error.reason == TRUNCATED)) from None
    _require_no_utf16_or_utf32(content, name)
    return text


def chunks(path: Path, on_bytes: Callable[[bytes], object] = len, option: str = "data.path") -> Iterator[str]:
    """Yields the text of a file in chunks, without a byte order mark.

    Raises UserError if the file is unreadable, not UTF-8 or a Git LFS pointer, or has a page of zero bytes.

    Args:
        on_bytes: is called with each block of bytes.
        option: the option that names the path, for errors.
    """
    beginning = rest = b""
    before = 0                           # the number of bytes before `rest`
    more = True
    with open_file(path, option) as file:
        while more:
            block = file.read(BLOCK)
            on_bytes(block)
            data = rest + block
            if not beginning and data.startswith(codecs.BOM_UTF8):
                data = data[len(codecs.BOM_UTF8):]
                before = len(codecs.BOM_UTF8)
            beginning = beginning or block
            if beginning.startswith(LFS):
                raise UserError(f"{option}={path} is {LFS_POINTER}")
            more = bool(block)
            try:
                text, used = codecs.utf_8_decode(data, "strict", not more)
            except UnicodeDecodeError as error:
                raise UserError(not_utf8_message(f"{option}={path}", before + error.start, data[error.start], beginning,
                                                 error.reason == TRUNCATED)) from None
            if HOLE in data:
                raise UserError(f"{option}={path} is incomplete or not text: there are at least {len(HOLE)} zero bytes, "
                                f"starting at byte {before + data.find(HOLE)}. Copy or download the file again, or convert the "
                                "file to UTF-8 text")
            if not before:
                _require_no_utf16_or_utf32(beginning, f"{option}={path}")
            if text:
                yield text
            rest = data[used:]
            before += used


def require_no_pointer(path: Path, option: str = "data.path") -> None:
    """Raises UserError if the file is a Git LFS pointer or cannot be read."""
    if read_bytes(path, f"{option}={path}", len(LFS)) == LFS:
        raise UserError(f"{option}={path} is {LFS_POINTER}")


def open_file(path: Path, option: str = "data.path") -> BufferedReader:
    """Opens a file for reading bytes. Raises UserError, which names `option`, if it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {option}={path}: {error.strerror}") from None


def require_file(path: Path, option: str = "data.path") -> None:
    """Raises UserError if the path is not a file that can be opened repeatedly, or is a Git LFS pointer."""
    if path.exists() and not path.is_file():
        raise UserError(f"{option}={path} must be a file, not a folder or a pipe, because the program reads it twice")
    require_no_pointer(path, option)


class WrongCharacter(UserError):
    """Reports that the character at index `place` of a text cannot be encoded.

    `problem` states what the character is, and what to do.
    """

    def __init__(self, place: int, problem: str) -> None:
        super().__init__(f"character {place} of the text is {problem}")
        self.place = place
        self.problem = problem

    def shift(self, characters: int) -> "WrongCharacter":
        """Returns the same error for a longer text, in which `characters` characters precede this text."""
        return WrongCharacter(characters + self.place, self.problem)


def require_unicode(text: str) -> None:
    """Raises WrongCharacter if `text` contains half a surrogate pair, as the JSON string "\\ud800" does.

    Raises UserError if `text` is not a string.
    """
    if not isinstance(text, str):
        raise UserError(f"a text must be a string; got a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongCharacter(error.start, "half a surrogate pair, which UTF-8 cannot encode: remove this character") from None


def without_surrogates(value: Any) -> Any:
    """Returns a copy of a JSON value with each unpaired surrogate in its strings replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return [without_surrogates(item) for item in value] if isinstance(value, list) else value


def not_utf8_message(name: str, place: int, value: int, content: bytes, truncated: bool = False) -> str:
    """Returns the message for a file that is not UTF-8.

    Args:
        place: the offset of the first invalid byte.
        value: the value of the first invalid byte.
        content: the file's first bytes.
        truncated: the file ends within a character, if the file is UTF-8 at all.
    """
    cut_off = "If the file is cut off there, copy or download the file again. Otherwise: " if truncated else ""
    return f"{name} is not UTF-8: byte {place} is {value:#04x}. {cut_off}{_advice(content[:BEGINNING])}"


def _require_no_utf16_or_utf32(beginning: bytes, name: str) -> None:
    """Raises UserError for a text in UTF-16 or UTF-32 without a byte order mark. Its zero bytes are valid UTF-8."""
    if coding := _coding_without_mark(beginning):
        raise UserError(f"{name} is not text in UTF-8: many bytes are zero. {_conversion(coding)}")


def _coding_without_mark(beginning: bytes) -> str | None:
    """Returns the probable encoding of a text whose zero bytes are where UTF-16 or UTF-32 has them; None for any other text."""
    by_position = [beginning[first:BEGINNING:4] for first in range(4)]
    zeros = [part.count(0) / len(part) if part else 0.0 for part in by_position]
    places = {"utf-32le": (2, 3, 0), "utf-32be": (0, 1, 3), "utf-16le": (1, 3, 0), "utf-16be": (0, 2, 1)}
    return next((coding for coding, (first, second, other) in places.items()
                 if min(zeros[first], zeros[second]) > 0.5 and zeros[other] < 0.1), None)


def _conversion(coding: str) -> str:
    return f"The file is probably {coding.upper()}: convert it with: iconv -f {coding} -t utf-8 FILE > NEW_FILE"


def _advice(beginning: bytes) -> str:
    if beginning.startswith(GZIP):
        return "The file is compressed with gzip: decompress it, for instance with: gzip -dc FILE > NEW_FILE"
    if beginning.startswith(UTF16 + UTF32):
        width = 32 if beginning.startswith(UTF32) else 16
        return f"The file is UTF-{width}: convert it, for instance with: iconv -f utf-{width} -t utf-8 FILE > NEW_FILE"
    if coding := _coding_without_mark(beginning):
        return _conversion(coding)
    if BINARY.search(beginning):
        return "The file is binary: expected text in UTF-8"
    return "Convert the file, for instance from Latin-1 with: iconv -f latin1 -t utf-8 FILE > NEW_FILE"
