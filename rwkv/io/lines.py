"""Lines for people: a subject, and what is said of it in a column of its own."""

import os
import textwrap
from typing import TextIO

COLUMN = 11                              # where the texts begin
NARROWEST = 40                           # a terminal for which lines are broken


def labelled(subject: str, text: str, stream: TextIO) -> str:
    """The line for `stream`, without the line end. In a narrower terminal it is broken between words, and the text stays in
    its column.
    """
    line = f"{subject:<{COLUMN}}{text}"
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):        # not a terminal; io.UnsupportedOperation, of a stream without a file, is both
        return line
    if len(line) <= width or width < NARROWEST:
        return line
    broken = textwrap.wrap(line, width, subsequent_indent=" " * COLUMN, break_long_words=False, break_on_hyphens=False)
    return "\n".join(broken)
