"""Decodes token ids to text, one id at a time, at constant cost per id. A character is returned once all its bytes are known.

Bytes that are not UTF-8 become U+FFFD as soon as no later byte can complete them. Some vocabularies drop the space before the
first word of a text. So a decoder whose text continues earlier ids must first receive these ids (continue_after).
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from rwkv.errors import UserError

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4                    # bytes
LAST_IDS = 128                           # this many last ids of a text suffice to decode a continuation


class Decoder(Protocol):
    """Decodes one text, one id at a time."""

    def continue_after(self, ids: Sequence[int]) -> None:
        """Makes later ids continue the text of `ids`. Of this text, only an incomplete last character is returned later."""

    def push(self, token: int) -> str:
        """Adds an id and returns the text that it completes, possibly "".

        Raises UserError if the id is outside the vocabulary.
        """

    def flush(self) -> str:
        """Ends the text. Returns U+FFFD if an incomplete character is pending, otherwise ""."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text that push and flush would return for all `ids` together. Raises UserError as push does."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the tokens' bytes, which may not be UTF-8, or the text in UTF-8 if tokens are not byte strings."""

    def names(self, tokens: Sequence[int], before: Sequence[int]) -> list[str]:
        """Returns the text that each of `tokens` alone would add after the ids `before`. Incomplete characters are U+FFFD."""

    def bytes_of(self, token: int) -> bytes | None:
        """Returns the bytes of a token, which may be part of a character, or None if tokens are not byte strings."""


class BytesDecoder:
    """A Decoder for a vocabulary whose tokens are byte strings. `table` contains the bytes of each id."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def continue_after(self, ids: Sequence[int]) -> None:
        last = (token for token in reversed(ids) if self._table[require_id(token, len(self._table))])
        for token in reversed([*islice(last, LONGEST_CHARACTER)]):
            self.push(token)

    def push(self, token: int) -> str:
        return self._utf8.decode(self._table[require_id(token, len(self._table))])

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def decode(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(self.decode_bytes(ids), final=True)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        ids = list(ids)
        require_id(min(ids, default=0), len(self._table))
        require_id(max(ids, default=0), len(self._table))
        return b"".join(map(self._table.__getitem__, ids))

    def names(self, tokens: Sequence[int], before: Sequence[int]) -> list[str]:
        return [self._table[require_id(token, len(self._table))].decode("utf-8", "replace") for token in tokens]

    def bytes_of(self, token: int) -> bytes:
        return self._table[require_id(token, len(self._table))]


class TextDecoder:
    """A Decoder for a vocabulary whose tokens are not byte strings.

    A token's text may depend on the token before it, so each call decodes the pending ids together with the ids whose text was
    returned last. Text that ends in U+FFFD stays pending, for at most LONGEST ids, because the next id may complete the
    character. (The library's DecodeStream would keep such text pending for ever, and has no flush.)

    Args:
        decode: the library's function from ids to text.
        skipped: the ids that decode to nothing.
    """

    LONGEST = 8                          # ids
    BEFORE = 64                          # earlier ids affect neither later nor pending text

    def __init__(self, decode: Callable[[list[int]], str], vocab_size: int, skipped: set[int]) -> None:
        self._decode = decode
        self._vocab_size = vocab_size
        self._skipped = skipped
        self._returned: list[int] = []
        self._pending: list[int] = []

    def continue_after(self, ids: Sequence[int]) -> None:
        for token in self._last_with_text(ids, self.BEFORE):
            self.push(token)

    def push(self, token: int) -> str:
        require_id(token, self._vocab_size)
        if token in self._skipped:
            return ""
        self._pending.append(int(token))
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < self.LONGEST:
            return ""
        self._returned = self._pending
        self._pending = []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._pending else ""
        self._returned = []
        self._pending = []
        return text

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.push(token) for token in ids]) + self.flush()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def bytes_of(self, token: int) -> None:
        return None

    def names(self, tokens: Sequence[int], before: Sequence[int]) -> list[str]:
        returned = self._last_with_text(before, 1)
        return ["" if require_id(token, self._vocab_size) in self._skipped else self._text_after(returned, [int(token)])
                for token in tokens]

    def _last_with_text(self, ids: Sequence[int], count: int) -> list[int]:
        return [*islice((int(token) for token in reversed(ids) if token not in self._skipped), count)][::-1]

    def _new_text(self) -> str:
        return self._text_after(self._returned, self._pending)

    def _text_after(self, returned: list[int], pending: list[int]) -> str:
        before = self._decode(returned) if returned else ""
        text = self._decode(returned + pending)
        return text[len(before):] if text.startswith(before) else self._decode(pending)


def require_id(token: int, vocab_size: int) -> int:
    """Returns `token`. Raises UserError unless 0 <= token < vocab_size."""
    if not 0 <= token < vocab_size:
        raise UserError(f"the token id {token} is outside the tokenizer's vocabulary, which has the ids 0 to {vocab_size - 1}")
    return token


def token_bytes(token: str) -> bytes:
    """Returns the bytes of a token in byte-level BPE's alphabet. A token with any other character is encoded as UTF-8."""
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()


# In byte-level BPE's alphabet, printable Latin-1 bytes stand for themselves. The other bytes are U+0100 and up.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_OF = {chr(value): value for value in PRINTABLE}
BYTE_OF |= {chr(0x100 + place): value for place, value in enumerate(value for value in range(256) if value not in PRINTABLE)}
