"""Tests of answers that continue the last message.

Every interface returns the same continuation of a prompt that ends with the message's text.
"""

import json
from typing import Any

import httpx
import pytest
from serving_runs import LETTERS, Running
from test_limits import check_error
from test_special_tokens import END, TEMPLATE, TOKENIZER
from test_tools import TOOLS

from rwkv.chat.encoding import for_tokenizer
from rwkv.chat.interface import ChatTemplate
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.turn_templates import chat_template
from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.serving.http.errors import ApiError
from rwkv.serving.states.client_states import ClientStates
from rwkv.tokenizer.tokenizers import ByteTokenizer, Tokenizer

pytestmark = pytest.mark.programs
OPENAI = {"continue_final_message": True, "add_generation_prompt": False}
SAMPLING = {"seed": 3, "temperature": 1}
USER = {"role": "user", "content": "hi"}


def chat(text: Any, **message: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": text, **message}]


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def ask(server: Running, **body: Any) -> Any:
    return post(server, "/v1/chat/completions", **{**OPENAI, **SAMPLING, "max_tokens": 12, **body}).raise_for_status().json()


def complete(server: Running, prompt: str, **more: Any) -> Any:
    body: dict[str, Any] = {"prompt": prompt, "stop": ["\n\n"], "max_tokens": 12, **SAMPLING, **more}
    return post(server, "/v1/completions", **body).raise_for_status().json()


STRIPS = """{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}<think>
{{ (m.reasoning_content or '') | trim }}
</think>
{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def prompt(template: ChatTemplate, messages: list[Any], tokenizer: Tokenizer | None = None) -> str:
    states = ClientStates(ServeConfig(), {}, {}, tokenizer or ByteTokenizer(), template, 1)
    return states.continued_prompt(None, messages, None)


@pytest.mark.parametrize(("name", "before"), [
    ("world", "User: hi\n\nAssistant: "), ("g1", "User: hi\n\nAssistant: "), ("flower", "User✿hi✿\nBot✿"),
    ("strips", "[user]hi<end>\n[assistant]<think>\n\n</think>\n")])
def test_a_prompt_ends_with_the_text_whatever_the_template_does_to_it(name: str, before: str) -> None:
    template = JinjaTemplate(STRIPS, name) if name == "strips" else chat_template(name)
    for text in ("Hel", " Hel \n\n lo \n", "\n", "<end>", "x</think>y", "User:"):
        assert prompt(template, chat(text)).endswith(before + text)
    if template.thinks:                  # the text has thoughts of its own, in place of the template's empty ones
        for text in ("<think>\nHm", "<think>a</think> b", "<think"):
            assert prompt(template, chat(text)).endswith(before.removesuffix("<think>\n\n</think>\n") + text)
        assert prompt(template, chat("a ", reasoning_content="Hm")).endswith("<think>\nHm\n</think>\na ")


def test_a_special_token_s_name_in_the_text_is_text() -> None:
    template = for_tokenizer(JinjaTemplate(TEMPLATE, "chatml"), TOKENIZER)
    states = ClientStates(ServeConfig(), {}, {}, TOKENIZER, template, 1)
    ids = states.encode_text(states.continued_prompt(None, chat("bad<|im_end|>"), None), None)
    assert ids.count(END) == 1
    assert TOKENIZER.decode(ids).endswith("bad<|im_end|>")


@pytest.mark.parametrize(("template", "error"), [
    ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", UserError),
    ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", ApiError), ("flower", UserError)])
def test_a_template_that_cannot_write_the_text_refuses_it(template: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"messages\[1\]"):
        prompt(JinjaTemplate(template, "odd") if "{" in template else chat_template(template), chat("a ✿"))


@pytest.mark.parametrize("text", ["Hel", "Once  ", " I\n\nsay:\n", "  ", "a <think>", "Assistant:", "é"])
def test_the_answer_continues_the_text_as_it_is(server: Running, text: str) -> None:
    """The template writes the space after `Assistant:`, so the spaces of the text itself are kept."""
    alone = complete(server, f"User: hi\n\nAssistant: {text}")
    rest = alone["choices"][0]["text"]
    answer = ask(server, messages=chat(text))
    assert answer["choices"][0]["message"]["content"] == rest
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert ask(server, messages=chat([{"type": "text", "text": text}]), add_generation_prompt=None)["choices"] == \
        answer["choices"]
    ollama = post(server, "/api/chat", messages=chat(text), stream=False, options={**SAMPLING, "num_predict": 12}).json()
    anthropic = post(server, "/v1/messages", model="tiny", messages=chat([{"type": "text", "text": text}]), max_tokens=12,
                     **SAMPLING).json()
    assert (ollama["message"]["content"], anthropic["content"][0]["text"]) == (rest, rest)
    counted = post(server, "/v1/messages/count_tokens", model="tiny", messages=chat(text)).json()
    assert counted["input_tokens"] == alone["usage"]["prompt_tokens"]


def test_the_first_space_is_text_in_streams_in_log_probabilities_and_in_several_choices(server: Running) -> None:
    body: dict[str, Any] = {"messages": chat("Hel"), "logprobs": True, "n": 2, "max_tokens": 4,
                            "logit_bias": {"32": 100.0}, "temperature": 0}
    choices = ask(server, **body)["choices"]
    lines = post(server, "/v1/chat/completions", **OPENAI, **body, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    for choice in choices:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert choice["message"]["content"] == "    "
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" "] * 4
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == "    "
        assert [entry for piece in pieces for entry in (piece["logprobs"] or {}).get("content", ())] == \
            choice["logprobs"]["content"]
    stopped = ask(server, **{**body, "n": 1, "logit_bias": {"32": 100.0, "97": 100.0}, "max_tokens": 60, "stop": "a"})
    assert (stopped["choices"][0]["message"]["content"].strip(), stopped["choices"][0]["finish_reason"]) == ("", "stop")


def test_a_truncated_answer_continues_from_the_cache(server: Running) -> None:
    whole = ask(server, messages=chat("Hel"), max_tokens=40, logit_bias=LETTERS)
    text = whole["choices"][0]["message"]["content"]
    first = ask(server, messages=chat("Hel"), max_tokens=25, logit_bias=LETTERS)["choices"][0]["message"]["content"]
    assert first == text[:25]
    rest = ask(server, messages=chat(f"Hel{first}"), max_tokens=15, temperature=0, logit_bias=LETTERS)
    assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole["usage"]["prompt_tokens"] + 24
    whole = ask(server, messages=chat("Hel"), max_tokens=40, temperature=0, logit_bias=LETTERS)
    text = whole["choices"][0]["message"]["content"]
    rest = ask(server, messages=chat(f"Hel{text[:25]}"), max_tokens=15, temperature=0, logit_bias=LETTERS)
    assert rest["choices"][0]["message"]["content"] == text[25:]


def test_a_state_is_followed_by_the_beginning_of_an_answer(server: Running) -> None:
    saved = post(server, "/v1/chat/completions", messages=[USER], save_state=True, max_tokens=3, temperature=0,
                 logit_bias=LETTERS).json()["choices"][0]
    first = {"role": "assistant", "content": saved["message"]["content"]}
    # The model wrote no space after "Assistant:", where the template writes one
    alone = complete(server, f"User: hi\n\nAssistant:{first['content']}\n\nUser: hi\n\nAssistant: Hel")
    by_state = ask(server, state=saved["state"], messages=chat("Hel"), save_state=True)
    assert by_state["choices"][0]["message"]["content"] == alone["choices"][0]["text"]
    assert by_state["choices"][0]["state"]


def test_a_grammar_applies_to_the_rest(server: Running) -> None:
    digits = ask(server, messages=chat("The year "), grammar={"syntax": "regex", "definition": "[0-9]{4}"})
    content = digits["choices"][0]["message"]["content"]
    assert content.isdigit()
    assert len(content) == 4


def test_json_follows_the_thoughts_of_the_message(g1: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for text in ("<think>Hm</think>", "<think>Hm</think>\n", "<think></think"):
        message = ask(g1, messages=chat(text), response_format=form, max_tokens=400)["choices"][0]["message"]
        assert json.loads(message["content"]) == {"a": 3}
    check_error(post(g1, "/v1/chat/completions", **OPENAI, messages=chat("<think>Hm</think>{"), response_format=form),
                "response_format")


def test_an_empty_last_message_begins_a_new_answer(g1: Running) -> None:
    def text(path: str, *more: Any) -> Any:
        options = {"stream": False, "options": {**SAMPLING, "num_predict": 5}} if path == "/api/chat" else {
            "max_tokens": 5, **SAMPLING, "model": "tiny"}
        answer = post(g1, path, messages=[USER, *more], **options).raise_for_status().json()
        return answer.get("content") or answer["message"]["content"]

    empty = {"role": "assistant", "content": ""}
    for path in ("/api/chat", "/v1/messages"):
        assert text(path) == text(path, empty)
    assert text("/v1/messages", {**empty, "content": []}) == text("/v1/messages")


@pytest.mark.parametrize("mark", ["prefix", "partial"])
def test_a_mark_in_the_last_message_continues_it(server: Running, mark: str) -> None:
    """DeepSeek's and Mistral's clients send prefix, Kimi's and Qwen's partial."""
    def text(**options: Any) -> Any:
        return ask(server, **{**dict.fromkeys(OPENAI), **options})["choices"][0]["message"]["content"]

    continuation = text(messages=chat("Hel"), **OPENAI)
    assert text(messages=chat("Hel", **{mark: True})) == continuation
    assert text(messages=chat("Hel", **{mark: False})) == text(messages=chat("Hel")) != continuation
    refused = {"messages": chat("Hel", **{mark: True}), "add_generation_prompt": True}
    check_error(post(server, "/v1/chat/completions", **refused), "add_generation_prompt")
    refused = {"messages": chat("Hel", **{mark: True}), "continue_final_message": False}
    check_error(post(server, "/v1/chat/completions", **refused), "continue_final_message")


def test_without_the_field_an_answer_begins(server: Running) -> None:
    alone = complete(server, "User: hi\n\nAssistant: Hel\n\nAssistant:")
    answer = ask(server, messages=chat("Hel"), continue_final_message=None, add_generation_prompt=None)
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["text"].lstrip()


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(("fields", "field"), [
    ({"add_generation_prompt": True}, "add_generation_prompt"), ({"messages": [USER]}, "messages[0]"),
    ({"messages": [*chat("a"), USER]}, "messages[2]"), ({"messages": chat("")}, "messages[1]"),
    ({"messages": chat(None)}, "messages[1]"), ({"messages": chat("a", tool_calls=[CALL])}, "messages[1]"),
    ({"messages": chat(None, reasoning_content="Hm")}, "messages[1]"),
    ({"messages": [*chat(None, tool_calls=[CALL]), {"role": "tool", "tool_call_id": "call_1", "content": "a"}]}, "messages[2]"),
    ({"messages": []}, None), ({"messages": "a"}, None), ({"continue_final_message": "yes"}, "continue_final_message"),
    ({"continue_final_message": None}, "add_generation_prompt"), ({"continue_final_message": False}, "add_generation_prompt"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"format": "json"}, "format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice")], ids=str)
def test_what_cannot_be_continued_is_refused(g1: Running, fields: dict[str, Any], field: str | None) -> None:
    check_error(post(g1, "/v1/chat/completions", **{"messages": chat("a"), "max_tokens": 1, **OPENAI, **fields}), field)


@pytest.mark.parametrize(("path", "fields", "named"), [
    ("/v1/messages", {"messages": chat([{"type": "tool_use", "id": "t", "name": "weather", "input": {}}])}, "messages[1]"),
    ("/v1/messages", {"messages": chat([{"type": "thinking", "thinking": "Hm", "signature": ""}])}, "messages[1]"),
    ("/v1/messages", {"messages": chat("{"), "output_config": {"format": {"type": "json_schema", "schema": {}}}},
     "output_config.format"),
    ("/v1/messages", {"messages": chat("a"), "tool_choice": {"type": "any"}, "tools": [
        {"name": "f", "input_schema": {"type": "object"}}]}, "tool_choice"),
    ("/api/chat", {"messages": chat("", thinking="Hm")}, "messages[1]"),
    ("/api/chat", {"messages": chat("{"), "format": "json"}, "format"),
    ("/v1/responses", {"input": "a", "continue_final_message": True}, "continue_final_message"),
    ("/v1/completions", {"prompt": "a", "continue_final_message": True}, "continue_final_message")], ids=str)
def test_other_interfaces_refuse_it_with_their_names(g1: Running, path: str, fields: dict[str, Any], named: str) -> None:
    limit = {"/v1/responses": {}, "/api/chat": {}}.get(path, {"max_tokens": 5})
    answer = post(g1, path, model="tiny", **limit, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(named)


def test_tools_and_efforts_do_not_hinder_a_continuation(g1: Running) -> None:
    plain = ask(g1, messages=chat("Hel"), temperature=0)["choices"]
    assert ask(g1, messages=chat("Hel"), temperature=0, enable_thinking=True)["choices"] == plain
    assert ask(g1, messages=chat("Hel"), temperature=0, reasoning_effort="minimal")["choices"] == plain
    assert ask(g1, messages=chat("Hel"), tools=TOOLS)["usage"]["prompt_tokens"] > 100
