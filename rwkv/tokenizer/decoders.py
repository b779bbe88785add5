"""Token ids to text as they come, at constant cost each: a character is shown when it is whole, never half of it.

What is not UTF-8 becomes U+FFFD, at the earliest moment that it is certain.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rwkv.errors import UserError

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Decodes ids as they come, at constant cost each; a character is shown when it is whole."""

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none. Raises ValueError for an id outside the vocabulary."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""

    def decode(self, ids: Iterable[int]) -> str:
        """What a new decoder would show of all of them, flushed."""


class BytesDecoder:
    """A Decoder for ids that stand for bytes of UTF-8: table[id]."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._table[require_id(token, len(self._table))])

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that all of them stand for. Raises ValueError for an id outside the vocabulary."""
        ids = list(ids)
        require_id(min(ids, default=0), len(self._table))
        require_id(max(ids, default=0), len(self._table))
        return b"".join(map(self._table.__getitem__, ids))


class TextDecoder:
    """A Decoder around a function from ids to text: decodes what is pending after the ids shown last, for their context.

    Text that ends in U+FFFD is held back, since the next ids may complete it, but no more than LONGEST ids.
    """

    LONGEST = 8

    def __init__(self, decode: Callable[[list[int]], str], vocab_size: int, skipped: set[int]) -> None:
        self._decode, self._vocab_size, self._skipped = decode, vocab_size, skipped
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        require_id(token, self._vocab_size)
        if token in self._skipped:
            return ""
        self._pending.append(int(token))
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < self.LONGEST:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._pending else ""
        self._shown, self._pending = [], []
        return text

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.push(token) for token in ids]) + self.flush()

    def _new_text(self) -> str:
        before = self._decode(self._shown) if self._shown else ""
        text = self._decode(self._shown + self._pending)
        return text[len(before):] if text.startswith(before) else self._decode(self._pending)


def require_id(token: int, vocab_size: int) -> int:
    """`token`, which is one of 0..vocab_size-1, or a ValueError."""
    if not 0 <= token < vocab_size:
        raise UserError(f"token id {token} is outside the tokenizer's vocabulary, 0 to {vocab_size - 1}")
    return token


def token_bytes(token: str) -> bytes:
    """The bytes that byte-level BPE writes as `token`; a token with any other character is its own text."""
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()


def _byte_level_alphabet() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself where it is printable Latin-1, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


BYTE_OF = {character: value for value, character in enumerate(_byte_level_alphabet())}
