"""Tests the APIs of Ollama and Anthropic with their official clients on a real server, and compares the texts with OpenAI's."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from models import writing
from serving_runs import Running, serving
from test_tools import ROWS, TEMPLATE, TOOLS

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai

pytestmark = pytest.mark.programs
QUESTION: list[Any] = [{"role": "user", "content": "once"}]
THOUGHTS = ["4", "<think>", "\nOne, ", "two.", "</think>\n", "A €", " and", " an end"]
ODD = '{"n": 1180591620717411303424, "s": "\\ud800"}'       # a number of more than 64 bits, and half a character
CALL_WITH_ODD = ["6", '<tool_call>{"name": "weather", ', f'"arguments": {ODD}}}</tool_call>']
LINES = ["7", "a\u2028b", "\u2029c\u0085d ", '<tool_call>{"name": "weather",\n ',
         '"arguments": {\n\t"city": "x\u2028y"\r\n}}</tool_call> ']
TOOL: list[Any] = [{"name": tool["function"]["name"], "description": "It tells.",
                    "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yields a server whose model writes calls of tools and thoughts after a question's last token."""
    folder = tmp_path_factory.mktemp("clients")
    model, tokenizer = writing(*([piece.encode() for piece in row] for row in (*ROWS, THOUGHTS, CALL_WITH_ODD, LINES)))
    model.save_pretrained(folder / "tiny.safetensors", tokenizer)
    (folder / "template.jinja").write_text(TEMPLATE + "{# reasoning_content #}")
    with serving(folder, "checkpoint=tiny.safetensors", "template=template.jinja") as running:
        yield running


CLIENTS = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _clients() -> Iterator[None]:
    """Imports the clients only in the process that runs these tests, because importing takes long, and closes the clients."""
    for package in ("ollama", "anthropic"):
        pytest.importorskip(package)
    with CLIENTS:
        yield


def ollama_client(server: Running) -> "ollama.Client":
    import ollama

    return CLIENTS.enter_context(ollama.Client(host=server.url))


def anthropic_client(server: Running, **options: Any) -> "anthropic.Anthropic":
    import anthropic

    return CLIENTS.enter_context(anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=60,
                                                     **{"api_key": "none", **options}))


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_same_by_every_interface(server: Running, client: "openai.OpenAI", stream: bool) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
    request: dict[str, Any] = {"model": "tiny", "messages": QUESTION}
    expected = client.chat.completions.create(**request, **options, max_tokens=40, stop="q").choices[0].message.content
    more: dict[str, Any] = {"stream": stream, "options": {**options, "num_predict": 40, "stop": ["q"]}}
    by_ollama = ollama_client(server).chat(**request, **more)
    by_generate = ollama_client(server).generate("tiny", "once", **more)
    fields = {**request, "max_tokens": 40, "stop_sequences": ["q"], "extra_body": options}
    if stream:
        with anthropic_client(server).messages.stream(**fields) as events:
            by_anthropic = "".join(events.text_stream)
        texts = ["".join(part.message.content for part in by_ollama), "".join(part.response for part in by_generate),
                 by_anthropic]
    else:
        by_anthropic = anthropic_client(server).messages.create(**fields).content[0].text
        texts = [by_ollama.message.content, by_generate.response, by_anthropic]
    assert texts == [expected] * 3
    assert expected


@pytest.mark.parametrize("stream", [False, True])
def test_raw_generation_is_a_completion_and_continues_from_its_context(server: Running, client: "openai.OpenAI",
                                                                       stream: bool) -> None:
    ollama = ollama_client(server)
    options = {"seed": 3, "num_predict": 12}

    def generate(prompt: str, **more: Any) -> tuple[str, Any]:
        parts = ollama.generate("tiny:latest", prompt, options=options, stream=stream, **more)
        parts = list(parts) if stream else [parts]
        return "".join(part.response for part in parts), parts[-1]

    text, last = generate("once", raw=True)
    expected = client.completions.create(model="tiny", prompt="once", seed=3, max_tokens=12)
    assert (text, last.prompt_eval_count, last.eval_count) == (
        expected.choices[0].text, expected.usage.prompt_tokens, expected.usage.completion_tokens)
    assert (last.done, last.done_reason) == (True, expected.choices[0].finish_reason)
    again, _ = generate(" and", raw=True, context=last.context)
    assert again == client.completions.create(model="tiny", prompt=[*last.context, *b" and"], seed=3,
                                              max_tokens=12).choices[0].text
    _, turn = generate("hello")
    second, end = generate("more", context=turn.context)
    turns = [*turn.context, *b"\n\nUser: more\n\nAssistant:"]
    assert second == client.completions.create(model="tiny", prompt=turns, seed=3, max_tokens=12).choices[0].text.lstrip()
    assert end.context[:len(turns)] == turns


def test_ollama_lists_shows_and_loads(g1: Running) -> None:
    ollama = ollama_client(g1)
    listed, = ollama.list().models
    running, = ollama.ps().models
    assert listed.model == running.model == "tiny:latest"
    assert len(listed.digest) == 64
    assert running.expires_at.year > 2300
    description = ollama.show("tiny")
    assert {"completion", "tools", "thinking"} == set(description.capabilities)
    assert description.modelinfo["general.parameter_count"] > 0
    assert description.details.family == description.modelinfo["general.architecture"]
    for answer in (ollama.generate("tiny", keep_alive=-1), ollama.chat("tiny:latest", [])):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert ollama.generate("tiny", keep_alive=0).done_reason == "unload"
    assert httpx.get(f"{g1.url}/api/version").json()["version"]
    assert ollama.pull("tiny").status == "success"


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_has_thoughts_and_calls(writer: Running, stream: bool) -> None:
    def message(question: str, **more: Any) -> tuple[str, str, list[Any]]:
        parts = ollama_client(writer).chat("tiny", [{"role": "user", "content": question}], stream=stream,
                                       options={"temperature": 0, "num_predict": 50}, **more)
        messages = [part.message for part in (parts if stream else [parts])]
        calls = [(call.function.name, call.function.arguments) for each in messages for call in each.tool_calls or ()]
        return "".join(each.thinking or "" for each in messages), "".join(each.content for each in messages), calls

    assert message("4") == ("One, two.", "A € and an end", [])
    assert message("1", tools=TOOLS) == ("", "Let me see.", [("weather", {"city": "Oslo"})])
    assert message("2", tools=TOOLS)[2] == [("weather", {"city": "Rome"}), ("time_of_day", {})]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_each_line_of_a_stream_is_whole_also_for_clients_that_split_at_every_line_end(writer: Running, path: str) -> None:
    """Some clients, such as httpx, split lines with Python's str.splitlines."""
    tools = {"/v1/messages": TOOL, "/v1/responses": [{"type": "function", **tool["function"]} for tool in TOOLS]}
    question = [{"role": "user", "content": "7"}]
    answer = httpx.post(writer.url + path, json={
        "model": "tiny", "stream": True, "tools": tools.get(path, TOOLS), "input" if "resp" in path else "messages": question,
        **({"options": {"temperature": 0}} if "api" in path else {"temperature": 0}),
        **({"max_tokens": 50} if path == "/v1/messages" else {})})
    lines = [line for line in answer.text.splitlines() if line and not line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert len(events) > 3
    assert "a\u2028b" in json.dumps(events, ensure_ascii=False)
    assert "\u2029c\u0085d" in json.dumps(events, ensure_ascii=False)
    assert "x\u2028y" in json.dumps(events, ensure_ascii=False)


def test_the_arguments_of_a_call_are_sent_verbatim(writer: Running) -> None:
    question = {"model": "tiny", "messages": [{"role": "user", "content": "6"}], "stream": False}
    by_ollama = httpx.post(f"{writer.url}/api/chat", json={**question, "tools": TOOLS, "options": {"temperature": 0}})
    by_anthropic = httpx.post(f"{writer.url}/v1/messages", json={**question, "tools": TOOL, "temperature": 0, "max_tokens": 50})
    for answer in (by_ollama, by_anthropic):
        assert answer.status_code == 200, answer.text
        assert ODD in answer.text


def test_ollama_accepts_its_own_calls_and_enforces_a_format(writer: Running) -> None:
    ollama = ollama_client(writer)
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    conversation = [{"role": "user", "content": "1"},
                    {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call]},
                    {"role": "tool", "tool_name": "weather", "content": "4"}]
    assert ollama.chat("tiny", conversation, tools=TOOLS, options={"temperature": 0}).message.thinking == "One, two."
    counts = []
    for nothing in ({"content": ""}, {"content": None}, {}):
        messages = [conversation[0], {"role": "assistant", "tool_calls": [call], **nothing}, {"role": "tool", **nothing}]
        answer = httpx.post(f"{writer.url}/api/chat", json={"model": "tiny", "messages": messages, "tools": TOOLS,
                                                            "stream": False, "options": {"num_predict": 1}})
        counts.append(answer.json()["prompt_eval_count"])
    assert counts[0] == counts[1] == counts[2]
    marked = [{**tool, "x": 1, "function": {**tool["function"], "returns": {"type": "string"}}} for tool in TOOLS]
    answers = [httpx.post(f"{writer.url}/api/chat", json={"model": "tiny", "messages": conversation[:1], "tools": tools,
                                                          "stream": False, "options": {"num_predict": 1}}).json()
               for tools in (TOOLS, marked)]
    assert answers[0]["prompt_eval_count"] == answers[1]["prompt_eval_count"]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
              "additionalProperties": False}
    assert 0 <= json.loads(ollama.chat("tiny", [{"role": "user", "content": "x"}], format=schema).message.content)["n"] <= 9
    answer = ollama.generate("tiny", "x", format="json", options={"num_predict": 200, "temperature": 0})
    assert answer.response.lstrip().startswith("{")
    fields: Any = {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 3}}
    logprobs = ollama.chat("tiny", [{"role": "user", "content": "3"}], **fields).logprobs
    assert [len(each.top_logprobs) for each in logprobs] == [2, 2, 2]
    parts = ollama.chat("tiny", [{"role": "user", "content": "3"}], stream=True, **fields)
    assert [each for part in parts for each in part.logprobs or ()] == logprobs
    raw = ollama.generate("tiny", "3", raw=True, **fields)
    assert "".join(each.token for each in raw.logprobs) == raw.response


@pytest.mark.parametrize(("path", "fields", "named"), [
    ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
    ("chat", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    ("chat", {"messages": QUESTION, "model": "other"}, "other"), ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": QUESTION, "options": {"temperature": 9}}, "options.temperature"),
    ("chat", {"messages": QUESTION, "options": {"num_predict": 2**40}}, "options.num_predict"),
    ("chat", {"messages": QUESTION, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    ("chat", {"messages": QUESTION, "options": {"mirostat": 2}}, "options.mirostat"),
    ("chat", {"messages": QUESTION, "options": {"stop": [""]}}, "options.stop"),
    ("chat", {"messages": QUESTION, "format": {"type": "nothing"}}, "format"),
    ("chat", {"messages": QUESTION, "format": "xml"}, "format"),
    ("chat", {"messages": QUESTION, "think": True}, "think"), ("chat", {"messages": QUESTION, "tools": TOOLS}, "tools"),
    ("generate", {"prompt": "a", "template": "x"}, "template"), ("generate", {"prompt": "a", "suffix": "x"}, "suffix"),
    ("generate", {"prompt": "a", "images": ["aGk="]}, "images"), ("generate", {"prompt": "a", "context": [256]}, "context"),
    ("generate", {"prompt": "a", "context": [256], "raw": True}, "context"),
    ("generate", {"prompt": "a", "context": [-1]}, "context"),
    ("generate", {"prompt": "a", "context": [1] * 40_000}, "context"),
    ("generate", {"prompt": "a", "raw": True, "system": "x"}, "system"), ("show", {"model": "other"}, "other"),
    ("pull", {"model": "other"}, "other"), ("create", {}, "/api/create"), ("nothing", {}, "/api/nothing")], ids=str)
def test_ollama_s_errors_have_its_format(server: Running, path: str, fields: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{server.url}/api/{path}", json=fields)
    assert 400 <= answer.status_code < 500
    assert set(answer.json()) == {"error"}
    assert named in answer.json()["error"]


# Anthropic


def test_anthropic_s_message_has_its_format(server: Running) -> None:
    client = anthropic_client(server)
    cached = [{"type": "text", "text": "Be short. " * 200, "cache_control": {"type": "ephemeral"}}]
    fields: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "system": cached, "max_tokens": 5,
                              "metadata": {"user_id": "me"}, "extra_body": {"banned": [0]}}
    first, second = client.messages.create(**fields), client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for usage in (second.usage, streamed.usage):
        assert usage.input_tokens > 0                # Claude Code counts the prompt twice if this is 0
    assert (first.type, first.role, first.model, first.stop_reason) == ("message", "assistant", "tiny", "max_tokens")
    assert first.usage.output_tokens == 5
    assert first.usage.cache_read_input_tokens == 0 < first.usage.input_tokens
    assert second.usage.cache_read_input_tokens + second.usage.input_tokens == first.usage.input_tokens
    assert second.usage.cache_read_input_tokens > 2000
    count = client.messages.count_tokens(model="tiny", messages=QUESTION, system=cached)
    assert count.input_tokens == first.usage.input_tokens
    model, = client.models.list()
    assert (model.id, model.type) == ("tiny", "model")


def test_anthropic_names_the_stop_sequence(server: Running) -> None:
    letters = {str(letter): 100.0 for letter in b"ab"}
    answer = anthropic_client(server).messages.create(model="tiny", messages=QUESTION, max_tokens=500,
                                                      stop_sequences=["bb", "c"], extra_body={"logit_bias": letters})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "bb")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_has_thoughts_and_calls(writer: Running, stream: bool) -> None:
    def answer(question: str, **more: Any) -> Any:
        fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 50,
                                  "extra_body": {"temperature": 0}, **more}
        if not stream:
            return anthropic_client(writer).messages.create(**fields)
        with anthropic_client(writer).messages.stream(**fields) as events:
            kinds = [event.type for event in events]
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
            return events.get_final_message()

    thoughts, text = answer("4").content
    assert (thoughts.thinking, text.text) == ("One, two.", "A € and an end")
    assert thoughts.signature
    message = answer("1", tools=TOOL)
    text, call = message.content
    assert (text.text.strip(), call.name, call.input, message.stop_reason) == ("Let me see.", "weather", {"city": "Oslo"},
                                                                               "tool_use")
    assert [call.name for call in answer("2", tools=TOOL).content] == ["weather", "time_of_day"]
    forced, = answer("1", tools=TOOL, tool_choice={"type": "tool", "name": "weather"}).content
    assert (forced.type, forced.name) == ("tool_use", "weather")
    one = answer("2", tools=TOOL, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["tool_use"]
    assert all(block.type == "text" for block in answer("1", tools=TOOL, tool_choice={"type": "none"}).content)


def test_anthropic_accepts_its_own_blocks(writer: Running) -> None:
    """The result of a tool comes before the question, which the model answers with thoughts."""
    client = anthropic_client(writer)
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "extra_body": {"temperature": 0},
                              "tools": TOOL}
    question = {"role": "user", "content": "1"}
    answer = client.messages.create(messages=[question], **fields)
    call = next(block for block in answer.content if block.type == "tool_use")
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}], "is_error": True},
               {"type": "text", "text": "4", "cache_control": {"type": "ephemeral"}}]
    thinking = [{"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "redacted_thinking", "data": "xyz"}]
    history = [question, {"role": "assistant", "content": [*thinking, *answer.content]}, {"role": "user", "content": results}]
    assert client.messages.create(messages=history, **fields).content[0].thinking == "One, two."


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 2**40}, "max_tokens"), ({"model": "other"}, "other"),
    ({"temperature": 9}, "temperature"), ({"messages": []}, "messages"), ({"unknown": 1}, "unknown"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"system": "x", "messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"), ({"system": [IMAGE]}, "system"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"), ({"tools": TOOL}, "tools"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"), ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"stop_sequences": [""]}, "stop_sequences"), ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format")]


@pytest.mark.parametrize(("fields", "named"), WRONG_MESSAGES, ids=str)
def test_anthropic_s_errors_have_its_format(server: Running, fields: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/messages", json={"model": "tiny", "messages": QUESTION, "max_tokens": 5, **fields})
    error = answer.json()
    assert error["type"] == "error"
    assert (answer.status_code, error["error"]["type"]) in ((400, "invalid_request_error"), (404, "not_found_error"))
    assert named in error["error"]["message"]


def test_a_tool_runner_can_continue_without_a_thread(server: Running) -> None:
    """The tool runners of Anthropic's clients ask for a thread, and do without one after this error code."""
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 5, "thread": {"type": "create"}}
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


def test_thoughts_of_consecutive_messages_are_all_read(g1: Running) -> None:
    def count(*answers: tuple[str, str]) -> int:
        turns = [{"role": "assistant", "content": [{"type": "thinking", "thinking": thoughts, "signature": ""},
                                                   {"type": "text", "text": text}]} for thoughts, text in answers]
        body = {"model": "tiny", "messages": [*QUESTION, *turns, *QUESTION]}
        return int(httpx.post(f"{g1.url}/v1/messages/count_tokens", json=body).json()["input_tokens"])

    assert count(("one", "a"), ("two", "b")) == count(("one\ntwo", "a\nb"))


def test_a_key_may_be_in_either_header(checkpoint: Any) -> None:
    import anthropic

    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "api_key=secret") as server:
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            assert anthropic_client(server, **options).messages.count_tokens(model="tiny", messages=QUESTION).input_tokens
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_client(server, api_key="other").messages.count_tokens(model="tiny", messages=QUESTION)
        assert httpx.get(f"{server.url}/api/tags").json().keys() == {"error"}


# Malformed requests


VALUES: list[Any] = [None, True, -1, 0, 1.5, 2**70, "", "x", "\ud800", [], [None], ["x"], [3], [[]], {}, {"type": "x"},
                     {"type": 3}, [{}], [{"type": "text"}], [{"role": "user"}], [{"role": "assistant", "tool_calls": [3]}],
                     [{"role": "user", "content": [{"type": []}]}], [{"function": {"name": 3}}], {"properties": 3}]
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "tiny", "messages": QUESTION, "stream": False, "options": {"num_predict": 1}, "tools": None,
                  "format": None, "think": None, "keep_alive": 1, "logprobs": None, "top_logprobs": None},
    "/api/generate": {"model": "tiny", "prompt": "a", "stream": False, "options": {"num_predict": 1}, "raw": True,
                      "context": None, "system": None, "images": None, "suffix": None, "template": None},
    "/api/embed": {"model": "tiny", "input": "a", "truncate": None, "dimensions": None},
    "/api/embeddings": {"model": "tiny", "prompt": "a"}, "/v1/embeddings": {"model": "tiny", "input": "a", "pooling": None},
    "/api/show": {"model": "tiny", "name": "tiny"}, "/api/pull": {"model": "tiny"},
    "/v1/messages": {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "system": None, "tools": None, "tool_choice": None,
                     "thinking": None, "stop_sequences": None, "metadata": None, "output_config": None},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": QUESTION, "system": None, "tools": None}}
OPTIONS = ("num_predict", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "stop", "num_ctx", "mirostat")


def malformed_requests(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields requests in which one to three fields have another value or type. Some requests are cut off."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice([*BODIES])
        body = json.loads(json.dumps(BODIES[path]))
        for _ in range(rng.randint(1, 3)):
            if path.startswith("/api/") and "options" in body and rng.random() < 0.3:
                body["options"] = {rng.choice(OPTIONS): rng.choice(VALUES)}
            else:
                body[rng.choice([*BODIES[path]])] = rng.choice(VALUES)
        content = json.dumps(body).encode()
        yield path, content[:rng.randrange(len(content))] if rng.random() < 0.1 else content


@pytest.mark.parametrize(("count", "seed"), [(60, 0), pytest.param(1000, 1, marks=pytest.mark.soak)])
def test_malformed_requests_are_not_failures(server: Running, g1: Running, count: int, seed: int) -> None:
    for number, (path, content) in enumerate(malformed_requests(count, seed)):
        answer = httpx.post((g1 if number % 2 else server).url + path, content=content, timeout=60)
        assert answer.status_code < 500, (path, content, answer.text)
        assert answer.status_code == 200 or (answer.json()["error"] and answer.json().get("type") != "message"), (path, content)
    assert "Traceback" not in server.log + g1.log


@pytest.mark.soak
def test_64_clients_of_three_kinds_have_equal_shares(start: Callable[..., Running]) -> None:
    """Each client asks again and again for texts of one length, during the same 20 seconds.

    Jain's index measures how equal the numbers of their tokens are.
    """
    server = start("max_rows=64", "max_queue=0")
    bodies = [("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 20, "banned": [0]}),
              ("/api/chat", {"messages": QUESTION, "options": {"num_predict": 20}, "stream": False}),
              ("/v1/messages", {"messages": QUESTION, "max_tokens": 20, "banned": [0]})]
    until = time.monotonic() + 20

    def tokens_of(number: int) -> int:
        path, body = bodies[number % 3]
        tokens = 0
        with httpx.Client(timeout=60) as client:
            while time.monotonic() < until:
                answer = client.post(server.url + path, json={**body, "model": "tiny", "seed": number})
                assert answer.status_code == 200, answer.text
                usage = answer.json().get("usage") or answer.json()
                tokens += usage.get("completion_tokens") or usage.get("output_tokens") or usage.get("eval_count") or 0
        return tokens

    with ThreadPoolExecutor(64) as pool:
        tokens = [*pool.map(tokens_of, range(64))]
    jain = sum(tokens)**2 / (64 * sum(each**2 for each in tokens))
    assert jain >= 0.95, (jain, tokens)
    assert "Traceback" not in server.log
