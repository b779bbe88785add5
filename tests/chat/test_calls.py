"""Tests of tool calls as text: the format that built-in templates render, and the formats recognised in generated text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv.chat.calls import CALL_START, CallParser
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError

CITY = {"city": {"type": "string"}}
WEATHER: dict[str, Any] = {"type": "function", "function": {
    "name": "weather", "description": "The sky\n\nover a city", "parameters": {"type": "object", "properties": CITY}}}
QUESTION = {"role": "user", "content": "Ys?"}
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
RAIN = '{"name":"rain","arguments":{}}'
FUNCTIONS = ("weather", "rain")
Answer = tuple[str, list[tuple[str, str]]]


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


# Rendering


def test_tools_calls_and_results_have_the_author_s_format() -> None:
    """The format is that of RWKV7-G1x-templates.txt.

    Tools, one per line, end the system prompt. A call is fenced, and its result is a user's turn.
    """
    messages = [{"role": "system", "content": "Be brief."}, QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [call_of("weather", '{"city": "Ys"}')]},
                {"role": "tool", "tool_call_id": "1", "content": '{"sky":\n\n"rain"}'}]
    assert chat_template("g1").render(messages, tools=[WEATHER, {"name": "rain"}]) == (
        "System: Be brief.\nTools:\n[\n"
        '{"name":"weather","description":"The sky\\n\\nover a city","arguments":{"city":{"type":"string"}}},\n'
        '{"name":"rain","arguments":{}}\n]\nReturn only a JSON function call.\n\n'
        'User: Ys?\n\nAssistant: ```json\n{"name":"weather","arguments":{"city":"Ys"}}\n```\n\n'
        'User: Function output:\n{"sky":\n"rain"}\n\nAssistant:')


def test_tools_become_the_system_prompt_if_there_is_none() -> None:
    text = chat_template("g1").render([QUESTION], tools=[WEATHER])
    assert text.startswith("System: Tools:\n[\n{")
    assert text.endswith("\n]\nReturn only a JSON function call.\n\nUser: Ys?\n\nAssistant:")
    assert chat_template("g1").render([QUESTION], tools=[]) == "User: Ys?\n\nAssistant:"


def test_several_calls_are_a_list_after_the_text() -> None:
    calls = [call_of("weather", {"city": "Ålesund ☔"}), call_of("rain", None)]
    text = chat_template("g1").render([QUESTION, {"role": "assistant", "content": "Both.", "tool_calls": calls}], False)
    assert text.endswith('Assistant: Both.\n```json\n[{"name":"weather","arguments":{"city":"Ålesund ☔"}},{"name":"rain",'
                         '"arguments":{}}]\n```\n\n')


@pytest.mark.parametrize(("parameters", "shown"), [
    (None, '"arguments":{}'), ({}, '"arguments":{}'), ({"type": "object"}, '"arguments":{}'),
    # these parameters are not a schema, as in xlam's data
    ({"city": {"type": "str"}}, '"arguments":{"city":{"type":"str"}}'),
    ({"type": "object", "properties": CITY, "required": ["city"]}, '"arguments":{"city":{"type":"string"}}'),
    ({"properties": {**CITY, "day": {}}, "required": ["city"]},
     '"arguments":{"city":{"type":"string"},"day":{}},"required":["city"]'),
    ({"type": "object", "properties": {**CITY, "day": None, "at": {"type": "null", "enum": None}}, "required": None},
     '"arguments":{"city":{"type":"string"},"at":{"type":"null"}}'),
    ({"properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {}}},
     '"arguments":{"at":{"$ref":"#/$defs/P"}},"$defs":{"P":{}}'),
    ({"properties": {"at": {"$ref": "#/definitions/P"}}, "definitions": {"P": {}}},
     '"arguments":{"at":{"$ref":"#/definitions/P"}},"definitions":{"P":{}}'),
    ({"type": "object", "properties": {}, "anyOf": [{"properties": CITY}]},
     '"arguments":{"type":"object","properties":{},"anyOf":[{"properties":{"city":{"type":"string"}}}]}')], ids=str)
def test_a_tool_is_a_line_with_its_arguments(parameters: Any, shown: str) -> None:
    function = {"name": "weather", "parameters": parameters}
    for tool in (function, {"type": "function", "function": function}):
        assert f'[\n{{"name":"weather",{shown}}}\n]' in chat_template("g1").render([QUESTION], tools=[tool])


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": "f"}, {"name": 3}, {"name": "f", "parameters": [1]}],
                         ids=str)
def test_a_tool_that_is_not_a_function_is_named(tool: Any) -> None:
    with pytest.raises(UserError, match=r"tools\[1\]"):
        chat_template("g1").render([QUESTION], tools=[WEATHER, tool])


def test_world_refuses_tools_and_names_a_template_that_supports_them() -> None:
    """World models were not trained on tool calls."""
    turns = [QUESTION, {"role": "assistant", "tool_calls": [call_of("rain", "{}")]}]
    for messages, tools, field in (([QUESTION], [WEATHER], "tools"), (turns, None, r"messages\[1\]\.tool_calls")):
        with pytest.raises(UserError, match=f"{field}.*g1"):
            chat_template("world").render(messages, tools=tools)


def test_calls_are_learnt_and_tools_and_results_are_not() -> None:
    call_message = {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [call_of("rain", "{}")]}
    messages = [QUESTION, call_message, {"role": "tool", "content": "yes"}, {"role": "assistant", "content": "It rains."},
                {**call_message, "weight": 0}]
    parts = chat_template("g1").parts(messages, [WEATHER])
    learnt = [text for text, is_learnt in parts if is_learnt]
    assert learnt == [f" <think>\nAsk.\n</think>\n```json\n{RAIN}\n```\n\n", " It rains.\n\n"]
    assert "".join(text for text, _ in parts) == chat_template("g1").render(messages, False, [WEATHER])
    with pytest.raises(UserError, match=r"messages\[1\]\.weight"):
        chat_template("g1").parts([QUESTION, {**messages[3], "weight": 0.5}], [WEATHER])


# Parsing


def parse(pieces: list[str], functions: tuple[str, ...] = FUNCTIONS, **options: Any) -> Answer:
    """Returns the text and the calls of an answer that arrives in these pieces."""
    parser, written, text, calls = CallParser(functions, **options), "".join(pieces), "", []
    for number, piece in enumerate(pieces, start=1):
        new_text, new_calls = parser.push(piece, last=number == len(pieces))
        assert new_text == "".join(written[begin:end] for begin, end in parser.spans if begin >= 0)
        assert all(end <= parser.decided for _, end in parser.spans)
        text, calls = text + new_text, calls + new_calls
    assert parser.decided == len(written)
    assert parser.n_calls == len(calls) == len({call["id"] for call in calls})
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


ONE = ("weather", '{"city": "Oslo"}')
FORMS = {                                # each of these answers consists of one call
    "bare": OSLO,
    "bare, white space": f" \n{OSLO}\n",
    "more fields": f'{OSLO[:-1]}, "id": "x"}}',
    "other order": '{"arguments": {"city": "Oslo"}, "name": "weather"}',
    "spread": '{\n  "name" : "weather",\n  "arguments" : {"city": "Oslo"}\n}',
    "arguments in a string": '{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
    "OpenAI's": f'{{"id": "1", "type": "function", "function": {OSLO}}}',
    "list": f"[{OSLO}]",
    "fence": f"```json\n{OSLO}\n```",
    "fence in capitals": f"```JSON\n{OSLO}\n```",
    "fence in one line": f"```json {OSLO}```",
    "fence of no language": f"```\n{OSLO}\n```",
    "fence of calls": f'```tool_calls\n[{{"type":"function","function":{OSLO}}}]\n```',
    "fence and list": f"```json\n[{OSLO}]\n```",
    "heading": f"**Tool Call:**\n```json\n{OSLO}\n```",
    "heading, blank line": f"**Tool Call:**\n\n```json\n{OSLO}\n```",
    "tag": f"<tool_call>{OSLO}</tool_call>",
    "tag, lines": f"<tool_call>\n{OSLO}\n</tool_call>\n",
    "tag and list": f"<tool_call>[\n{OSLO}\n]</tool_call>",
    "tag of OpenAI's": f'<tool_calls>[{{"function":{OSLO}}}]</tool_calls>',
    "tag without end": f"<tool_call>\n{OSLO}\n",
}
UNENDED = {                              # no text can follow these formats
    "fence without end": f"```json\n{OSLO}",
    "fence, cut end": f"```json\n{OSLO}\n``",
    "tag, cut end": f"<tool_call>{OSLO}</tool_ca",
}


@pytest.mark.parametrize("form", [*FORMS, *UNENDED])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("Let me see.\n\n", ""), ("<think>\n[{\n</think>\n", ""),
                                               ("So: ", "\nOK?")])
def test_a_call_in_every_format_is_found_between_texts(form: str, before: str, after: str) -> None:
    after = after if form in FORMS else ""
    written = before + {**FORMS, **UNENDED}[form] + after
    assert parse([written]) == (before.rstrip() + after.lstrip(), [ONE])
    assert parse([*written, ""]) == parse([written])


@pytest.mark.parametrize("written", [
    f"{OSLO}\n{RAIN}", f"{OSLO}{RAIN}", f"[{OSLO}, {RAIN}]", f"```json\n[{OSLO},{RAIN}]\n```", f"```json\n{OSLO}\n{RAIN}\n```",
    f"```json\n{OSLO}\n```\n\n```json\n{RAIN}\n```", f"<tool_call>{OSLO}</tool_call>\n<tool_call>{RAIN}</tool_call>",
    f"<tool_call>{OSLO}<tool_call>{RAIN}", f"<tool_call>\n{OSLO}\n{RAIN}\n</tool_call>", f"<tool_calls>[{OSLO}, {RAIN}]"])
def test_several_calls_in_a_row(written: str) -> None:
    assert parse([written]) == ("", [ONE, ("rain", "{}")])
    assert parse([*written, ""]) == parse([written])
    assert parse([*f"{written} and so on", ""], most=1) == ("", [ONE])


@pytest.mark.parametrize("written", [
    "", "  \n", "<tool_call", "```", "**Tool Call:**", "a </tool_call> <tool_call>{} b",
    "5 < 6 <tools> <tool_call>{weather}</tool_call>!", "[1], [a](b), {c} and {", '{"type": "object"}',
    '{"name": "rm", "arguments": {}}', '<tool_call>{"name": "rm", "arguments": {}}</tool_call>.', f"[{RAIN}, {{}}]",
    f'[{RAIN}, {{"name": "rm", "arguments": {{}}}}]', '{"name": "weather", "age": 3}', '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": "Oslo"}', '{"name": "weather", "arguments": {"city": NaN}}',
    '{"name": "weather", "arguments": {"city": "Osl', '<tool_call>{"name": "weather", "argu', "```json\n{\"name\": \"wea",
    f'{{"result": {OSLO}}}', f'["x", {OSLO}]', f"```python\ncall = {OSLO}\n```", '```json\n{"a": 1}\n```',
    f'```json\n{{"calls": {OSLO}}}\n{OSLO}\n```', f"`{OSLO}`", f"<think>Do I say {OSLO} now?"])
def test_text_that_is_not_a_call_stays_text(written: str) -> None:
    assert parse([written]) == (written, [])
    assert parse([*written, ""]) == (written, [])


@pytest.mark.parametrize("arguments", [
    '{"a": [{"b": {"c": [1, [2]]}}, null]}', '{"ü": "☔ \\u2614", "\\u00fc": ""}', '{"n": 1e3, "m": 1.50,  "n": -0}', "{ }",
    '{"code": "```json\\n}\\n``` </tool_call> {[\\"\\\\"}', '{"half": "\\ud83d"}'])
def test_arguments_stay_verbatim(arguments: str) -> None:
    for written in (f'{{"name": "weather", "arguments": {arguments}}}',
                    f'```json\n{{"arguments":{arguments},"name":"weather"}}\n```'):
        assert parse([*written, ""]) == parse([written]) == ("", [("weather", arguments)])


@pytest.mark.parametrize("written", [
    '{"name": "rain"}', '```json\n{"name":"rain"}\n```', '<tool_call>{"name": "rain"}</tool_call>',
    '[{"name": "rain", "id": "1"}]', '{"type": "function", "function": {"name": "rain"}}'])
def test_a_call_may_have_no_arguments(written: str) -> None:
    assert parse([written]) == parse([*written, ""]) == ("", [("rain", "{}")])


@pytest.mark.parametrize("arguments", ["null", '""', '"{}"', '" {} "'])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert parse([f'{{"name": "rain", "arguments": {arguments}}}']) == ("", [("rain", "{}")])


def test_arguments_in_a_string_are_text_that_can_be_sent() -> None:
    _, [(_, arguments)] = parse(['{"name": "rain", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'])
    assert json.loads(arguments.encode()) == {"a": "\ud83d"}


@pytest.mark.parametrize(("rest", "expected"), [
    ('weather","arguments":{"city":"Ys"}}', ("", [("weather", '{"city":"Ys"}')])), ('weath', ('```json\n{"name":"weath', []))])
def test_a_call_that_begins_in_the_prompt_is_parsed(rest: str, expected: Answer) -> None:
    start = CALL_START[0]
    parser = CallParser(FUNCTIONS, start)
    text, calls = parser.push(rest, last=True)
    assert (text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]) == expected
    assert parser.decided == len(rest)


def test_text_is_not_held_back_once_it_cannot_be_a_call() -> None:
    for written in ("So ", '{"users": [1, ', '{"name": "rm', "```python\nx = {", "```json\n[1", "[link", "<b",
                    '<tool_call>x {"a": "'):
        assert CallParser(FUNCTIONS).push(f"{written}b")[0] == f"{written}b"


FRAGMENTS = [OSLO, RAIN, f"[{RAIN}]", f'{{"function": {OSLO}}}', '{"name": "rain', '{"x": ', '{"name"', '[{"name": "rm"}]',
             "{", "}", "[", "]", '"', "\\", "`", "```", "```json", "```python", "<tool_call>", "</tool_call>", "<tool_calls>",
             "</tool_calls>", "<tool", "**Tool Call:**", "**Tool", "<think>", "</think>", "\n", " ", ":", ", ", "null", "é☔",
             "word"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=14).map("".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.data(), st.sampled_from([None, 1, 2]))
def test_an_answer_is_parsed_the_same_however_it_is_split(written: str, data: st.DataObject, most: int | None) -> None:
    places = data.draw(st.lists(st.integers(0, len(written)), max_size=8).map(sorted))
    pieces = [written[begin:end] for begin, end in pairwise([0, *places, len(written)])]
    whole = parse([written], most=most)
    assert parse(pieces, most=most) == parse([*written, ""], most=most) == whole
    assert whole[1] or whole[0] == written


PROSE = st.text(st.characters(exclude_characters="`{[<*", exclude_categories=["Cs"]), max_size=12)
KEYS = st.text(max_size=4)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6)
CALLS = st.lists(st.tuples(st.sampled_from(FUNCTIONS), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(PROSE, CALLS)
def test_calls_that_the_template_renders_are_parsed_back(prose: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    message = {"role": "assistant", "content": prose}
    tool_calls = [call_of(name, json.dumps(arguments)) for name, arguments in calls]
    alone, with_calls = (chat_template("g1").render([each], False).removeprefix("Assistant:")
                         for each in (message, {**message, "tool_calls": tool_calls}))
    text, parsed_calls = parse([with_calls])
    assert [(name, json.loads(arguments)) for name, arguments in parsed_calls] == calls
    assert text.strip() == alone.strip()
