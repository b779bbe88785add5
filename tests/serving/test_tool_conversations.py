"""Tests of conversations with tools in the template g1, by the official client against the real server, whole and streamed.

The model writes a fixed answer after each question. It recognises the question by one token, because the vocabulary has a token
for the end of each prompt. Answers are divided into tokens at random, also within tags, JSON and characters.
tests/chat/test_calls.py has all forms of calls.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from models import writing
from serving_runs import client_of, serving

if TYPE_CHECKING:
    import openai

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "array", "items": {"type": "object"}}}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "It tells.", "parameters": PLACE}}
         for name in ("weather", "time_of_day")]
OSLO = '{"name":"weather","arguments":{"city":"Oslo"}}'
NAMED = {"type": "function", "function": {"name": "weather"}}
TIME = '{"name": "time_of_day", "arguments": {}}'
WEATHER = ("weather", {"city": "Oslo"})
DAY: tuple[str, dict[str, Any]] = ("time_of_day", {})


class Conversation(NamedTuple):
    """A request with an answer, which the client receives as `content`, `calls` and `thoughts`, the reasoning_content.

    The prompt ends with `given`, the beginning of the answer, and the model writes `written`. `options` are those of the
    request. `reason` is the finish reason: by default tool_calls if there are calls, and otherwise stop.
    """

    written: str
    content: str
    calls: Sequence[tuple[str, Any]] = ()
    reason: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    given: str = ""
    thoughts: str = ""


CONVERSATIONS = {
    "a call in a fence": Conversation(f" ```json\n{OSLO}\n```", "", [WEATHER]),
    "prose around a call": Conversation(f" I look.\n\n{OSLO}\n\nOne moment.", "I look.\nOne moment.", [WEATHER]),
    "several tags, none closed": Conversation(f" <tool_call>{TIME}\n<tool_call>{OSLO}\n<tool_call>{TIME}", "",
                                              [DAY, WEATHER, DAY]),
    "several, one is wanted": Conversation(f" {TIME}\n{OSLO} and more", "", [DAY], options={"parallel_tool_calls": False}),
    "several, one is wanted and the rest is cut": Conversation(f" {OSLO}\n{TIME[:9]}", "", [WEATHER], "tool_calls",
                                                               {"parallel_tool_calls": False, "max_tokens": 11}),
    "unicode": Conversation(' {"name": "weather", "arguments": {"city": "Ålesund ☔ \\u96e8 東京", "ü": "🌧"}}', "",
                            [("weather", {"city": "Ålesund ☔ 雨 東京", "ü": "🌧"})]),
    "cut off after a call": Conversation(f" [{OSLO}]\n{OSLO[:-3]}", OSLO[:-3], [WEATHER], "length"),
    "the function is named": Conversation('{"city":"Oslo"}}\n```\n\nMore.', "", [WEATHER], options={"tool_choice": NAMED},
                                          given=' ```json\n{"name":"weather","arguments":'),
    "a call is required": Conversation('time_of_day","arguments":{}}\n```\n', "", [DAY], options={"tool_choice": "required"},
                                       given=' ```json\n{"name":"'),
    "thoughts before a call": Conversation(f" <think>\nDo I say {OSLO} now?\n</think>\n```json\n{TIME}\n```", "", [DAY],
                                           thoughts=f"Do I say {OSLO} now?"),
    "thoughts that are asked for": Conversation(f">\nOr {TIME}?\n</think>\n{OSLO}", "", [WEATHER], given=" <think",
                                                thoughts=f"Or {TIME}?", options={"extra_body": {"enable_thinking": True}}),
    "thoughts that do not end": Conversation(f" <think>\nIs it {OSLO}", "", reason="length", thoughts=f"Is it {OSLO}"),
    "words between calls": Conversation(f" First:\n{OSLO} then:\n<tool_call>{TIME}</tool_call>\n\ndone.",
                                        "First:\nthen:\ndone.", [WEATHER, DAY]),
}
NAMES = [*CONVERSATIONS]
MODEL = "rwkv7-g1k-tiny"                 # models of this series have the template g1
RESULT = "Q99 rain"                      # the prompt ends with this text if it is a tool's result
LAST = " It rains in Oslo."


def pieces_of(text: bytes, used: set[bytes], random: Random) -> list[bytes]:
    """Returns the text cut into pieces at random. No piece is in `used`, to which the pieces are added."""
    pieces = []
    while text:
        length = random.randint(2, max(2, len(text) // 3))
        while text[:length] in used and length < len(text):
            length += 1
        if text[length:] in used:
            length = len(text)
        assert text[:length] not in used
        pieces.append(text[:length])
        used.add(text[:length])
        text = text[length:]
    return pieces


def question(name: str) -> str:
    return f"Q{NAMES.index(name):02}"


def rows() -> dict[str, list[bytes]]:
    """Returns for each question a token for the prompt's end, the answer's tokens, and a token that begins another turn."""
    random = Random(1)
    used = {bytes([value]) for value in range(256)}
    by_question = {question(name): conversation for name, conversation in CONVERSATIONS.items()}
    return {prompt: [f"{prompt}\n\nAssistant:{conversation.given}".encode(),
                     *pieces_of(conversation.written.encode(), used, random), f"\n\nUser: After {prompt}".encode()]
            for prompt, conversation in {**by_question, RESULT: Conversation(LAST, LAST)}.items()}


ROWS = rows()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator["openai.OpenAI"]:
    folder = tmp_path_factory.mktemp("conversations")
    model, tokenizer = writing(*ROWS.values(), ends=False, n_embd=128)
    path = folder / f"{MODEL}.safetensors"
    model.save_pretrained(path, tokenizer)
    with serving(folder, f"checkpoint={path}") as server, client_of(server) as openai_client:
        yield openai_client


def request_of(name: str) -> dict[str, Any]:
    """Returns the request of a conversation.

    If the conversation's reason is `length`, the limit of tokens ends the answer where the written text ends.
    """
    length = len(ROWS[question(name)]) - 2
    return {"model": MODEL, "messages": [{"role": "user", "content": question(name)}], "temperature": 0, "tools": TOOLS,
            "max_tokens": length + (CONVERSATIONS[name].reason != "length"), **CONVERSATIONS[name].options}


Outcome = tuple[str, str, list[tuple[str, str]], str]    # thoughts, content, names and arguments of calls, the finish reason


def ask_whole(client: "openai.OpenAI", **request: Any) -> Outcome:
    choice, = client.chat.completions.create(**request).choices
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    assert (choice.message.content is None) == (bool(calls) and not choice.message.content)
    return (getattr(choice.message, "reasoning_content", ""), choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in calls], choice.finish_reason)


def ask_streamed(client: "openai.OpenAI", **request: Any) -> Outcome:
    thoughts, content, calls, reason = "", "", list[tuple[str, str]](), ""
    for chunk in client.chat.completions.create(**request, stream=True):
        choice, = chunk.choices
        thoughts += getattr(choice.delta, "reasoning_content", "")
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or []:
            if part.index == len(calls):
                assert part.id
                assert part.type == "function"
                calls.append(("", ""))
            name, arguments = calls[part.index]
            calls[part.index] = name + (part.function.name or ""), arguments + (part.function.arguments or "")
    return thoughts, content, calls, reason


@pytest.mark.programs
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_whole_and_streamed(client: "openai.OpenAI", name: str) -> None:
    conversation, request = CONVERSATIONS[name], request_of(name)
    thoughts, content, calls, reason = ask_whole(client, **request)
    assert (thoughts, content) == (conversation.thoughts, conversation.content)
    assert [(function, json.loads(arguments)) for function, arguments in calls] == [*conversation.calls]
    assert reason == (conversation.reason or ("tool_calls" if conversation.calls else "stop"))
    assert ask_streamed(client, **request) == (thoughts, content, calls, reason)


@pytest.mark.programs
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(("name", "items"), [
    ("a call in a fence", [WEATHER[0]]), ("prose around a call", ["I look.", WEATHER[0], "One moment."]),
    ("several tags, none closed", [DAY[0], WEATHER[0], DAY[0]]),
    ("words between calls", ["First:", WEATHER[0], "then:", DAY[0], "done."]),
    ("thoughts before a call", [f"Do I say {OSLO} now?", DAY[0]])])
def test_the_items_of_a_response_are_in_the_order_of_generation(client: "openai.OpenAI", name: str, items: list[str],
                                                                logprobs: bool) -> None:
    """The response is whole and streamed, and each message has the log-probabilities of its own tokens."""
    request: dict[str, Any] = {
        "model": MODEL, "input": question(name), "temperature": 0, "max_output_tokens": 50,
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],                   # type: ignore[dict-item]
        **({"include": ["message.output_text.logprobs"], "top_logprobs": 1} if logprobs else {})}
    responses = [client.responses.create(**request), list(client.responses.create(**request, stream=True))[-1].response]
    for response in responses:
        assert [item.name if item.type == "function_call" else item.content[0].text for item in response.output] == items
        for item in response.output:
            if item.type == "message" and logprobs:
                assert "".join(entry.token for entry in item.content[0].logprobs) == item.content[0].text


@pytest.mark.programs
def test_a_conversation_continues_with_a_tool_s_result(client: "openai.OpenAI") -> None:
    request = request_of("a call in a fence")
    first = client.chat.completions.create(**request).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": RESULT}
    request["messages"] += [first.model_dump(exclude_none=True), result]
    assert ask_whole(client, **request) == ask_streamed(client, **request) == ("", LAST.strip(), [], "stop")
