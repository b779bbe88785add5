"""The bodies that clients of OpenAI's interface send: each field, and what becomes of it here.

The fields are those of the official client, and what LangChain, LiteLLM, Continue, Open WebUI, aider, Cline, Vercel's AI SDK
and vLLM's clients send beside them.
"""

from typing import Any

import httpx
import pytest
from test_limits import refused

pytestmark = pytest.mark.programs

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}
COMPLETION = {"prompt": "hi", "max_tokens": 8, "seed": 1}
TEXT = {"type": "text", "text": "hi"}

# accepted, and without effect
IGNORED: list[dict[str, Any]] = [
    {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"safety_identifier": "s"},
    {"prompt_cache_key": "k"}, {"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"mode": "implicit"}}]
IGNORED_IN_CHAT: list[dict[str, Any]] = [
    *({"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    {"verbosity": "low"}, {"prediction": {"type": "content", "content": "x"}}, {"modalities": ["text"]},
    {"response_format": {"type": "text"}}, {"logprobs": False}, {"parallel_tool_calls": True}, {"tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": None}},
    {"chat_template_kwargs": {}}, {"enable_thinking": False}, {"max_completion_tokens": 8}]
DEFAULTS: list[dict[str, Any]] = [
    {"n": 1}, {"logit_bias": {}}, {"stop": []}, {"temperature": 1}, {"top_p": 1}, {"presence_penalty": 0},
    {"frequency_penalty": 0}, {"top_k": 0}, {"min_p": 0}, {"repetition_penalty": 1}, {"stream": False}]

# refused, with the field's name
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
    ("stop", list("abcde")), ("top_logprobs", 21), ("top_logprobs", -1), ("max_completion_tokens", -1)]

# messages in the place of {"role": "assistant", "content": "hello"}, and the content that they come to
SAME: list[dict[str, Any]] = [
    {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "hello"}]},
    {"role": "assistant", "content": None, "refusal": "hello"},
    {"role": "assistant", "content": "hello", "name": "a", "refusal": None, "audio": None, "annotations": [],
     "function_call": None, "tool_calls": None, "reasoning_content": None}]
EMPTY: list[dict[str, Any]] = [{"role": "assistant", "content": None}, {"role": "assistant"},
                               {"role": "assistant", "content": []}]
TOOL: list[dict[str, Any]] = [{"role": "tool", "content": [TEXT]}, {"role": "function", "name": "f", "content": "hi"}]
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


def test_every_optional_field_may_be_null(api: httpx.Client) -> None:
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    kept = {"messages", "prompt", "max_tokens", "seed"}
    for name in {*chats.CompletionCreateParamsBase.__annotations__, "stream", "top_k", "enable_thinking"} - kept:
        chat(api, **{name: None})
    chat(api, seed=None)
    for name in {*completions.CompletionCreateParamsBase.__annotations__, "stream"} - kept:
        completion(api, **{name: None})
    completion(api, seed=None)


@pytest.mark.parametrize(("field", "value"), NOT_HERE + OUT_OF_RANGE, ids=lambda each: str(each)[:40])
def test_what_a_chat_cannot_have_is_named(api: httpx.Client, field: str, value: Any) -> None:
    answer = api.post("/chat/completions", json={**CHAT, "logprobs": True, field: value})
    refused(answer, field)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def talk(api: httpx.Client, message: dict[str, Any]) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go on"}]
    return api.post("/chat/completions", json={**CHAT, "messages": messages})


def test_messages_that_say_the_same_are_answered_alike(api: httpx.Client) -> None:
    for plain, others in (("hello", SAME), ("", EMPTY)):
        expected = content(talk(api, {"role": "assistant", "content": plain}))
        for message in others:
            assert content(talk(api, message)) == expected, message
    expected = content(talk(api, {"role": "tool", "content": "hi"}))
    for message in TOOL:
        assert content(talk(api, message)) == expected, message
    assert content(talk(api, {"role": "developer", "content": "be"})) == content(
        talk(api, {"role": "system", "content": "be"}))


@pytest.mark.parametrize(("message", "param"), WRONG_MESSAGES, ids=lambda each: str(each)[:60])
def test_messages_that_cannot_be_read_are_named(api: httpx.Client, message: dict[str, Any], param: str) -> None:
    answer = talk(api, message)
    refused(answer, param)
    assert answer.status_code == 400
