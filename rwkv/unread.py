"""Streams whose reader leaves: `2>&1 | head`, a tee that ends, a terminal that is closed."""

import os
from typing import Any, TextIO, cast


def unread(stream: TextIO | None) -> TextIO:
    """`stream` as long as somebody reads it; what is written to it afterwards is dropped, and the program goes on.

    None, which Python gives a program that is started without the stream, is a stream that nobody reads.
    """
    if stream is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)       # it stays open, as the one that is missing would
        stream = os.fdopen(nowhere, "w", encoding="utf-8", closefd=False)
    return cast(TextIO, _Unread(stream))


class _Unread:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            abandon(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def abandon(stream: TextIO) -> None:
    """Lets what the stream still holds, and what is written to it from now on, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
