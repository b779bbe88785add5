"""Text that comes in pieces."""

from collections.abc import Iterable


def begun_at_end(text: str, marks: Iterable[str]) -> int:
    """The length of the longest end of `text` with which one of the marks begins; 0 where there is none."""
    return max((length for mark in marks for length in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:length])),
               default=0)
