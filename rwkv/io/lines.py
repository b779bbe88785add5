"""Formats printed lines, with a label in a first column, and makes a model's text safe for a terminal."""

import os
import re
import textwrap
from typing import TextIO

COLUMN = 11                              # the column at which the text begins
NARROWEST = 40                           # lines are not wrapped in terminals narrower than this
LONE_RETURN = re.compile(r"\r(?!\n|\Z)")         # the text after it overwrites the line; a \n may follow in the next piece
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"} | {0x7F: "\u2421"} \
    | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")              # a terminal shows these instead


def count_of(n: float, noun: str) -> str:
    """Returns a number with its noun: 1 step, 1,500 steps, 0.5 epochs. The plural of `noun` must end in s."""
    return f"{n:,.15g} {noun}{'s' * (n != 1)}"


def labelled_line(subject: str, text: str, stream: TextIO) -> str:
    """Returns a line with a label and a text, without a newline.

    The line is wrapped if `stream` is a terminal that is too narrow.
    """
    return wrap_labelled(f"{subject:<{COLUMN}}{text}", stream)


def wrap_labelled(line: str, stream: TextIO) -> str:
    """Wraps a line that `labelled_line` made, possibly in a different process, so that all its text is in the second column.

    Returns the line unchanged if it has no label, or if the stream is not a terminal or is wide enough.
    """
    width = _terminal_width(stream)
    if width is None or len(line) <= width or width < NARROWEST or not re.fullmatch(r"\w* +", line[:COLUMN]):
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False))


def wrap_hanging(line: str, indent: int, stream: TextIO) -> str:
    """Wraps a line if the terminal is too narrow. Continuation lines are indented by `indent` columns."""
    width = _terminal_width(stream)
    if width is None or len(line) <= width or width < NARROWEST:
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False))


def wrap_text(text: str, stream: TextIO) -> str:
    """Wraps a text without columns if the terminal is too narrow."""
    width = _terminal_width(stream)
    if width is None or len(text) <= width or width < NARROWEST:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def escape_controls(text: str, stream: TextIO) -> str:
    """Makes untrusted text, such as a model's, safe to print.

    For a terminal, control characters are replaced by symbols, because they could move the cursor or change settings. For files
    and pipes the text is unchanged.
    """
    return LONE_RETURN.sub("\u240d", text).translate(CONTROLS) if stream.isatty() else text


def _terminal_width(stream: TextIO) -> int | None:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):        # io.UnsupportedOperation, for a stream without a file, is a subclass of both
        return None
