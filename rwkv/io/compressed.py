"""Reads compressed files with the suffix .gz or .zst. The suffix .zst requires the package zstandard."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from rwkv.errors import UserError

COMPRESSED = (".gz", ".zst")
BROKEN = (OSError, EOFError, zlib.error)         # a damaged or truncated file raises one of these
BLOCK = 1 << 17                          # the number of compressed bytes that are read at a time
LARGEST_WINDOW = 1 << 31                 # bytes; the window of zstd --long=31. By default the package accepts only 128 MiB


def decompressed_stream(raw: BinaryIO, path: Path) -> BinaryIO:
    """Returns a stream of the decompressed content of `raw`, or `raw` itself without the suffix .gz or .zst.

    `raw` is a file that is open for reading bytes. Reading a damaged file raises one of BROKEN. Raises UserError for .zst if
    the package is not installed.
    """
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(raw, path), BLOCK))
    return raw


class _Zstandard(io.RawIOBase):
    """Reads consecutive zstandard frames, and detects a truncated frame, which the package's own reader does not."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path} requires the package zstandard: pip install zstandard") from None
        self._library = zstandard
        self._raw = raw
        self._frame: Any = None          # the decompressor of the current frame
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(BLOCK)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last zstandard frame is cut off")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(self._compressed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size
