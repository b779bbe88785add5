"""uvicorn with what it lacks: deadlines for headers and bodies, a limit of connections, errors as JSON, and one way to stop."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rwkv.io.signals import heeded
from rwkv.serving.errors import ApiError

UNREAD_S = 30                            # seconds after which a client that has taken none of an answer is cut off
MOST_HEADERS = 64 * 1024                 # bytes of a request's first line and headers
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class Parser:
    """httptools' parser, which stops after the headers of a request that asks for another protocol and loses its body.

    A server may ignore that wish (RFC 9110, 7.8). Java's HttpClient sends it with every request (`Upgrade: h2c`).
    """

    def __init__(self, protocol: "Protocol") -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        self._inner = httptools.HttpRequestParser(self._protocol)
        self._inner.set_dangerous_leniencies(lenient_data_after_close=True)      # as uvicorn has it: requests may be pipelined

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = self._without_the_wish() + data[stopped.args[0]:]
                self._begin()

    def _without_the_wish(self) -> bytes:
        """The first line and the headers once more. Raises HttpParserError for the method CONNECT, which is a proxy's."""
        method, version = self._inner.get_method(), self._inner.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT")
        headers = [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self._protocol.url, version), *headers, b"", b""])


class Protocol(HttpToolsProtocol):
    """One connection. receive_s: seconds for a whole request to come. most: open connections."""

    receive_s, most = 30.0, 1024

    _deadline: asyncio.TimerHandle | None = None
    _answered: Any = None                # the request that is answered now; self.cycle is the one that came last
    _in_headers, _received = True, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = Parser(self)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > self.most:
            self._refuse(ApiError(503, "the server has too many connections", retry_after=1))

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
            self._refuse(ApiError(431, f"the headers are longer than {MOST_HEADERS} bytes"))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return                       # the parser comes again, without the wish
        self._in_headers = False
        self.scope["state"]["abort"] = self._abort
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_deadline()
        self._in_headers, self._received = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader(0)

    def _abort(self) -> None:
        """Cuts the connection in the middle of an answer."""
        if self._answered is not None:
            self._answered.disconnected = True           # or uvicorn reports an answer that is not complete
        self.transport.abort()

    def _watch_reader(self, unread_before: int) -> None:
        """Cuts the connection where what was written is not read: the transport would keep it for as long as the client is."""
        unread = self.transport.get_write_buffer_size()
        if unread and unread == unread_before:
            self.transport.abort()
        elif unread:
            self.loop.call_later(UNREAD_S, self._watch_reader, unread)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not an HTTP request"))

    def _expect_request(self) -> None:
        """From the first byte, or the beginning of the connection, until the request's last byte."""
        self._deadline = self.loop.call_later(self.receive_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self._answering:
            self._expect_request()       # what has come since is no reason to cut off an answer
        elif not self.transport.is_closing():
            self._refuse(ApiError(408, f"the request did not come within {self.receive_s:g} seconds"))

    @property
    def _answering(self) -> bool:
        """Whether a request that came whole is being answered."""
        return self._answered is not None and not self._answered.response_complete and not self._answered.more_body

    def _refuse(self, error: ApiError) -> None:
        """Answers without the application, unless it has begun to answer this request, and closes the connection."""
        self._stop_deadline()
        between_requests = self._in_headers and self.cycle is not None and self.cycle.response_complete
        if self.cycle is None or between_requests or not self.cycle.response_started:
            content = msgspec.json.encode(error.body)
            retry = f"retry-after: {error.retry_after}\r\n" if error.retry_after else ""
            head = f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\ncontent-type: application/json\r\n" \
                   f"content-length: {len(content)}\r\n{retry}connection: close\r\n\r\n"
            self.transport.write(head.encode() + content)
        self.transport.close()


class Server(uvicorn.Server):
    """Ends at the first signal that asks for it within the grace time, at a second SIGINT or SIGTERM at once. on_stop is called
    at the first.

    on_start is called when connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start, self._on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in {*heeded(), signal.SIGINT}:
            loop.add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: int) -> None:
        if self.should_exit and number in (signal.SIGINT, signal.SIGTERM):       # a closing terminal sends two SIGHUP
            self.force_exit = True
        self.should_exit = True
        self._on_stop()
