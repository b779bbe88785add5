"""The engine's process as the HTTP process sees it: starts it, queues requests, and delivers the events of each request.

The code runs in the event loop, except for two threads: one receives from the engine's process and one sends to it, so that
neither a long message nor a long step delays HTTP.
"""

import asyncio
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.io.signals import end_of
from rwkv.serving.errors import STATE_GONE, ApiError
from rwkv.serving.messages import (
    Cancel,
    Download,
    Drop,
    Event,
    Failed,
    Generate,
    Look,
    Ready,
    Reply,
    SavedState,
    Seen,
    Step,
    ToEngine,
    Upload,
)

RETRY_AFTER = 1                          # seconds
ENDED = "the engine has ended; the server's log says why"

Work = Callable[[Connection, ServeConfig], None]         # the main function of the engine's process


def _refusal(of: Event | Reply) -> ApiError:
    message = of.error or ""
    return ApiError(404, message, "state", STATE_GONE) if of.state_gone else ApiError(400, message)


class Ticket:
    """The texts of one HTTP request. Iterating yields (number of the text, event) until all texts have ended."""

    def __init__(self, texts: list[Generate]) -> None:
        self.texts = texts
        self.cancelled = False
        self._numbers = {text.id: number for number, text in enumerate(texts)}
        self._events: asyncio.Queue[Event | ApiError] = asyncio.Queue()

    def put(self, event: Event | ApiError) -> None:
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        left = len(self.texts)
        while left:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            if event.error is not None:
                raise _refusal(event)
            left -= event.finish_reason is not None
            yield self._numbers[event.id], event


class RemoteEngine:
    """Starts the engine's process, whose main function is `work`. At most max_rows texts are in it; max_queue more may wait.

    states: the states that clients keep, by id; the process holds their content. adapters: as in Ready. failed: why the process
    has ended; None while it runs. observe: called with each Step, for the metrics. report: called with the reason if the
    process ends by itself, after all requests have their error.
    """

    def __init__(self, config: ServeConfig, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()
        self._config = config
        self._ids = count()
        self._running: dict[int, Ticket] = {}            # by the text's id
        self._waiting: deque[Ticket] = deque()
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.states: dict[str, SavedState] = {}
        self.adapters: dict[str, SavedState | None] = {}
        self.failed: str | None = None
        self.observe: Callable[[Step], Any] = lambda step: None
        self.report: Callable[[str], Any] = lambda reason: None
        self._held = (0, 0, 0)           # of the last Step: cache_bytes, cache_entries, state_bytes
        self._attached = False

    def wait_until_ready(self) -> Ready:
        """Blocks until the model is loaded. Raises UserError for a user's mistake, RuntimeError for any other failure."""
        try:
            message = self._connection.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended while it loaded the model; perhaps the machine had too little "
                               "memory and the system ended it") from None
        if isinstance(message, Failed):
            raise UserError(message.reason) if message.mistake else RuntimeError(message.reason)
        assert isinstance(message, Ready)
        self.states = {state.id: state for state in message.states}
        self.adapters = message.adapters
        return message

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to deliver events, in this loop."""
        self._attached = True
        Thread(target=self._receive, args=(loop,), daemon=True).start()
        Thread(target=self._send, daemon=True).start()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return sum(len(ticket.texts) for ticket in self._waiting)

    def submit(self, texts: list[Generate]) -> Ticket:
        """A ticket for these texts. Raises ApiError: 429 where the queue is full, 503 where there is no engine."""
        self.require_engine()
        room = self._config.max_rows + self._config.max_queue - self.n_running - self.n_waiting
        if len(texts) > self._config.max_rows:
            raise ApiError(400, f"one request is for at most {self._config.max_rows} texts; this one is for {len(texts)}", "n")
        if len(texts) > room:
            raise ApiError(429, "the server is busy: its queue is full", code="queue_full", retry_after=RETRY_AFTER)
        ticket = Ticket([replace(text, id=next(self._ids)) for text in texts])
        self._waiting.append(ticket)
        self._start_waiting()
        return ticket

    async def upload(self, state: SavedState, content: bytes, layout: str | None = None) -> SavedState:
        """Keeps a state file's content under the id of `state`. Raises ApiError if no model of this server can use it."""
        found: SavedState = await self._ask(Upload(next(self._ids), state, content, layout))
        return found

    async def download(self, state: SavedState) -> bytes:
        """The content of a state's file. Raises ApiError where the state is gone."""
        content: bytes = await self._ask(Download(next(self._ids), state))
        return content

    def drop(self, state: SavedState) -> None:
        """Frees the state's memory, and deletes its file."""
        if self.states.pop(state.id, None) is not None:
            self._outbox.put(Drop(state.id))

    async def look(self, new: tuple[str, ...], lost: tuple[str, ...]) -> None:
        """Takes up states that another server has written, and drops those whose files it has deleted; as in Look."""
        await self._ask(Look(next(self._ids), new, lost))

    async def _ask(self, message: Upload | Download | Look) -> Any:
        self.require_engine()
        self._asked[message.id] = answer = asyncio.get_running_loop().create_future()
        self._outbox.put(message)
        return await answer

    def require_engine(self) -> None:
        if self.failed is not None:
            raise ApiError(503, ENDED, code="engine_ended")

    def cancel(self, ticket: Ticket) -> None:
        """Ends the ticket's texts at the engine's next step. A ticket that still waits is answered with 503."""
        if ticket.cancelled:
            return
        ticket.cancelled = True
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            ticket.put(ApiError(503, "the request has waited too long, or the server is stopping", code="not_begun",
                                retry_after=RETRY_AFTER))
            self.observe(Step([Event(text.id, finish_reason="cancelled") for text in ticket.texts], *self._held))
            self._start_waiting()                        # the next tickets may need less room
            return
        for text in ticket.texts:
            if text.id in self._running:
                self._outbox.put(Cancel(text.id))

    def cancel_all(self) -> None:
        for ticket in {*self._running.values(), *self._waiting}:
            self.cancel(ticket)

    def close(self) -> None:
        """Ends the process. It is killed if it still loads the model, and if a signal interrupts the wait for its end."""
        try:
            if self._attached:
                self._outbox.put(None)
                self._process.join(10)
        finally:
            self._process.kill()
            self._process.join()

    def _start_waiting(self) -> None:
        while self._waiting and self.n_running + len(self._waiting[0].texts) <= self._config.max_rows:
            ticket = self._waiting.popleft()
            self._running.update((text.id, ticket) for text in ticket.texts)
            self._outbox.put(ticket.texts)

    def _deliver(self, step: Step) -> None:
        for event in step.events:
            ticket = self._running[event.id]
            if event.state is not None:
                self.states[event.state.id] = event.state
                if ticket.cancelled:     # no client learns its id
                    self.drop(event.state)
                    event.state = None
            if event.finish_reason is not None or event.error is not None:
                del self._running[event.id]
            ticket.put(event)
        for state_id in step.gone:
            self.states.pop(state_id, None)
        self._held = step.cache_bytes, step.cache_entries, step.state_bytes
        self.observe(step)
        self._start_waiting()

    def _answer(self, reply: Reply) -> None:
        answer = self._asked.pop(reply.id)
        if isinstance(reply.value, SavedState):
            self.states[reply.value.id] = reply.value
        if isinstance(reply.value, Seen):
            self.states.update((state.id, state) for state in reply.value.new)
            for state_id in reply.value.gone:
                self.states.pop(state_id, None)
        if answer.cancelled():           # the client has gone
            if isinstance(reply.value, SavedState):
                self.drop(reply.value)
        elif reply.error is not None:
            answer.set_exception(_refusal(reply))
        else:
            answer.set_result(reply.value)

    def _fail(self, reason: str) -> None:
        self.failed = reason
        for answer in self._asked.values():
            if not answer.cancelled():
                answer.set_exception(ApiError(500, ENDED, code="engine_ended"))
        self._asked.clear()
        for ticket in {*self._running.values(), *self._waiting}:
            ticket.put(ApiError(500, ENDED, code="engine_ended"))
        self._running.clear()
        self._waiting.clear()
        self.report(reason)

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):     # the loop is closed: the server ends
            try:
                while not isinstance(message := self._connection.recv(), Failed):
                    loop.call_soon_threadsafe(self._answer if isinstance(message, Reply) else self._deliver, message)
                reason = message.reason
            except (EOFError, OSError):
                self._process.join(1)
                reason = end_of(self._process.exitcode or 0)
            loop.call_soon_threadsafe(self._fail, reason)

    def _send(self) -> None:
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                return                   # _receive fails too and reports it
            if message is None:
                return
