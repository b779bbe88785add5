"""Reads request bodies: limits their size, decompresses them, and converts JSON to UTF-8."""

import asyncio
import email.message
import zlib

from starlette.requests import Request

from rwkv.config import MIB
from rwkv.serving.http.errors import ApiError

CHARSETS = {"utf-8", "us-ascii", "iso-8859-1", "windows-1252", "utf-16", "utf-16le", "utf-16be"}


async def read_json(request: Request, limit: int) -> bytes:
    """Returns the request's JSON body in UTF-8. Raises ApiError as read_body does, and for a wrong charset."""
    return _to_utf8(request, await read_body(request, limit))


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the request's body, decompressed. `limit` is the maximum size of the body in bytes, at least 1 MiB.

    Raises ApiError for a larger body, and for a content-encoding other than gzip.
    """
    too_large = ApiError(413, f"the body must be at most {limit // MIB} MiB", code="body_too_large")
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
    body = b"".join(parts)
    if not codings:
        return body
    content = await asyncio.to_thread(_gunzip, body, limit)
    if len(content) > limit:
        raise too_large
    return content


def _gunzip(body: bytes, limit: int) -> bytes:
    """Returns the content of a gzip file, cut after limit + 1 bytes. Raises ApiError for a damaged or incomplete file."""
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = inflate.decompress(body, limit + 1)
        whole = len(content) > limit or (inflate.eof and not inflate.unused_data)
    except zlib.error:
        whole = False
    if not whole:
        raise ApiError(400, "the body must be exactly one complete gzip file, because content-encoding is gzip")
    return content


def _to_utf8(request: Request, body: bytes) -> bytes:
    """Returns a JSON body in UTF-8.

    Raises ApiError for an unknown charset in content-type, and for bytes that are not valid in the charset.
    """
    header = email.message.Message()
    header["content-type"] = request.headers.get("content-type", "")
    charset = header.get_content_charset() or "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii"):
        return body
    if charset not in CHARSETS:
        raise ApiError(415, f"the charset of content-type must be one of {', '.join(sorted(CHARSETS))}; got {charset[:100]}",
                       code="unsupported_charset")
    try:
        return body.decode(charset).encode()
    except UnicodeError:
        raise ApiError(400, f"the body must be valid {charset}, which is the charset in content-type") from None
