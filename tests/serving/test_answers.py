"""Tests that an answer's items, message and chunks do not depend on where its events are cut, and that no stream is silent."""

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from models import world_vocabulary

from rwkv.generation.request import Request
from rwkv.serving import answers
from rwkv.serving.answers import COMMENT, Answer, ResponseSpec, _Choice, chat_entry
from rwkv.serving.engine.queue import Queue
from rwkv.serving.messages import Event, Generate
from rwkv.serving.responses.events import Output
from rwkv.tokenizer.tokenizers import ByteTokenizer, WorldTokenizer

CALL = '{"name":"f","arguments":{"a":"é東"}}'
PIECES = (" I look ", CALL, " now.", "\n\n", f"<tool_call>{CALL}</tool_call>", f"```json\n{CALL}\n```", "é words", '{"x":1}',
          "```py\ncode\n```", f"<think>\nhm {CALL}\n</think>\n")


def test_items_and_contents_are_the_same_whole_and_in_pieces() -> None:
    """Each text has the log-probabilities of its own tokens."""
    for seed in range(150):
        random = Random(seed)
        remaining = "".join(random.choice(PIECES) for _ in range(random.randint(1, 6))).encode()
        tokens = []
        while remaining:
            length = random.choice((1, 2, 3, 5, 8, 12))
            tokens.append(remaining[:length])
            remaining = remaining[length:]
        n = len(tokens)
        expected = items_and_content(tokens, [n])
        assert items_and_content(tokens, range(1, n + 1)) == expected, seed
        assert items_and_content(tokens, sorted({*random.sample(range(1, n + 1), min(n, 3)), n})) == expected, seed


def items_and_content(tokens: list[bytes], cuts: Any) -> tuple[list[Any], str]:
    """Returns the output items, with the tokens of each text, and the content of the message.

    Asserts that the chunks of a stream add up to the same content. `cuts` lists the numbers of tokens after which an event
    ends.
    """
    vocabulary = world_vocabulary(sorted({token for token in tokens if len(token) > 1}))
    tokenizer = WorldTokenizer(vocabulary.to_text())
    ids = [vocabulary.tokens.index(token) for token in tokens]
    logprobs = [{"token": token, "text": name, "logprob": -1.0, "top": []}
                for token, name in zip(ids, tokenizer.names(ids), strict=True)]
    shape = ResponseSpec("chatcmpl", "m", False, True, [""], 1, tokenizer, functions=["f"], thinks=True)
    whole, streamed, parsed = (_Choice(shape, 0, []) for _ in range(3))
    output, decoder, entry_decoder = Output(), tokenizer.decoder(()), tokenizer.decoder(())
    chunks = ""
    entries: list[Any] = []
    begin = 0
    for end in cuts:
        last = end == len(ids)
        text = "".join(map(decoder.push, ids[begin:end])) + (decoder.flush() if last else "")
        event = Event(0, text, logprobs[begin:end], "stop" if last else None)
        begin = end
        whole.add(event)
        for choice in streamed.pieces(event):
            chunks += choice["delta"].get("content") or ""
            entries += choice["logprobs"]["content"] if choice["logprobs"] else []
        thoughts, parts = parsed.parse(event)
        if thoughts:
            list(output.add_text("reasoning", thoughts, []))
        for part in parts:
            list(output.add_call(part.call) if part.call else
                 output.add_text("message", part.text, [chat_entry(entry, entry_decoder) for entry in part.logprobs]))
    items = [item["name"] if item["type"] == "function_call" else
             (item["type"], item["content"][0]["text"], [entry["token"] for entry in item["content"][0].get("logprobs", [])])
             for item in output.items]
    choice = whole.whole()
    content = choice["message"]["content"] or ""
    assert content == chunks
    assert choice["logprobs"]["content"] == entries
    return items, content


def test_a_silent_stream_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comment is an event of its own, and the other events are those of a stream without silence."""
    monkeypatch.setattr(answers, "COMMENT_S", 0.001)
    sent: list[bytes] = []
    queue = Queue(1, 1, lambda message: None)
    ticket = queue.submit([Generate(Request("a"), "", "")])

    async def stream() -> None:
        events = [Event(ticket.sequences[0].id, "é"), Event(ticket.sequences[0].id, "", finish_reason="stop")]

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            sent.append(message.get("body", b""))
            if message.get("body") == COMMENT and events:
                ticket.put(events.pop(0))

        spec = ResponseSpec("chatcmpl", "m", False, False, [""], 1, ByteTokenizer())
        await Answer(SimpleNamespace(cancel=queue.cancel), ticket, spec, True, 60)({}, receive, send)    # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(stream(), 30))
    assert sent.count(COMMENT) >= 2
    pieces = [piece for piece in b"".join(sent).decode().split("\n\n") if not piece.startswith(":")]
    assert [piece[:6] for piece in pieces] == ["data: "] * 4 + [""]
    assert '"content":"é"' in pieces[1]
