"""Bodies of requests: their size, compression and charset. Long bodies are handled in a thread."""

import asyncio
import email.message
import zlib
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from rwkv.config import MIB
from rwkv.serving.errors import ApiError
from rwkv.serving.service import Service

LONG = 2**16                             # a body of more bytes is handled in a thread, not in the event loop
CHARSETS = {"utf-8", "us-ascii", "iso-8859-1", "windows-1252", "utf-16", "utf-16le", "utf-16be"}

Result = TypeVar("Result")


async def from_body(service: Service, request: Request, work: Callable[[Service, bytes], Result]) -> Result:
    """work(service, body). A long body is handled in a thread, so that no other request waits."""
    sent = _as_utf8(request, await read_body(service, request))
    return await asyncio.to_thread(work, service, sent) if len(sent) > LONG else work(service, sent)


async def read_body(service: Service, request: Request, least: int = 0) -> bytes:
    """The request's body, decompressed. least: bytes that are always allowed.

    Raises ApiError if it is too large, or compressed by anything but gzip.
    """
    limit = max(service.config.max_body_mib * MIB, least)
    too_large = ApiError(413, f"the body must have at most {limit // MIB} MiB", code="body_too_large")
    codings = ",".join(request.headers.getlist("content-encoding")).lower().replace("x-gzip", "gzip").split(",")
    codings = [coding.strip() for coding in codings if coding.strip() not in ("", "identity")]
    if codings not in ([], ["gzip"]):
        raise ApiError(415, f"content-encoding must be gzip or absent; got {', '.join(codings)[:100]}",
                       code="unsupported_encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
    sent = b"".join(parts)
    if not codings:
        return sent
    content = await asyncio.to_thread(_decompressed, sent, limit)
    if len(content) > limit:
        raise too_large
    return content


def _decompressed(sent: bytes, limit: int) -> bytes:
    """The content of a gzip file, cut after limit + 1 bytes. Raises ApiError if it is not whole."""
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = inflate.decompress(sent, limit + 1)
        whole = len(content) > limit or (inflate.eof and not inflate.unused_data)
    except zlib.error:
        whole = False
    if not whole:
        raise ApiError(400, "with content-encoding: gzip the body must be one whole gzip file")
    return content


def _as_utf8(request: Request, sent: bytes) -> bytes:
    """A JSON body in UTF-8. Raises ApiError if content-type names an unknown charset, or another than that of the bytes."""
    header = email.message.Message()
    header["content-type"] = request.headers.get("content-type", "")
    charset = header.get_content_charset() or "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii"):
        return sent
    if charset not in CHARSETS:
        raise ApiError(415, f"the charset of content-type must be utf-8; got {charset[:100]}", code="unsupported_charset")
    try:
        return sent.decode(charset).encode()
    except UnicodeError:
        raise ApiError(400, f"the body must be in {charset}, the charset of content-type") from None
