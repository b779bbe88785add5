"""Extends uvicorn with deadlines for requests, a limit on connections, errors as JSON, and a graceful shutdown.

The extended server also refuses the requests that a server must refuse by RFC 9112. Each request gets an id, and the answer has
the id in the header x-request-id.
"""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rwkv.io.lines import count_of
from rwkv.io.signals import caught_signals
from rwkv.serving.http.errors import RETRY_AFTER, ApiError
from rwkv.serving.log import say_refused

# Seconds after which the server closes an idle connection. Proxies and clients keep connections for later requests: nginx and
# AWS's load balancers for 60 seconds, Heroku's router and Go's client for 90. A server that closes first loses the request that
# a client sends at the same moment, and the proxy answers 502.
IDLE_S = 120
UNREAD_S = 30                            # seconds after which a client that does not read its answer is disconnected
MOST_HEADERS = 64 * 1024                 # maximum bytes in a request's first line and headers
REQUEST_ID = re.compile(rb"[!-~]{1,512}")            # the request ids that a client may choose


class Parser:
    """A parser that wraps httptools' parser and ignores the header Upgrade, as section 7.8 of RFC 9110 allows.

    httptools stops at this header and would lose the request's body. Java's HttpClient sends `Upgrade: h2c` with every request.
    """

    def __init__(self, protocol: "Protocol") -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        self._inner = httptools.HttpRequestParser(self._protocol)
        self._inner.set_dangerous_leniencies(lenient_data_after_close=True)      # uvicorn sets this for pipelined requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = self._head_without_upgrade() + data[stopped.args[0]:]
                self._begin()

    def _head_without_upgrade(self) -> bytes:
        method = self._inner.get_method()
        version = self._inner.get_http_version().encode()
        if method == b"CONNECT":         # only proxies accept CONNECT
            raise httptools.HttpParserError("CONNECT")
        headers = [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self._protocol.url, version), *headers, b"", b""])


class Protocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        receive_s: seconds within which a whole request must arrive.
        most: the largest number of open connections.
    """

    receive_s = 30.0
    most = 1024

    _deadline: asyncio.TimerHandle | None = None
    _answered: Any = None                # uvicorn's cycle of the request being answered; self.cycle is the last one received
    _in_headers = True
    _received = 0
    _request_id: str | None = None       # the id of the request that is being received
    _closes_after_request = False        # the answer was sent, and the connection closes when the rest of the request arrives
    _mistake = "this is not an HTTP request"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = Parser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self.most and not self._close_an_idle_connection():
            self._refuse(ApiError(503, "the server has too many open connections. Try again later", retry_after=RETRY_AFTER))

    def _close_an_idle_connection(self) -> bool:
        """Closes the connection that is idle for the longest time, and returns False if no connection is idle."""
        idle = {other: other.timeout_keep_alive_task.when() for other in self.connections if isinstance(other, Protocol)
                and other.timeout_keep_alive_task is not None and not other.transport.is_closing()}
        if not idle:
            return False
        min(idle, key=idle.__getitem__).transport.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._received += len(data)
            if self._deadline is None:
                self._expect_request()
        super().data_received(data)
        if self._in_headers and self._received > MOST_HEADERS and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers must be at most {MOST_HEADERS} bytes in total"))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(b" \t"))    # the parser strips only leading white space

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return                       # Parser.feed_data parses the request again, without Upgrade
        self._check_head()
        self._in_headers = False
        request_id = self._ensure_request_id()
        self.scope["state"] |= {"abort": self._abort, "request_id": request_id}
        super().on_headers_complete()
        self.cycle.default_headers = [*self.cycle.default_headers, (b"x-request-id", request_id.encode())]
        self._read_rest_before_closing(self.cycle)
        if self.parser.get_http_version() == "1.0":
            self.cycle.waiting_for_100_continue = False          # HTTP/1.0 has no 100 Continue (RFC 9110, 10.1.1)
            _send_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_deadline()
        self._in_headers = True
        self._received = 0
        self._request_id = None
        self.headers = []
        super().on_message_complete()
        if self._closes_after_request:
            self.transport.close()

    def _read_rest_before_closing(self, cycle: Any) -> None:
        """Keeps the connection open, after an answer that ends it, until the rest of the request has arrived.

        A client that is still sending when the connection closes gets a broken pipe, and never reads the answer.
        """
        send = cycle.send

        async def send_and_read(message: Any) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and cycle.more_body and not cycle.keep_alive and not cycle.waiting_for_100_continue:
                self._closes_after_request = cycle.keep_alive = True
            await send(message)

        cycle.send = send_and_read

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader(0)

    def _check_head(self) -> None:
        """Raises HttpParserError for a request that a server must refuse (RFC 9112, sections 2.3, 3.2 and 6.1)."""
        version = self.parser.get_http_version()
        headers = self.headers
        hosts = [value for name, value in headers if name == b"host"]
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._mistake = "the HTTP version must be 1.0 or 1.1"
        elif len(hosts) > 1 or b"" in hosts or (version == "1.1" and not hosts):
            self._mistake = "a request must have exactly one Host header, and the Host header must not be empty"
        elif codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            self._mistake = "transfer-encoding must be chunked or absent; in HTTP/1.0, transfer-encoding must be absent"
        else:
            self._use_path()
            return
        raise httptools.HttpParserError(self._mistake)

    def _use_path(self) -> None:
        """Replaces a target that is a complete URL by the URL's path, and the header Host by the URL's host."""
        target = httptools.parse_url(self.url)
        if target.host is None:
            return
        self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")
        host = b"[%s]" % target.host if b":" in target.host else target.host
        if target.port is not None:
            host += b":%d" % target.port
        self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", host)]

    def _ensure_request_id(self) -> str:
        if self._request_id is None:
            sent = next((value for name, value in self.headers or () if name == b"x-request-id"), b"")
            self._request_id = sent.decode() if REQUEST_ID.fullmatch(sent) else f"req_{uuid4().hex}"
        return self._request_id

    def _abort(self) -> None:
        if self._answered is not None:
            self._answered.disconnected = True           # uvicorn would otherwise report an incomplete answer
        self.transport.abort()

    def _watch_reader(self, unread_before: int) -> None:
        """Closes the connection if the client has read nothing since the last call. Unread bytes would stay in memory."""
        unread = self.transport.get_write_buffer_size()
        if unread and unread == unread_before:
            self.transport.abort()
        elif unread:
            self.loop.call_later(UNREAD_S, self._watch_reader, unread)

    def send_400_response(self, msg: str) -> None:
        if self._answering:
            self.cycle.keep_alive = False            # the connection closes after this answer
        else:
            self._refuse(ApiError(400, self._mistake))

    def _expect_request(self) -> None:
        """Starts the deadline for receiving a request. Called when the connection opens, and when a later request begins."""
        self._deadline = self.loop.call_later(self.receive_s, self._end_slow_request)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_slow_request(self) -> None:
        if self._answering:
            self._expect_request()       # a pipelined next request must not end the running answer
        elif not self.transport.is_closing():
            self._refuse(ApiError(408, f"the request did not arrive within {count_of(self.receive_s, 'second')}"))

    @property
    def _answering(self) -> bool:
        """True while the application answers a request that has arrived completely."""
        return self._answered is not None and not self._answered.response_complete and not self._answered.more_body

    def _refuse(self, error: ApiError) -> None:
        """Sends the error, unless the application has begun to answer this request. Then closes the connection."""
        self._stop_deadline()
        between_requests = self._in_headers and self.cycle is not None and self.cycle.response_complete
        if self.cycle is None or between_requests or not self.cycle.response_started:
            content = msgspec.json.encode(error.body)
            retry = f"retry-after: {error.retry_after}\r\n" if error.retry_after else ""
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n" \
                   f"content-length: {len(content)}\r\n{retry}x-request-id: {self._ensure_request_id()}\r\n" \
                   "connection: close\r\n\r\n"
            self.transport.write(head.encode() + content)
            say_refused(error.status, "unread", self._ensure_request_id(), str(error))
        self.transport.close()


def _send_without_chunks(cycle: Any) -> None:
    """Prepares an answer over HTTP/1.0, which has no chunks (RFC 9112, 6.1).

    Without content-length, the end of the connection marks the end of the body.
    """
    send = cycle.send
    ends_with_connection = False

    async def send_unchunked(message: Any) -> None:
        nonlocal ends_with_connection
        if message["type"] == "http.response.start":
            ends_with_connection = all(name != b"content-length" for name, _ in message["headers"])
            if ends_with_connection:
                cycle.chunked_encoding = False
                cycle.keep_alive = False
        elif ends_with_connection:
            cycle.expected_content_length = len(message["body"])     # uvicorn compares this with the length sent
        await send(message)

    cycle.send = send_unchunked


class Server(uvicorn.Server):
    """A uvicorn server with a grace period after the first signal. A second SIGINT or SIGTERM stops the server immediately.

    Args:
        on_start: called when the server accepts connections.
        on_stop: called at each signal.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in {*caught_signals(), signal.SIGINT}:
            try:
                loop.add_signal_handler(number, self._stop, number)
            except NotImplementedError:  # Windows has no signal handlers of event loops
                signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._stop, number))
        yield

    def _stop(self, number: int) -> None:
        if self.should_exit and number in (signal.SIGINT, signal.SIGTERM):       # a closing terminal sends SIGHUP twice
            self.force_exit = True
        self.should_exit = True
        self._on_stop()
