"""Tests of the queue before the engine: who starts, who waits, and who is refused."""

import pytest

from rwkv.generation.request import Request
from rwkv.serving.engine.queue import Queue
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Cancel, Event, Generate, ToEngine


def sequences(n: int) -> list[Generate]:
    return [Generate(Request("a"), "", "")] * n


def test_requests_start_in_order_and_a_full_queue_refuses() -> None:
    sent: list[ToEngine] = []
    queue = Queue(max_rows=3, max_queue=2, send=sent.append)
    first, second, third = (queue.submit(sequences(n)) for n in (2, 2, 1))
    assert sent == [first.sequences], "the third fits, but must not overtake the second"
    assert (queue.n_running, queue.n_queued) == (2, 3)
    for n, status in ((1, 429), (4, 400)):
        with pytest.raises(ApiError) as refusal:
            queue.submit(sequences(n))
        assert refusal.value.status == status
    assert queue.cancel(second)
    queue.start()
    assert sent == [first.sequences, third.sequences]
    assert not queue.cancel(first)
    assert sent[2:] == [Cancel(sequence.id) for sequence in first.sequences]
    for sequence in first.sequences:
        assert queue.take_ticket(Event(sequence.id, finish_reason="cancelled")) is first
    assert (queue.n_running, queue.tickets()) == (1, {third})
