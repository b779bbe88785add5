"""Tests of the bodies that clients of OpenAI's interface send: each field is used, ignored or refused.

The fields are those of the official client, and additional ones of LangChain, LiteLLM, Continue, Open WebUI, aider, Cline,
Vercel's AI SDK and vLLM's clients.
"""

import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from serving_runs import Running
from test_limits import check_error

from rwkv.chat.interface import END
from rwkv.chat.turn_templates import chat_template
from rwkv.serving.http.errors import ApiError
from rwkv.serving.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    StateRequest,
    StreamOptions,
    TemplateOptions,
    TokenizeRequest,
    read,
)
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.programs

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}
COMPLETION = {"prompt": "hi", "max_tokens": 8, "seed": 1}
TEXT = {"type": "text", "text": "hi"}

# the server accepts these fields, and they have no effect
IGNORED: list[dict[str, Any]] = [
    {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"safety_identifier": "s"},
    {"prompt_cache_key": "k"}, {"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"mode": "implicit"}},
    {"cache_control": {"type": "ephemeral"}}]
IGNORED_IN_CHAT: list[dict[str, Any]] = [
    *({"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    {"verbosity": "low"}, {"prediction": {"type": "content", "content": "x"}}, {"modalities": ["text"]},
    {"response_format": {"type": "text"}}, {"logprobs": False}, {"parallel_tool_calls": True}, {"tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": None}},
    {"chat_template_kwargs": {}}, {"enable_thinking": False}, {"max_completion_tokens": 8}]
DEFAULTS: list[dict[str, Any]] = [
    {"n": 1}, {"logit_bias": {}}, {"stop": []}, {"stop": [f"{number} stop strings" for number in range(32)]},
    {"temperature": 1}, {"top_p": 1}, {"presence_penalty": 0},
    {"frequency_penalty": 0}, {"top_k": 0}, {"min_p": 0}, {"repetition_penalty": 1}, {"stream": False}]

# the server refuses these fields and names them
NOT_HERE: list[tuple[str, Any]] = [
    ("functions", [{"name": "add"}]), ("function_call", "auto"), ("audio", {"voice": "ash", "format": "wav"}),
    ("modalities", ["text", "audio"]), ("web_search_options", {}), ("moderation", {"model": "omni-moderation-latest"}),
    ("response_format", {"type": "text", "schema": {}}),
    ("tools", [{"type": "custom", "custom": {"name": "a"}}]), ("tool_choice", {"type": "custom", "custom": {"name": "a"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
    ("enable_thinking", True), ("chat_template_kwargs", {"enable_thinking": True}), ("chat_template_kwargs", {"style": 1}),
    ("reasoning", {"effort": "low"})]
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", 2.01), ("top_p", -0.01), ("presence_penalty", 2.01), ("frequency_penalty", -2.01), ("n", 0),
    ("stop", ["x"] * 33), ("top_logprobs", 21), ("top_logprobs", -1), ("max_completion_tokens", -2)]

# the server answers each of these messages like {"role": "assistant", "content": "hello"}
SAME: list[dict[str, Any]] = [
    {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "hello", "annotations": []}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "hello"}]},
    {"role": "assistant", "content": None, "refusal": "hello"},
    {"role": "assistant", "content": "hello", "name": "a", "refusal": None, "audio": None, "annotations": [],
     "function_call": None, "tool_calls": None, "reasoning_content": None}]
EMPTY: list[dict[str, Any]] = [{"role": "assistant", "content": None}, {"role": "assistant"},
                               {"role": "assistant", "content": []}]
TOOL: list[dict[str, Any]] = [{"role": "tool", "content": [TEXT]}, {"role": "function", "name": "f", "content": "hi"},
                              {"role": "tool", "content": [{"type": "input_text", "text": "hi"}]}]
WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:"}}]}, "messages[1].content[1]"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
     "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "file", "file": {"file_id": "a"}}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[1].content[0]"),
    ({"role": "user", "content": None}, "messages[1].content"), ({"role": "tool", "content": None}, "messages[1].content"),
    ({"role": "assistant", "content": 3}, "messages[1].content"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a", "input": "b"}}]},
     "messages[1].tool_calls"),
    ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "messages[1]"),
    ({"role": "robot", "content": "x"}, "messages[1].role")]


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def chat(api: httpx.Client, **fields: Any) -> str:
    return content(api.post("/chat/completions", json={**CHAT, **fields}))


def completion(api: httpx.Client, **fields: Any) -> str:
    answer = api.post("/completions", json={**COMPLETION, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_fields_without_effect_are_accepted(api: httpx.Client) -> None:
    answer, text = chat(api), completion(api)
    for fields in IGNORED + DEFAULTS + IGNORED_IN_CHAT:
        assert chat(api, **fields) == answer, fields
        assert fields in IGNORED_IN_CHAT or completion(api, **fields) == text, fields


def test_an_unpaired_surrogate_becomes_a_replacement_character() -> None:
    """A program that cuts a text inside an emoji sends one, and sends it again with every later turn."""
    texts = {r"\ud83d": "\ufffd", r"\uDE00": "\ufffd", r"a\ud83d\n": "a\ufffd\n", r"\ud83d\ud83d\ude00": "\ufffd\U0001f600",
             r"\ud83d \\ud83d\\": "\ufffd \\ud83d\\"}
    for escaped, text in texts.items():
        body = read(f'{{"prompt": "{escaped}", "max_tokens": 2.0, "x": null}}'.encode(), CompletionRequest)
        assert (body.prompt, body.max_tokens) == (text, 2)
    for malformed in (r'{"prompt": "\ud83d', r'{"prompt": "\ud8"x":"}'):
        with pytest.raises(ApiError, match="JSON"):
            read(malformed.encode(), CompletionRequest)


def test_the_error_for_a_body_in_another_encoding_names_utf_8_and_the_first_wrong_byte() -> None:
    for encoding, byte in {"latin-1": "byte 12 is 0xe9", "utf-16": "byte 0 is 0xff"}.items():
        with pytest.raises(ApiError, match=f"UTF-8, but {byte}"):
            read('{"prompt": "é"}'.encode(encoding), CompletionRequest)


def test_every_optional_field_may_be_null(api: httpx.Client) -> None:
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    excluded = {"messages", "prompt", "max_tokens", "seed"}
    for name in {*chats.CompletionCreateParamsBase.__annotations__, "stream", "top_k", "enable_thinking"} - excluded:
        chat(api, **{name: None})
    chat(api, seed=None)
    for name in {*completions.CompletionCreateParamsBase.__annotations__, "stream"} - excluded:
        completion(api, **{name: None})
    completion(api, seed=None)


@pytest.mark.parametrize(("path", "kind", "body"), [
    ("completions", CompletionRequest, {"prompt": "a", "max_tokens": 1}), ("chat/completions", ChatRequest, CHAT),
    ("responses", ResponseRequest, {"input": "a", "max_output_tokens": 1}), ("states", StateRequest, {"prompt": "a"}),
    ("../tokenize", TokenizeRequest, {"prompt": "a"}), ("../detokenize", DetokenizeRequest, {"tokens": [97]})])
def test_every_optional_field_of_a_body_may_be_null(api: httpx.Client, path: str, kind: type[msgspec.Struct],
                                                    body: dict[str, Any]) -> None:
    nulls = {item.name: None for item in msgspec.structs.fields(kind) if not item.required and item.name not in body}
    for fields in ({}, *({name: None} for name in nulls), nulls):
        assert api.post(path, json={**body, **fields}).status_code == 200, fields


@pytest.mark.parametrize("fields", [
    {"stream": True, "stream_options": dict.fromkeys(StreamOptions.__struct_fields__)},
    {"chat_template_kwargs": dict.fromkeys(TemplateOptions.__struct_fields__)},
    {"response_format": {"type": "text", "json_schema": None}},
    {"response_format": {"type": "json_object", "json_schema": None}}], ids=str)
def test_null_inside_a_field_means_no_value(api: httpx.Client, fields: dict[str, Any]) -> None:
    assert api.post("/chat/completions", json={**CHAT, **fields}).status_code == 200


def test_an_unknown_field_that_is_null_means_no_value(g1: Running) -> None:
    """Clients in typed languages send all fields that they know, even those of other servers and of other kinds of tools."""
    parameters = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "returns": None}, "custom": None}
    body = {**CHAT, "guided_json": None, "tools": [tool, tool], "response_format": {"type": "text", "schema": None},
            "tool_choice": {"type": "function", "function": {"name": "f", "strict": None}, "custom": None}, "max_tokens": 400}
    answer = httpx.post(f"{g1.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": None}
    for path, fields in (("completions", COMPLETION), ("embeddings", {"input": "a"}), ("states", {"prompt": "a"}),
                         ("responses", {"input": "a", "max_output_tokens": 1}), ("messages", {**CHAT, "model": "tiny"})):
        answer = httpx.post(f"{g1.url}/v1/{path}", json={**fields, "truncate_prompt_tokens": None, "x": None}, timeout=60)
        assert answer.status_code == 200, answer.text
    many = {f"x{number}": None for number in range(1000)}
    assert httpx.post(f"{g1.url}/v1/chat/completions", json={**CHAT, **many}, timeout=60).status_code == 200
    for fields, param in (({"x": None, "y": 1}, "y"), ({"stream_options": many}, "stream_options.x"), ({"messages": None}, ""),
                          ({"tools": [tool, {**tool, "custom": {}}]}, "tools[1].custom")):
        check_error(httpx.post(f"{g1.url}/v1/chat/completions", json={**CHAT, **fields}), param)


def test_minus_one_means_no_value(api: httpx.Client) -> None:
    answers = {chat(api, seed=-1, max_tokens=40) for _ in range(3)}
    assert len(answers) > 1, "each request must have another seed"
    for seed in (-2, -2**63, 2**63 - 1):
        assert chat(api, seed=seed) == chat(api, seed=seed)
        assert api.post("/completions", json={**COMPLETION, "n": 3, "seed": seed}).status_code == 200
    assert chat(api, top_k=-1) == chat(api)
    assert completion(api, max_tokens=-1) == completion(api, max_tokens=None)
    assert chat(api, max_completion_tokens=-1) == chat(api)      # LangChain renames max_tokens
    assert chat(api, model="") == chat(api, model=None)


def test_names_of_mistral_s_clients(api: httpx.Client, g1: Running) -> None:
    assert chat(api, seed=None, random_seed=3) == chat(api, seed=3) == chat(api, seed=3, random_seed=3)
    assert completion(api, seed=None, random_seed=3) == completion(api, seed=3)
    check_error(api.post("/chat/completions", json={**CHAT, "random_seed": 2}), "random_seed")
    assert chat(api, safe_prompt=False) == chat(api)
    check_error(api.post("/chat/completions", json={**CHAT, "safe_prompt": True}), "safe_prompt")
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "any", "max_tokens": 400}
    answer = httpx.post(f"{g1.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", answer.text


def test_options_without_effect_are_accepted(api: httpx.Client) -> None:
    assert chat(api, logprobs=False, top_logprobs=0) == chat(api, top_logprobs=0) == chat(api)
    answers = [api.post("/completions", json={**COMPLETION, "n": 2, **fields}).json()["choices"]
               for fields in ({}, {"best_of": 2}, {"best_of": 1})]
    assert answers[0] == answers[1] == answers[2]
    check_error(api.post("/completions", json={**COMPLETION, "n": 2, "best_of": 3}), "best_of")


def test_json_object_may_have_a_schema(api: httpx.Client) -> None:
    """llama.cpp, llama-cpp-python and Together have the schema in the json_object."""
    schema = {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(chat(api, response_format={"type": "json_object", "schema": schema}, max_tokens=200)) == {"a": 3}
    assert json.loads(chat(api, response_format={"type": "json_object", "value": schema}, max_tokens=200)) == {"a": 3}    # TGI
    both = {"type": "json_object", "schema": schema, "value": {"type": "object"}}
    check_error(api.post("/chat/completions", json={**CHAT, "response_format": both}), "response_format.value")
    for name in ({}, {"name": "Result[int]"}):           # llama.cpp, LM Studio and Perplexity require no name, and ignore it
        answer = chat(api, response_format={"type": "json_schema", "json_schema": {**name, "schema": schema}}, max_tokens=200)
        assert json.loads(answer) == {"a": 3}
    flat = {"type": "json_schema", "name": "a", "strict": True, "schema": schema}        # llama.cpp and Together
    assert json.loads(chat(api, response_format=flat, max_tokens=200)) == {"a": 3}
    wrong = {"type": "json_object", "schema": {"type": "nothing"}}
    check_error(api.post("/chat/completions", json={**CHAT, "response_format": wrong}), "response_format.schema")


def test_a_field_of_another_endpoint_is_unknown(api: httpx.Client) -> None:
    for path, body, field in (("chat/completions", CHAT, "prompt"), ("responses", {"input": "a"}, "functions")):
        answer = api.post(path, json={**body, field: "x"})
        check_error(answer, field)
        assert answer.json()["error"]["code"] == "unknown_parameter"


def test_a_whole_number_may_have_a_decimal_point(api: httpx.Client) -> None:
    assert chat(api, seed=3.0, max_tokens=4.0, top_k=5.0, n=1.0) == chat(api, seed=3, max_tokens=4, top_k=5)
    assert completion(api, max_tokens=-1.0, logprobs=0.0) == completion(api, max_tokens=-1, logprobs=0)
    for path, body in (("completions", {"prompt": [97.0, 98.0], "max_tokens": 2.0}), ("../detokenize", {"tokens": [97, 98.0]}),
                       ("embeddings", {"input": [[97.0], [98, 9.0]]}),
                       ("messages", {**CHAT, "model": "tiny", "thinking": {"type": "disabled", "budget_tokens": 2.0}})):
        answer = api.post(path, json=body)
        assert answer.status_code == 200, answer.text
    check_error(api.post("completions", json={"prompt": [97.0, 98.5]}), "prompt[1]")


@pytest.mark.parametrize(("field", "value", "words"), [
    ("max_tokens", "9", "integer"), ("temperature", "0.5", "number"), ("seed", "1", "integer"), ("stream", "true", "boolean"),
    ("n", "1", "integer"), ("logprobs", "true", "boolean"), ("top_p", True, "number"), ("stop", 3, "string")])
def test_a_value_of_another_type_is_refused_in_words(api: httpx.Client, field: str, value: Any, words: str) -> None:
    answer = api.post("/chat/completions", json={**CHAT, field: value})
    check_error(answer, field)
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert words in message
    assert not re.search(r"`|\b(int|str|bool|float|None)\b", message)


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"reasoning_effort": "ultra"}, "reasoning_effort", ["minimal", "xhigh", "ultra"]),
    ({"tool_choice": {"type": "auto"}}, "tool_choice.type", ["function", "allowed_tools"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["function"]),
    ({"tools": [{"type": "function", "function": {"name": "my tool"}}]}, "tools[0].function.name", ["letter"]),
    ({"response_format": {"type": "xml"}}, "response_format.type", ["json_schema", "text"])], ids=str)
def test_the_values_that_a_field_may_have_are_named(api: httpx.Client, fields: dict[str, Any], param: str,
                                                    words: list[str]) -> None:
    answer = api.post("/chat/completions", json={**CHAT, **fields})
    check_error(answer, param)
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text


def test_a_number_that_is_too_large_is_named(api: httpx.Client) -> None:
    answer = api.post("/completions", content=b'{"prompt": "a", "temperature": 1e999}')
    check_error(answer, "temperature")


def test_an_error_does_not_repeat_a_long_value(api: httpx.Client) -> None:
    for fields in ({"reasoning_effort": "x" * 9000}, {"x" * 9000: 1}, {"tools": [{"x" * 9000: 1}]}):
        answer = api.post("/chat/completions", json={**CHAT, **fields})
        check_error(answer)
        assert len(answer.text) < 2000


# rwkv-rs's options and ours mean the same on a server with the template g1
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rwkv_prompt_template": "assistant"}, {}), ({"rwkv_prompt_template": "function_calling"}, {}),
    ({"rwkv_generation_prompt": "no_think"}, {"think": False}), ({"rwkv_generation_prompt": "fake_think"}, {"think": "fake"}),
    ({"rwkv_generation_prompt": "open_think"}, {"think": True}), ({"thinking": True}, {"enable_thinking": True}),
    ({"rwkv_prompt_template": "assistant", "rwkv_generation_prompt": "fake_think"}, {"think": "fake"}),
    ({"rwkv_generation_prompt": "fake_think", "enable_thinking": False}, {"think": "fake"})]


def test_options_of_another_server_s_templates_are_those_of_ours(g1: Running) -> None:
    def prompt_tokens(options: dict[str, Any], status: int = 200) -> Any:
        answer = httpx.post(f"{g1.url}/v1/chat/completions", json={**CHAT, "max_tokens": 1, "chat_template_kwargs": options})
        assert answer.status_code == status, answer.text
        return answer.json()["usage"]["prompt_tokens"] if status == 200 else answer.json()["error"]["param"]

    for theirs, ours in FORMS:
        assert prompt_tokens(theirs) == prompt_tokens(ours), theirs
    flower = chat_template("flower")
    for theirs, think in (("no_think", False), ("fake_think", "fake"), ("open_think", True)):
        options = {"rwkv_prompt_template": "bot", "rwkv_generation_prompt": theirs}
        rendered = flower.render(CHAT["messages"], think=think)                          # type: ignore[arg-type]
        assert prompt_tokens(options) == len(ByteTokenizer().encode(rendered.removeprefix(END))) + 1, theirs
    assert prompt_tokens({"rwkv_prompt_template": "poet"}, 400) == "chat_template_kwargs.rwkv_prompt_template"
    assert prompt_tokens({"rwkv_generation_prompt": "no_think", "enable_thinking": True}, 400) \
        == "chat_template_kwargs.enable_thinking"


def nested_value(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(("path", "field", "value"), [
    ("chat/completions", "tools", [{"type": "function", "function": {"name": "f\n"}}]),
    *(("chat/completions", "tools", [{"type": "function", "function": {"name": "f", "parameters": {"properties": value}}}])
      for value in (3, 1.5, [], "x", [nested_value(3)])),
    ("chat/completions", "tools", [{"type": "function", "function": {"name": "f", "parameters": nested_value(400)}}]),
    ("chat/completions", "messages", [{"role": "user", "content": [{"type": []}]}]),
    ("chat/completions", "messages", [{"role": "user", "content": [{"type": {"a": 1}, "text": "x"}]}]),
    ("responses", "input", [{"role": "user", "content": [{"type": []}]}]),
    ("responses", "input", [{"type": "reasoning", "content": [[]]}]),
    ("responses", "input", [{"type": ["message"], "role": "user", "content": "x"}])], ids=lambda each: str(each)[:60])
def test_values_of_another_form_are_refused_wherever_they_are(g1: Running, path: str, field: str, value: Any) -> None:
    body = CHAT if "chat" in path else {"input": "a", "max_output_tokens": 1}
    check_error(httpx.post(f"{g1.url}/v1/{path}", json={**body, field: value}))


def test_another_server_s_options_on_a_server_without_thoughts(api: httpx.Client) -> None:
    for options in ({"rwkv_prompt_template": "bot", "rwkv_generation_prompt": "open_think"},
                    {"rwkv_prompt_template": "assistant", "rwkv_generation_prompt": "fake_think"},
                    {"rwkv_prompt_template": "function_calling"}):
        assert chat(api, chat_template_kwargs=options) is not None
    assert chat(api, chat_template_kwargs={"rwkv_prompt_template": "assistant"}) == chat(api)
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat(api, tools=tools, chat_template_kwargs={"rwkv_prompt_template": "function_calling"})
    check_error(api.post("/chat/completions", json={**CHAT, "chat_template_kwargs": {"rwkv_generation_prompt": "open_think"}}),
                "chat_template_kwargs.rwkv_generation_prompt")


def test_extra_slashes_in_a_path_are_ignored(server: Running) -> None:
    for path in ("/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions//"):
        answer = httpx.post(server.url + path, json=CHAT)
        assert (answer.status_code, answer.history) == (200, []), path
    for path in ("/health/", "//health", "/v1/models/", "/v1/models/tiny/", "//"):
        assert httpx.get(server.url + path).status_code == 200, path


@pytest.mark.parametrize(("field", "value"), NOT_HERE + OUT_OF_RANGE, ids=lambda each: str(each)[:40])
def test_fields_that_a_chat_does_not_support_are_named(api: httpx.Client, field: str, value: Any) -> None:
    answer = api.post("/chat/completions", json={**CHAT, "logprobs": True, field: value})
    check_error(answer, field)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def post(api: httpx.Client, message: dict[str, Any]) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go on"}]
    return api.post("/chat/completions", json={**CHAT, "messages": messages})


def test_messages_with_the_same_meaning_get_the_same_answer(api: httpx.Client) -> None:
    for plain, others in (("hello", SAME), ("", EMPTY)):
        expected = content(post(api, {"role": "assistant", "content": plain}))
        for message in others:
            assert content(post(api, message)) == expected, message
    expected = content(post(api, {"role": "tool", "content": "hi"}))
    for message in TOOL:
        assert content(post(api, message)) == expected, message
    assert content(post(api, {"role": "developer", "content": "be"})) == content(
        post(api, {"role": "system", "content": "be"}))


@pytest.mark.parametrize(("message", "param"), WRONG_MESSAGES, ids=lambda each: str(each)[:60])
def test_messages_that_cannot_be_read_are_named(api: httpx.Client, message: dict[str, Any], param: str) -> None:
    answer = post(api, message)
    check_error(answer, param)
    assert answer.status_code == 400
