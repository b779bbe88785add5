"""Finds the beginnings of marks, such as stop strings, at the end of streamed text."""

from collections.abc import Iterable


def partial_mark_length(text: str, marks: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of a mark, or 0 if there is none."""
    return max((length for mark in marks for length in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:length])),
               default=0)
