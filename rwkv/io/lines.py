"""Printed lines: a label and a text in a column of its own; numbers with their nouns."""

import os
import re
import textwrap
from typing import TextIO

COLUMN = 11                              # where the text begins
NARROWEST = 40                           # terminal width from which lines are wrapped
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"} | {0x7F: "\u2421"} \
    | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")              # shown in their place in a terminal


def counted(n: float, noun: str) -> str:
    """1 step, 1,500 steps, 0.5 epochs. noun: in the singular; the plural adds an s."""
    return f"{n:,.15g} {noun}{'s' * (n != 1)}"


def labelled(subject: str, text: str, stream: TextIO) -> str:
    """The line for `stream`, without the line end; wrapped in a narrower terminal."""
    return broken(f"{subject:<{COLUMN}}{text}", stream)


def broken(line: str, stream: TextIO) -> str:
    """A line of `labelled`, perhaps of another process, wrapped between words with its text in its column.

    Other lines are returned unchanged, as are lines for a stream that is not a terminal or wide enough.
    """
    width = _width(stream)
    if width is None or len(line) <= width or width < NARROWEST or not re.fullmatch(r"\w* +", line[:COLUMN]):
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False))


def hung(line: str, indent: int, stream: TextIO) -> str:
    """A line, wrapped between words in a narrower terminal, with continuation lines indented by `indent` columns."""
    width = _width(stream)
    if width is None or len(line) <= width or width < NARROWEST:
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False))


def wrapped(text: str, stream: TextIO) -> str:
    """A text without columns, wrapped between words in a narrower terminal."""
    width = _width(stream)
    if width is None or len(text) <= width or width < NARROWEST:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def harmless(text: str, stream: TextIO) -> str:
    """Untrusted text, such as a model's. In a terminal, control characters, which could move the cursor or change settings, are
    shown as symbols; files and pipes get the text unchanged.
    """
    return text.translate(CONTROLS) if stream.isatty() else text


def _width(stream: TextIO) -> int | None:
    """The columns of the stream's terminal; None if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):        # a stream without a file raises io.UnsupportedOperation, which is both
        return None
