"""Whose pages may use a server without a key: what a browser sends for a page of another site is refused.

Such a page can send requests to this machine, which have its origin in their headers. And it can let a name of its own point to
this machine (DNS rebinding), so that the browser takes the answers for its own: then the name is in the header Host.
"""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from rwkv.config import ServeConfig
from rwkv.serving.errors import ApiError

LOCAL = ("127.0.0.1", "localhost", "::1")        # host= of a server for this machine alone


def check_origin(config: ServeConfig, headers: Mapping[str, str]) -> None:
    """Raises ApiError for what a page of another site sends, unless a key is asked for or cors= names the site."""
    if config.api_key or "*" in config.cors:
        return
    host = headers.get("host", "")
    origin = headers.get("origin")
    allowed = [_place(one) for one in config.cors]
    if config.host in LOCAL and host and host not in allowed and not _is_near(host):
        raise ApiError(403, f"this server answers for this machine alone, not for {host[:100]!r}: see host=, api_key= and "
                            "cors= of serve.py", code="wrong_host")
    if origin is not None and _place(origin) not in (host, *allowed):
        raise ApiError(403, f"pages of {origin[:100]!r} may not use this server: see cors= of serve.py", code="wrong_origin")


def _place(origin: str) -> str:
    """HOST:PORT of http://HOST:PORT."""
    return origin.partition("://")[2]


def _is_near(host: str) -> bool:
    """Whether nobody else's page can have the name: an address, or a name of this machine or its network."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", socket.gethostname().lower()) or name.endswith((".localhost", ".local", ".internal"))
