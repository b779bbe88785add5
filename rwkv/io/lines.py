"""Lines for people: a subject, and a text in a column of its own."""

import os
import re
import textwrap
from typing import TextIO

COLUMN = 11                              # where the texts begin
NARROWEST = 40                           # a terminal for which lines are broken


def labelled(subject: str, text: str, stream: TextIO) -> str:
    """The line for `stream`, without the line end. In a terminal that is narrower it is broken as by `broken`."""
    return broken(f"{subject:<{COLUMN}}{text}", stream)


def broken(line: str, stream: TextIO) -> str:
    """A line that `labelled` has made, in another process too: broken between words, with the text in its column. Other lines,
    and lines for no terminal or a wide one, stay as they are.
    """
    width = _width(stream)
    if width is None or len(line) <= width or width < NARROWEST or not re.fullmatch(r"\w* +", line[:COLUMN]):
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False))


def _width(stream: TextIO) -> int | None:
    """The columns of the stream's terminal; None where it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):        # io.UnsupportedOperation, of a stream without a file, is both
        return None
