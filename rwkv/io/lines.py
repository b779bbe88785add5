"""Lines for people: a subject, and a text in a column of its own; numbers of things."""

import os
import re
import textwrap
from typing import TextIO

COLUMN = 11                              # where the texts begin
NARROWEST = 40                           # a terminal for which lines are broken
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"} | {0x7F: "\u2421"} \
    | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")              # what a terminal shows in their place


def counted(n: float, thing: str) -> str:
    """1 step, 1,500 steps, 0.5 epochs. thing: in the singular; its plural has an s more."""
    return f"{n:,.15g} {thing}{'s' * (n != 1)}"


def labelled(subject: str, text: str, stream: TextIO) -> str:
    """The line for `stream`, without the line end. For a terminal narrower than the line, `broken` breaks it."""
    return broken(f"{subject:<{COLUMN}}{text}", stream)


def broken(line: str, stream: TextIO) -> str:
    """A line that `labelled` has made, perhaps in another process, broken between words; its text stays in its column.

    Unchanged are lines of another form, and lines for a stream that is no terminal or a wide enough one.
    """
    width = _width(stream)
    if width is None or len(line) <= width or width < NARROWEST or not re.fullmatch(r"\w* +", line[:COLUMN]):
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False))


def hung(line: str, indent: int, stream: TextIO) -> str:
    """A line, broken between words for a terminal narrower than it, with its later lines indented by `indent` columns."""
    width = _width(stream)
    if width is None or len(line) <= width or width < NARROWEST:
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False))


def wrapped(text: str, stream: TextIO) -> str:
    """A text without columns, broken between words for a terminal narrower than it."""
    width = _width(stream)
    if width is None or len(text) <= width or width < NARROWEST:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def harmless(text: str, stream: TextIO) -> str:
    """A text that a model or a stranger has written. In a terminal its control characters, which could move the cursor or
    change settings, are shown as symbols; a file or another program gets the text as it is.
    """
    return text.translate(CONTROLS) if stream.isatty() else text


def _width(stream: TextIO) -> int | None:
    """The columns of the stream's terminal; None where the stream is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):        # a stream without a file raises io.UnsupportedOperation, which is both
        return None
