"""The queue of requests in front of the engine, which limits how many sequences run and how many wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count

from rwkv.io.lines import count_of
from rwkv.serving.http.errors import RETRY_AFTER, STATE_GONE, ApiError
from rwkv.serving.messages import Cancel, Event, Generate, Reply, ToEngine


class Ticket:
    """The sequences of one HTTP request. Iteration yields (index of the sequence, event) until all sequences have finished."""

    def __init__(self, sequences: list[Generate]) -> None:
        self.sequences = sequences
        self.cancelled = False
        self._numbers = {sequence.id: number for number, sequence in enumerate(sequences)}
        self._events: asyncio.Queue[Event | ApiError] = asyncio.Queue()

    def put(self, event: Event | ApiError) -> None:
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        n_unfinished = len(self.sequences)
        while n_unfinished:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            if event.error is not None:
                raise api_error(event)
            n_unfinished -= event.finish_reason is not None
            yield self._numbers[event.id], event


class Queue:
    """A queue from which requests start in order of arrival. At most max_rows sequences run, and at most max_queue more wait.

    `send` sends a message to the engine.
    """

    def __init__(self, max_rows: int, max_queue: int, send: Callable[[ToEngine], None]) -> None:
        self._max_rows = max_rows
        self._max_queue = max_queue
        self._send = send
        self._ids = count()
        self._running: dict[int, Ticket] = {}            # by the sequence's id
        self._queued: deque[Ticket] = deque()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_queued(self) -> int:
        return sum(len(ticket.sequences) for ticket in self._queued)

    def submit(self, sequences: list[Generate], begun: bool = False) -> Ticket:
        """Queues sequences that start together, and returns their ticket.

        Raises ApiError 429 if the queue is full, unless the sequences belong to a request that has begun, and ApiError 400 if
        the sequences could never run together.
        """
        if len(sequences) > self._max_rows:
            raise ApiError(400, f"a request must have at most {count_of(self._max_rows, 'sequence')} (n for each prompt); "
                                f"got {len(sequences)}", "n")
        if not begun and len(sequences) > self._max_rows + self._max_queue - self.n_running - self.n_queued:
            raise ApiError(429, "the server is busy: its queue is full. Try again later", code="queue_full",
                           retry_after=RETRY_AFTER)
        ticket = Ticket([replace(sequence, id=next(self._ids)) for sequence in sequences])
        self._queued.append(ticket)
        self.start()
        return ticket

    def start(self) -> None:
        """Starts the next queued requests while there is room for all sequences of the request."""
        while self._queued and self.n_running + len(self._queued[0].sequences) <= self._max_rows:
            ticket = self._queued.popleft()
            self._running.update((sequence.id, ticket) for sequence in ticket.sequences)
            self._send(ticket.sequences)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancels a request, and returns whether the request was queued.

        A running request ends at the engine's next step. The client of a queued request gets status 503.
        """
        if ticket.cancelled:
            return False
        ticket.cancelled = True
        if ticket in self._queued:
            self._queued.remove(ticket)
            ticket.put(ApiError(503, "the request waited too long in the queue, or the server is stopping", code="not_begun",
                                retry_after=RETRY_AFTER))
            return True
        for sequence in ticket.sequences:
            if sequence.id in self._running:
                self._send(Cancel(sequence.id))
        return False

    def take_ticket(self, event: Event) -> Ticket:
        """Returns the ticket of the event's sequence, and forgets the sequence if the event is its last."""
        ticket = self._running[event.id]
        if event.finish_reason is not None or event.error is not None:
            del self._running[event.id]
        return ticket

    def tickets(self) -> set[Ticket]:
        """Returns the tickets of all unfinished requests."""
        return {*self._running.values(), *self._queued}

    def clear(self) -> None:
        self._running.clear()
        self._queued.clear()


def api_error(failed: Event | Reply) -> ApiError:
    message = failed.error or ""
    return ApiError(404, message, "state", STATE_GONE) if failed.state_gone else ApiError(400, message)
