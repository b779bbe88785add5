"""Wraps output streams whose reader may disappear, as with `2>&1 | head`, a tee that ends, or a terminal that closes."""

import os
from typing import Any, TextIO, cast


def discard_when_unread(stream: TextIO | None) -> TextIO:
    """Wraps an output stream so that a failed write raises no error, and later output is discarded.

    raise_unwritten() raises the error later. `stream` is None if the program was started without this stream; then all output
    is discarded.
    """
    if stream is None:
        null = os.open(os.devnull, os.O_WRONLY)          # stays open, like a standard stream
        stream = os.fdopen(null, "w", encoding="utf-8", closefd=False)
    return cast(TextIO, _Unread(stream))


class _Unread:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.problem: OSError | None = None              # the reason why output was discarded; None if the reader disappeared

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.problem = error
        abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def raise_unwritten(stream: TextIO) -> None:
    """Raises OSError if a stream from discard_when_unread() has discarded output in spite of a reader, as on a full disk."""
    if isinstance(stream, _Unread) and stream.problem is not None:
        raise OSError(stream.problem.errno, stream.problem.strerror, "standard output")


def abandon(stream: TextIO) -> None:
    """Redirects a stream's buffered and later output to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
