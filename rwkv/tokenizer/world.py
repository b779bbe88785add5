"""Reads and applies the RWKV World vocabulary, rwkv_vocab_v20230424. Each step of encoding takes the longest matching token.

Every single byte is a token, so every text can be encoded. 486 of the 65,529 tokens are not valid UTF-8 by themselves. Id 0 has
no token and ends a text. Source of the file format and of the rule: ChatRWKV, tokenizer/rwkv_tokenizer.py.

The Rust library pyrwkv-tokenizer, if installed, encodes long texts. The Python code here produces the same ids, but is 30 times
slower.
"""

import ast
import logging
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from rwkv.errors import UserError

NAME = "rwkv_vocab_v20230424"
PACKAGES = ("pyrwkv-tokenizer", "rwkv")                  # packages on PyPI that contain NAME.txt
LAST_ID = 0xFFFF
SHORT = 2 ** 16                          # characters: 30 ms in Python, while loading the library takes 300 ms and 230 MB
PYRWKV = PACKAGES[0]
PLAIN = re.compile(r"""([0-9]+) (?:'([^'\\]+)'|"([^"\\]+)") ([0-9]+)""").fullmatch      # most lines have no escapes
SLOW = (f"{PYRWKV} is not installed, so the World vocabulary encodes about 30 times slower. With Python 3.13 or earlier, run "
        f"pip install {PYRWKV}")


class Vocabulary:
    """The World vocabulary. `tokens` contains the bytes of each id's token, or b"" for an unused id such as 0."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self._ids = {token: index for index, token in enumerate(self.tokens) if token}
        self._lengths = _lengths_by_prefix(self._ids)

    @classmethod
    def parse(cls, text: str, source: str) -> "Vocabulary":
        """Parses the text of a vocabulary file. Raises UserError with the number of the first invalid line.

        A line has an id, a token as a Python literal (str or bytes), and the length of the token in bytes.
        """
        tokens: dict[int, bytes] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            entry = _parse_line(line)
            if entry is None or not 1 <= entry[0] <= LAST_ID or entry[0] in tokens:
                if line.strip():
                    raise _line_error(line, entry, f"line {number} of {source}")
                continue
            tokens[entry[0]] = entry[1]
        values = {*tokens.values()}
        missing = [value for value in range(256) if bytes([value]) not in values]
        if missing:
            raise UserError(f"{source} is not a World vocabulary, or is truncated: {len(missing)} of the 256 single-byte "
                            f"tokens are missing, and the first missing byte is {missing[0]:#04x}")
        return cls([tokens.get(index, b"") for index in range(1 + max(tokens))])

    def has(self, index: int) -> bool:
        """Returns True if the id stands for a token."""
        return index < len(self.tokens) and bool(self.tokens[index])

    def to_text(self) -> str:
        """Returns the text of a vocabulary file for `parse`. Equal vocabularies have equal texts."""
        return "".join(f"{index} {_literal(token)} {len(token)}\n" for index, token in enumerate(self.tokens) if token)

    def encode(self, text: str) -> list[int]:
        if not self._uses_library(len(text)):
            return self._match(text.encode())
        ids: list[int] = self._library.encode(text)
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text. The library encodes the texts in parallel if they are long enough together.

        In a forked child, the library encodes one text at a time, because parallel work would wait for the parent's threads.
        """
        if not self._uses_library(sum(map(len, texts))):
            return [self._match(text.encode()) for text in texts]
        if _process_with_threads() != os.getpid():
            return [self._library.encode(text) for text in texts]
        ids: list[list[int]] = self._library.encode_batch(texts)
        return ids

    def _match(self, data: bytes) -> list[int]:
        ids: list[int] = []
        position = 0
        while position < len(data):
            for length in self._lengths.get(data[position:position + 2], (1,)):
                if data[position:position + length] in self._ids:
                    break
            ids.append(self._ids[data[position:position + length]])
            position += length
        return ids

    def _uses_library(self, characters: int) -> bool:
        """Returns True if the library is installed, and is already loaded or worth loading for a text of this length."""
        return ("_library" in vars(self) or characters > SHORT) and self._library is not None

    def drop_library(self) -> None:
        """Frees the memory of the library. The next long text loads the library again."""
        vars(self).pop("_library", None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_library"}     # the library cannot be pickled

    @cached_property
    def _library(self) -> Any:
        _process_with_threads()
        try:
            from pyrwkv_tokenizer import WorldTokenizer
        except ImportError:
            logging.getLogger(__name__).warning(SLOW)
            return None
        lines = []
        for index, token in enumerate(self.tokens):
            if token:                    # hexadecimal needs no further escaping
                escaped = token.hex(" ").replace(" ", "\\x")
                lines.append(f"{index} b'\\x{escaped}' {len(token)}\n")
        try:
            with tempfile.TemporaryDirectory() as folder:        # the library accepts only a path
                path = Path(folder) / "vocabulary.txt"
                path.write_text("".join(lines), encoding="utf-8")
                return WorldTokenizer(str(path))
        except OSError as error:         # a read-only system or a full disk
            logging.getLogger(__name__).warning(f"{PYRWKV} requires a temporary file, which cannot be written ({error}), so "
                                                "the World vocabulary encodes about 30 times slower")
            return None


def installed_vocabulary() -> Path:
    """Returns the path of the vocabulary's file in an installed package. The package is not imported.

    Raises UserError if no installed package has the file.
    """
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or []:
                path = Path(str(file.locate()))
                if path.name == f"{NAME}.txt" and path.is_file():
                    return path
    raise UserError(f"the World vocabulary requires {NAME}.txt, but no installed package contains this file. Pass the path of "
                    f'the file instead of "world". With Python 3.13 or earlier, you can also run pip install {PYRWKV}')


@cache
def _process_with_threads() -> int:
    """Returns the id of the process in which the library may have started its threads: the first that has loaded it."""
    return os.getpid()


def _parse_line(line: str) -> tuple[int, bytes] | None:
    plain = PLAIN(line)                  # this match is much faster than evaluating the literal
    try:
        if plain:
            index = plain[1]
            token = (plain[2] or plain[3]).encode()
            length = plain[4]
        else:
            index, rest = line.strip().split(" ", 1)
            literal, length = rest.rsplit(" ", 1)
            value = ast.literal_eval(literal.strip())
            token = value if isinstance(value, bytes) else value.encode()
        return (int(index), token) if len(token) == int(length) > 0 else None
    except (ValueError, SyntaxError, AttributeError, RecursionError, MemoryError):
        return None


def _line_error(line: str, entry: tuple[int, bytes] | None, where: str) -> UserError:
    if entry is None:
        return UserError(f"{where} must have an id, a Python string and the length of the string in bytes, such as 3 '\\x02' "
                         f"1, because the file is read as a World vocabulary; got {line[:60]!r}")
    if not 1 <= entry[0] <= LAST_ID:
        return UserError(f"{where} must have an id from 1 to {LAST_ID}; got {entry[0]}")
    return UserError(f"{where} has the id {entry[0]}, but an earlier line has the same id")


def _lengths_by_prefix(tokens: dict[bytes, int]) -> dict[bytes, tuple[int, ...]]:
    """Returns for each pair of first bytes the lengths of the tokens that begin with it, in descending order. The last is 1."""
    lengths: defaultdict[bytes, set[int]] = defaultdict(lambda: {1})
    for token in tokens:
        lengths[token[:2]].add(len(token))
    return {prefix: tuple(sorted(prefix_lengths, reverse=True)) for prefix, prefix_lengths in lengths.items()}


def _literal(token: bytes) -> str:
    """Returns the token as an ASCII Python literal, which is the same in every version of Python."""
    try:
        return ascii(token.decode())
    except UnicodeDecodeError:
        return repr(token)
