"""Checks the headers Origin and Host, to protect a server without API keys from other sites' web pages.

A web page of any site can send requests to this machine. The header Origin names the site. The site's owner can also make the
site's domain point to this machine (DNS rebinding), so that the browser lets the page read the answers. The header Host then
names the domain.
"""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from rwkv.config import ServeConfig
from rwkv.serving.http.errors import ApiError

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # with these values of host=, only this machine can reach the server


def check_origin(config: ServeConfig, headers: Mapping[str, str]) -> None:
    """Raises ApiError for a request from a web page of another site, unless the server has API keys or cors= names the site."""
    if config.api_key or "*" in config.cors:
        return
    host = headers.get("host", "")
    origin = headers.get("origin")
    allowed = [_host(site) for site in config.cors]
    if config.host in LOCAL_HOSTS and host and host not in allowed and not _is_local(host):
        raise ApiError(403, f"the Host header must name this machine; got {host[:100]!r}. To allow other hosts, set host=, "
                            "api_key= or cors= of serve.py", code="wrong_host")
    if origin is not None and _host(origin) not in (host, *allowed):
        raise _wrong_origin(origin)


def check_preflight(config: ServeConfig, headers: Mapping[str, str]) -> None:
    """Raises ApiError if a browser asks whether a page of another site may send a request, unless cors= names the site.

    Browsers show their users only that the page was refused, so the log must have the reason.
    """
    origin = headers.get("origin")
    if origin is not None and _host(origin) != headers.get("host") and not {origin, "*"} & {*config.cors}:
        raise _wrong_origin(origin)


def _wrong_origin(origin: str) -> ApiError:
    return ApiError(403, f"web pages from {origin[:100]!r} may not use this server. To allow this site, add its address to "
                         "cors= of serve.py", code="wrong_origin")


def _host(origin: str) -> str:
    return origin.partition("://")[2]


def _is_local(host: str) -> bool:
    """Returns True for an IP address and for a name of this machine or network. No site on the internet has such a name."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", socket.gethostname().lower()) or name.endswith((".localhost", ".local", ".internal"))
