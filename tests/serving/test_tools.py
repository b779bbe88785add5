"""Tests of tools by the official client against the real server: what a template shows of them, and the model's calls."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serving_runs import Running

from rwkv.chat.turn_templates import chat_template

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
TEMPLATE = """\
{% for tool in tools or [] %}
{{ tool | tojson }}
{%- for name in tool.function.parameters.properties | items %}{% endfor %}
{% endfor %}
{% for message in messages %}

{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- for name, value in call.function.arguments | items %}{% endfor %}

</tool_call>
{%- endfor %}
{% endfor %}"""
TOOLS: list[Any] = [{"type": "function", "function": {
    "name": name, "description": "It tells.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    for name in ("weather", "time_of_day")]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
# The model writes these tokens after a question, or after the beginning of a call. Each token occurs once.
ROWS = [
    ["1", "Let me", " see.\n", "<tool_", "call>\n{\"name\": \"wea", "ther\", \"arguments\": {\"city\": ", "\"Oslo\"}}\n</to",
     "ol_call>"],
    ["2", "<tool_call>{\"name\": \"weather\", \"argu", "ments\": {\"city\": \"Rome\"}}</tool_call>", "\n\n<tool_call>\n{",
     "\"name\": \"time_of_day\", \"arguments\": {}}", "\n</tool_call>\n"],
    ["3", "5 <", " 6 <tool", "s> <tool_call>{weather}", "</tool_call>!"],
    [" ", "{\"city\": \"Bergen", "\"}}", "\n</tool_call>", " More."],
    ["\"", "time_of_day\",", " \"arguments\": {\"city\": null", "}}\n</tool_call>  "],
]
TEXTS = ["".join(row[1:]) for row in ROWS]
STRICT: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bergen"]}}, "required": ["city"], "additionalProperties": False}}}


def allow_only(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def ask(client: "openai.OpenAI", question: str, **options: Any) -> Any:
    return client.chat.completions.create(**{
        "model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 50,
        "tools": TOOLS, **options})


def ask_streamed(client: "openai.OpenAI", question: str, **options: Any) -> tuple[str, list[tuple[str, dict[str, Any]]], str]:
    content, calls, chunks = "", list[dict[str, Any]](), list(ask(client, question, stream=True, **options))
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or []:
            calls += [{"name": "", "arguments": ""} for _ in range(part.index + 1 - len(calls))]
            calls[part.index]["name"] += part.function.name or ""
            calls[part.index]["arguments"] += part.function.arguments or ""
    return (content, [(call["name"], json.loads(call["arguments"])) for call in calls],
            chunks[-1].choices[0].finish_reason)


@pytest.mark.parametrize(("question", "options", "content", "calls"), [
    ("1", {}, "Let me see.", [("weather", {"city": "Oslo"})]),
    ("2", {}, None, [("weather", {"city": "Rome"}), ("time_of_day", {})]),
    ("1", {"tool_choice": "auto"}, "Let me see.", [("weather", {"city": "Oslo"})]),
    ("1", {"tools": [STRICT]}, "Let me see.\nMore.", [("weather", {"city": "Bergen"})]),     # the model says More here
    ("3", {"tools": [STRICT]}, TEXTS[2], []),
    ("1", {"tool_choice": "none"}, TEXTS[0], []),
    ("1", {"tool_choice": WEATHER}, None, [("weather", {"city": "Bergen"})]),
    # After a name, the rest of a call's form is written in the tokenizer's own tokens. After the last of these tokens, the
    # model writes Bergen
    ("1", {"tool_choice": "required"}, None, [("time_of_day", {"city": "Bergen"})]),
    ("1", {"tool_choice": "required", "tools": TOOLS[:1]}, None, [("weather", {"city": "Bergen"})]),
    ("1", {"tools": None}, TEXTS[0], []),
    ("2", allow_only("auto", "weather", "time_of_day"), None, [("weather", {"city": "Rome"}), ("time_of_day", {})]),
    ("2", allow_only("auto", "time_of_day"), TEXTS[1].partition("\n")[0], [("time_of_day", {})]),
    ("1", allow_only("auto", "time_of_day"), TEXTS[0], []),
    ("1", allow_only("required", "weather"), None, [("weather", {"city": "Bergen"})]),
    ("1", allow_only("required", "weather", "time_of_day"), None, [("time_of_day", {"city": "Bergen"})])], ids=str)
def test_calls_come_back_as_tool_calls(tool_client: "openai.OpenAI", question: str, options: dict[str, Any],
                                       content: str | None, calls: list[Any]) -> None:
    choice = ask(tool_client, question, **options).choices[0]
    tool_calls = choice.message.tool_calls or []
    assert choice.message.content == content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in tool_calls] == calls
    assert len({call.id for call in tool_calls}) == len(tool_calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert ask_streamed(tool_client, question, **options) == (content or "", calls, choice.finish_reason)


def test_the_prompt_shows_all_tools_whichever_are_allowed(tool_client: "openai.OpenAI") -> None:
    """Clients send allowed_tools instead of fewer tools, so that the cached part of the prompt still fits."""
    whole, subset = (ask(tool_client, "1", **options).usage for options in ({}, allow_only("auto", "weather")))
    assert whole.prompt_tokens == subset.prompt_tokens


def test_the_template_gets_tools_calls_and_results(tool_client: "openai.OpenAI", tmp_path: Path) -> None:
    """The prompt has as many tokens as the rendered text has bytes, apart from the model's own words."""
    first = ask(tool_client, "1").choices[0].message
    messages = [{"role": "user", "content": "1"}, first.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain 3"}]
    answer = ask(tool_client, "", messages=messages)
    assert answer.choices[0].message.content == TEXTS[2]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    template = chat_template(str(tmp_path / "template.jinja"))
    prompt = template.render(messages, tools=TOOLS)
    assert prompt.endswith('user: 1\nassistant: Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
                           "</tool_call>\ntool: rain 3")
    assert prompt.startswith('{"type": "function", "function": {"name": "weather", "description": "It tells.", "parameters": ')
    tokens = httpx.post(f"{str(tool_client.base_url).removesuffix('/v1/')}/tokenize", json={"prompt": prompt}).json()["count"]
    assert answer.usage.prompt_tokens == tokens


@pytest.mark.parametrize("arguments", ['{"city": "Osl', "Oslo", "[1]", "3", "", "null", None])
def test_a_call_whose_arguments_cannot_be_read_does_not_end_a_conversation(tool_client: "openai.OpenAI",
                                                                           arguments: str | None) -> None:
    """The model sees the arguments and the tool's error message.

    A template may iterate over arguments, as Qwen3-Coder's does.
    """
    messages: list[Any] = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "no JSON"}, {"role": "user", "content": "1"}]
    answer = ask(tool_client, "", messages=messages).choices[0].message
    assert answer.content == "Let me see."
    assert answer.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}}],
                         ids=str)
def test_a_tool_without_parameters_has_an_empty_list_of_them(tool_client: "openai.OpenAI", parameters: dict[str, Any]) -> None:
    whole = {"parameters": {"type": "object", "properties": {}}}
    answers = [ask(tool_client, "1", tools=[{"type": "function", "function": {"name": "weather", **each}}])
               for each in (whole, parameters)]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    assert answers[1].choices[0].message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize(("options", "param"), [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": TOOLS * 65}, "tools"), ({"tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"), ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": WEATHER}, "tool_choice"), (allow_only("auto"), "tool_choice"),
    (allow_only("required", "weather", "rm"), "tool_choice"), (allow_only("none", "weather"), "tool_choice"),
    ({"tools": None, **allow_only("auto", "weather")}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "messages[0].tool_calls[0].function.arguments")], ids=str)
def test_wrong_tools_are_named(tool_client: "openai.OpenAI", options: dict[str, Any], param: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        ask(tool_client, "1", **options)
    assert error.value.param is not None
    assert error.value.param.startswith(param)


def test_a_tool_may_have_a_name_as_in_mcp(g1: Running) -> None:
    """Claude Code puts the names of a plugin and its server before a tool's name."""
    name = f"mcp__plugin_files__read.all/of-{'x' * 97}"
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    question = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}]
    for path, fields in (("v1/chat/completions", {"tools": tools, "tool_choice": "required"}),
                         ("v1/chat/completions", {"tools": tools}),
                         ("api/chat", {"tools": tools, "options": {"num_predict": 9}}),
                         ("v1/messages", {"tools": [{"name": name, "input_schema": schema}]})):
        answer = httpx.post(f"{g1.url}/{path}", json={**question, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        if "tool_choice" in fields:
            assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name
    tools[0]["function"] = {"name": f"{name}x"}
    assert httpx.post(f"{g1.url}/v1/chat/completions", json={**question, "tools": tools}).status_code == 400


def test_a_template_without_tools_refuses_them(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for fields, param in (({"tools": TOOLS}, "tools"), ({"tools": TOOLS, "tool_choice": "none"}, "tools"),
                          ({"tool_choice": "required"}, "tool_choice")):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_empty_list_of_tools_means_no_tools(server: Running) -> None:
    """Some clients send the list with each request, and tool_choice too. The template of this server has no tools."""
    for path, body in (("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
                       ("responses", {"input": "a", "max_output_tokens": 4}),
                       ("messages", {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4})):
        auto: Any = {"type": "auto"} if path == "messages" else "auto"
        answers = []
        for fields in ({}, {"tools": []}, {"tool_choice": auto}, {"tools": [], "tool_choice": auto}):
            answer = httpx.post(f"{server.url}/v1/{path}", json={**body, **fields, "temperature": 0}, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append({field: answer.json()[field] for field in ("choices", "content") if field in answer.json()})
        assert all(answer == answers[0] for answer in answers)
    saved = [httpx.post(f"{server.url}/v1/states", json={"messages": [{"role": "user", "content": "a"}], **fields}).json()
             for fields in ({}, {"tools": []})]
    assert saved[0]["tokens"] == saved[1]["tokens"]


def test_the_beginning_of_a_call_is_the_template_s(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    for text, start in ((TEMPLATE, ('<tool_call>\n{"name": "', '", "arguments": ')),
                        (TEMPLATE.replace('"name"', "name"), None), ("{{ tools }}{{ messages[0].content }}", None)):
        path.write_text(text)
        assert chat_template(str(path)).call_start == start


def test_an_answer_that_is_continued_may_call(tool_client: "openai.OpenAI") -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "1Let me"}]
    choice = tool_client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=50, tools=TOOLS,
                                                 extra_body={"continue_final_message": True}).choices[0]
    call, = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (" see.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
