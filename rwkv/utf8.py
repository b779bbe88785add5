"""Text from bytes that should be UTF-8; where they are not, a sentence that says where and what the file seems to be."""

import re

GZIP, UTF16 = b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff")
BINARY = re.compile(rb"[\0-\x07\x0e-\x1a\x1c-\x1f]")     # control characters that no text has in any encoding based on ASCII
BEGINNING = 4096                         # bytes by which a file's kind is told


def decode(content: bytes, name: str) -> str:
    """The text of `content`, without a byte order mark. Raises ValueError where it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start + len(content) - len(error.object)       # `object` lacks the byte order mark
        raise ValueError(not_utf8(name, place, content[place], content)) from None


class WrongCharacter(ValueError):
    """Character number `place` of a text cannot be encoded; `problem` says what it is."""

    def __init__(self, place: int, problem: str) -> None:
        super().__init__(f"character {place} of the text is {problem}")
        self.place, self.problem = place, problem

    def after(self, characters: int) -> "WrongCharacter":
        """The same error of a longer text, in which so many characters stand before this one."""
        return WrongCharacter(characters + self.place, self.problem)


def require_unicode(text: str) -> None:
    """Raises WrongCharacter where `text` has half a surrogate pair, as the JSON string "\\ud800" does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongCharacter(error.start, "half a surrogate pair, which UTF-8 cannot hold: remove it") from None


def not_utf8(name: str, place: int, value: int, content: bytes) -> str:
    """The sentence about byte `place` of `name`. `content`: the bytes from its beginning, or some of them."""
    return f"{name} is not UTF-8: its byte {place} is {value:#04x}; {_advice(content[:BEGINNING])}"


def _advice(beginning: bytes) -> str:
    if beginning.startswith(GZIP):
        return "it is compressed with gzip: decompress it, for instance with: gzip -dc FILE > NEW_FILE"
    if beginning.startswith(UTF16):
        return "it is UTF-16: convert it, for instance with: iconv -f utf-16 -t utf-8 FILE > NEW_FILE"
    if BINARY.search(beginning):
        return "it is a binary file: expected text in UTF-8"
    return "convert it, for instance from Latin-1 with: iconv -f latin1 -t utf-8 FILE > NEW_FILE"
