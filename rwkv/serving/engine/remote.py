"""Starts the engine's process for the HTTP process, sends messages to this process, and delivers the events.

The code runs in the event loop, except for two threads. One thread receives messages from the engine's process and the other
sends messages to it, so that neither a long message nor a long step delays HTTP.
"""

import asyncio
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.io.signals import describe_exit
from rwkv.serving.engine.queue import Queue, Ticket, api_error
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import (
    Download,
    Drop,
    Event,
    Failed,
    FolderChanges,
    Generate,
    Ready,
    Reply,
    ReplyValue,
    SavedState,
    Step,
    SyncFolder,
    ToEngine,
    Upload,
)

STOPPED = "the engine has stopped: see the server's log"

Work = Callable[[Connection, ServeConfig], None]         # the main function of the engine's process


class RemoteEngine:
    """The engine in its own process, whose main function is `work`.

    At most config.max_rows sequences run, and config.max_queue more are queued.

    Attributes:
        states: the records of clients' saved states, by id.
        adapters: for each adapter, the state from which the adapter's sequences begin, as in messages.Ready.
        failed: the reason why the process has ended; None while the process runs.
        observe: called with each Step, for the metrics.
        report: called with the reason if the process ends unexpectedly, after all requests have received their error.
    """

    def __init__(self, config: ServeConfig, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote_end = context.Pipe()
        self._process = context.Process(target=work, args=(remote_end, config), daemon=True)
        self._process.start()
        remote_end.close()
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._queue = Queue(config.max_rows, config.max_queue, self._outbox.put)
        self._ids = count()
        self._replies: dict[int, asyncio.Future[ReplyValue]] = {}       # by message id
        self.states: dict[str, SavedState] = {}
        self.adapters: dict[str, SavedState | None] = {}
        self.failed: str | None = None
        self.observe: Callable[[Step], object] = lambda step: None
        self.report: Callable[[str], object] = lambda reason: None
        self._memory = (0, 0, 0)         # cache_bytes, cache_entries and state_bytes of the last Step
        self._attached = False

    def wait_until_ready(self) -> Ready:
        """Blocks until the model is loaded. Raises UserError for a user's mistake, and RuntimeError for any other failure."""
        try:
            message = self._connection.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended while it was loading the model. The system may have killed the "
                               "process for lack of memory") from None
        if isinstance(message, Failed):
            raise UserError(message.reason) if message.mistake else RuntimeError(message.reason)
        assert isinstance(message, Ready)
        self.states = {state.id: state for state in message.states}
        self.adapters = message.adapters
        return message

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts to deliver events in this event loop."""
        self._attached = True
        Thread(target=self._receive, args=(loop,), daemon=True).start()
        Thread(target=self._send, daemon=True).start()

    @property
    def n_running(self) -> int:
        return self._queue.n_running

    @property
    def n_queued(self) -> int:
        return self._queue.n_queued

    def submit(self, sequences: list[Generate], begun: bool = False) -> Ticket:
        """Queues sequences as Queue.submit does. Raises ApiError 503 if the engine has stopped."""
        self.require_engine()
        return self._queue.submit(sequences, begun)

    async def upload(self, state: SavedState, content: bytes, layout: str | None = None) -> SavedState:
        """Saves the content of a state file under the id of `state`. Raises ApiError if no model can use the state."""
        saved = await self._request(Upload(next(self._ids), state, content, layout))
        assert isinstance(saved, SavedState)
        return saved

    async def download(self, state: SavedState) -> bytes:
        """Returns the content of a state file with this state. Raises ApiError if the state is gone."""
        content = await self._request(Download(next(self._ids), state))
        assert isinstance(content, bytes)
        return content

    def drop(self, state: SavedState) -> None:
        """Frees the state's memory, and deletes the state's file."""
        if self.states.pop(state.id, None) is not None:
            self._outbox.put(Drop(state.id))

    async def sync(self, new: tuple[str, ...], lost: tuple[str, ...]) -> None:
        """Adds states that another server has written, and drops states whose files another server has deleted.

        Args:
            new: names of unknown files.
            lost: ids of states without a file.
        """
        await self._request(SyncFolder(next(self._ids), new, lost))

    async def _request(self, message: Upload | Download | SyncFolder) -> ReplyValue:
        self.require_engine()
        self._replies[message.id] = future = asyncio.get_running_loop().create_future()
        self._outbox.put(message)
        return await future

    def require_engine(self) -> None:
        if self.failed is not None:
            raise ApiError(503, STOPPED, code="engine_ended")

    def cancel(self, ticket: Ticket) -> None:
        """Cancels the ticket's sequences as Queue.cancel does, and counts queued sequences in the metrics."""
        if self._queue.cancel(ticket):
            self.observe(Step([Event(sequence.id, finish_reason="cancelled") for sequence in ticket.sequences], *self._memory))
            self._queue.start()                          # a smaller ticket behind the cancelled one may fit now

    def cancel_all(self) -> None:
        for ticket in self._queue.tickets():
            self.cancel(ticket)

    def close(self) -> None:
        """Ends the engine's process. Kills the process if it is still loading the model, or if a signal interrupts the wait."""
        try:
            if self._attached:
                self._outbox.put(None)
                self._process.join(10)
        finally:
            self._process.kill()
            self._process.join()

    def _deliver(self, step: Step) -> None:
        for event in step.events:
            ticket = self._queue.take_ticket(event)
            if event.state is not None:
                self.states[event.state.id] = event.state
                if ticket.cancelled:     # no client would learn the state's id
                    self.drop(event.state)
                    event.state = None
            ticket.put(event)
        for state_id in step.gone:
            self.states.pop(state_id, None)
        self._memory = step.cache_bytes, step.cache_entries, step.state_bytes
        self.observe(step)
        self._queue.start()

    def _resolve(self, reply: Reply) -> None:
        future = self._replies.pop(reply.id)
        if isinstance(reply.value, SavedState):
            self.states[reply.value.id] = reply.value
        if isinstance(reply.value, FolderChanges):
            self.states.update((state.id, state) for state in reply.value.new)
            for state_id in reply.value.gone:
                self.states.pop(state_id, None)
        if future.cancelled():           # the client has disconnected
            if isinstance(reply.value, SavedState):
                self.drop(reply.value)
        elif reply.error is not None:
            future.set_exception(api_error(reply))
        else:
            future.set_result(reply.value)

    def _fail(self, reason: str) -> None:
        self.failed = reason
        for future in self._replies.values():
            if not future.cancelled():
                future.set_exception(ApiError(500, STOPPED, code="engine_ended"))
        self._replies.clear()
        for ticket in self._queue.tickets():
            ticket.put(ApiError(500, STOPPED, code="engine_ended"))
        self._queue.clear()
        self.report(reason)

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):     # raised by call_soon_threadsafe if the server has closed the event loop
            try:
                while not isinstance(message := self._connection.recv(), Failed):
                    loop.call_soon_threadsafe(self._resolve if isinstance(message, Reply) else self._deliver, message)
                reason = message.reason
            except (EOFError, OSError):
                self._process.join(1)
                reason = describe_exit(self._process.exitcode or 0)
            loop.call_soon_threadsafe(self._fail, reason)

    def _send(self) -> None:
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                return                   # _receive fails too, and reports the failure
            if message is None:
                return
