"""Tests that the clients of OpenAI and Ollama receive the embeddings of rwkv.embed."""

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from serving_runs import Running
from test_limits import check_error

from rwkv import embed
from rwkv.generation.request import Request
from rwkv.pretrained import RWKV
from rwkv.serving.endpoints.embeddings import EmbeddingAnswer
from rwkv.serving.engine.queue import Queue, Ticket
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Event, Generate
from rwkv.tokenizer.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
TEXTS = ["A cat.", "Ein Haus", *(f"number {i}" for i in range(9))]       # there are more texts than the server's max_rows


def test_openai_s_embeddings_equal_the_library_s(client: "openai.OpenAI", model: RWKV, idle: None) -> None:
    expected = embed(model, ByteTokenizer(), TEXTS)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64", "extra_body": {"pooling": "mean"}},
                    {"dimensions": 32}):
        answer = client.embeddings.create(model="tiny", input=TEXTS, **options)
        vectors = [each.embedding for each in answer.data]
        if isinstance(vectors[0], str):    # the client decodes base64 only if it chose the encoding itself
            import base64

            vectors = [torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32).tolist() for each in vectors]
        torch.testing.assert_close(torch.tensor(vectors), expected, atol=1e-6, rtol=0)
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
    ids = [*TEXTS[0].encode()]
    for value in (TEXTS[0], ids, [ids]):
        vector = client.embeddings.create(model="tiny", input=value).data[0].embedding
        torch.testing.assert_close(torch.tensor(vector), expected[0], atol=1e-6, rtol=0)
    last = client.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"pooling": "last"}).data[0].embedding
    torch.testing.assert_close(torch.tensor(last), embed(model, ByteTokenizer(), TEXTS[:1], "last")[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("field", "value"), [
    ("input", ""), ("input", []), ("input", [""]), ("input", ["a", ""]), ("input", [[]]), ("input", [256]), ("input", [-1]),
    ("input", [["a"]]), ("input", ["a", 1]), ("input", 3), ("input", None), ("input", ["a"] * 2049), ("input", "a" * 40_000),
    ("dimensions", 16), ("dimensions", 0), ("pooling", "max"), ("encoding_format", "int8"), ("model", "other"),
    ("unknown", 1)], ids=lambda each: str(each)[:20])
def test_a_wrong_field_is_named(api: httpx.Client, field: str, value: Any) -> None:
    check_error(api.post("/embeddings", json={"input": "a", field: value}), field)


def test_ollama_s_embeddings_equal_the_library_s(server: Running, model: RWKV) -> None:
    ollama = pytest.importorskip("ollama")
    expected = embed(model, ByteTokenizer(), TEXTS)
    with ollama.Client(host=server.url) as client:
        answer = client.embed("tiny", TEXTS)
        torch.testing.assert_close(torch.tensor(answer.embeddings), expected, atol=1e-6, rtol=0)
        assert answer.prompt_eval_count == sum(map(len, TEXTS))
        vector, = client.embed("tiny:latest", TEXTS[0]).embeddings
        torch.testing.assert_close(torch.tensor(vector), expected[0], atol=1e-6, rtol=0)
        assert list(client.embeddings("tiny", TEXTS[0]).embedding) == list(vector)
        assert list(client.embed("tiny", "").embeddings) == list(client.embeddings("tiny", "").embedding) == []
        assert len(client.embed("tiny", "a" * 40_000).embeddings) == 1           # the text is cut, as Ollama cuts it
        for wrong in ({"input": "a" * 40_000, "truncate": False}, {"input": "a", "dimensions": 16},
                      {"input": "a", "model": "other"}):
            with pytest.raises(ollama.ResponseError) as error:
                client.embed(**{"model": "tiny", **wrong})
            assert 400 <= error.value.status_code < 500


def test_a_later_group_waits_in_a_full_queue_and_in_a_server_that_stops() -> None:
    """Refusing the later group would waste the work on the earlier one."""
    queue = Queue(2, 0, lambda message: None)
    sequences = [Generate(Request("a"), "", "")] * 3
    first = queue.submit(sequences[:2])
    service: Any = SimpleNamespace(engine=SimpleNamespace(submit=queue.submit, cancel=queue.cancel), tokenizer=ByteTokenizer(),
                                   config=SimpleNamespace(timeout_s=60, max_rows=2), stopping=True,
                                   metrics=SimpleNamespace(begin=lambda ids: None))

    def finish(ticket: Ticket) -> None:
        for sequence in ticket.sequences:
            queue.take_ticket(Event(sequence.id, finish_reason="stop")).put(
                Event(sequence.id, finish_reason="stop", embedding=[1.0]))
        queue.start()

    async def main() -> int:
        answer = asyncio.create_task(EmbeddingAnswer(service, first, sequences, lambda events: {})._last_events())
        finish(first)
        other = queue.submit(sequences[:2])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = queue.n_queued
        finish(other)
        finish(*queue.tickets())
        assert len(await answer) == 3
        return waiting

    assert asyncio.run(main()) == 1


def test_a_deadline_between_two_groups_gives_no_partial_answer() -> None:
    queue = Queue(2, 2, lambda message: None)
    sequences = [Generate(Request("a"), "", "")] * 3
    ticket = queue.submit(sequences[:2])
    service: Any = SimpleNamespace(engine=SimpleNamespace(cancel=queue.cancel), tokenizer=ByteTokenizer(),
                                   config=SimpleNamespace(timeout_s=60, max_rows=2))
    answer = EmbeddingAnswer(service, ticket, sequences, lambda events: {"data": len(events)})
    for sequence in ticket.sequences:
        ticket.put(Event(sequence.id, finish_reason="stop", embedding=[1.0]))
    answer._cancel()
    with pytest.raises(ApiError) as error:
        asyncio.run(answer._last_events())
    assert error.value.status == 503
