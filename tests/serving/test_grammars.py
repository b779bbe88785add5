"""Tests of response_format, grammar and tool_choice: the official client receives answers that match their schema."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema_rs
import pydantic
import pytest
from schemas import SCHEMAS, closed
from serving_runs import Running, client_of

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CITY = closed(city={"type": "string", "maxLength": 5}, days={"type": "integer", "minimum": 1, "maximum": 9})
TIME = closed(zone={"enum": ["UTC", "CET"]})


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    age: int = pydantic.Field(ge=0, le=120)
    tags: list[bool] = pydantic.Field(max_length=2)


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    optional = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **optional, **more}}


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def g1_api(g1: Running) -> Iterator["openai.OpenAI"]:
    with client_of(g1) as openai_client:
        yield openai_client


def ask(client: "openai.OpenAI", **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "temperature": 1, "max_tokens": 800, "seed": 1,
                                             **options})


def assert_valid(schema: dict[str, Any], text: str) -> None:
    jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))


def test_an_answer_is_valid_and_streamed_the_same(g1_api: "openai.OpenAI") -> None:
    schema = SCHEMAS[12]
    answer = ask(g1_api, response_format=form(schema), n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert_valid(schema, choice.message.content)
    pieces = ["", "", ""]
    for chunk in ask(g1_api, response_format=form(schema), n=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == [choice.message.content for choice in answer.choices]


def test_json_object_and_length(g1_api: "openai.OpenAI") -> None:
    format = {"type": "json_object"}
    choices = ask(g1_api, response_format=format, n=8, max_tokens=100, temperature=0.9).choices
    assert {choice.finish_reason for choice in choices} <= {"stop", "length"}
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in choices if choice.finish_reason == "stop")
    assert ask(g1_api, response_format=form(CITY), max_tokens=3).choices[0].finish_reason == "length"


def test_parse_with_pydantic(g1_api: "openai.OpenAI") -> None:
    answer = g1_api.chat.completions.parse(model="tiny", messages=HELLO, response_format=Person, seed=2, max_tokens=800)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_thoughts_come_before_an_answer(g1_api: "openai.OpenAI") -> None:
    for think in ("true", "fake"):
        message = ask(g1_api, response_format=form(CITY), max_tokens=2000, temperature=0.3,
                      extra_body={"chat_template_kwargs": {"think": think}},
                      logit_bias={str(byte): 8 for byte in b"</think>"}).choices[0].message
        assert think == "true" or message.content
        if message.content:              # the thoughts have ended
            assert_valid(CITY, message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_made(g1_api: "openai.OpenAI", stream: bool) -> None:
    tools = [tool("weather", CITY, strict=True), tool("time", TIME), tool("ping")]
    schemas = {"weather": CITY, "time": TIME, "ping": {"type": "object"}}
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        ended = 0
        for seed in range(4):
            answer = ask(g1_api, tools=tools, tool_choice=choice, seed=seed, stream=stream, max_tokens=500, temperature=0.7)
            if stream:
                chunks = [chunk.choices[0] for chunk in answer]
                calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
                reason = chunks[-1].finish_reason
            else:
                calls, reason = answer.choices[0].message.tool_calls or [], answer.choices[0].finish_reason
            if reason == "length":
                continue
            call, = calls
            assert reason == "tool_calls"
            assert_valid(schemas[call.function.name], call.function.arguments)
            assert choice == "required" or call.function.name == "time"
            ended += 1
        assert ended


def test_tools_and_a_schema(g1_api: "openai.OpenAI") -> None:
    for seed in range(6):
        message = ask(g1_api, tools=[tool("time", TIME)], response_format=form(CITY), seed=seed).choices[0].message
        if message.tool_calls:
            assert_valid(TIME, message.tool_calls[0].function.arguments)
        else:
            assert_valid(CITY, message.content)


def test_grammars(g1_api: "openai.OpenAI") -> None:
    regex = {"grammar": {"syntax": "regex", "definition": "(yes|no){2}"}}
    lark = {"grammar": {"syntax": "lark", "definition": 'start: "a" B\nB: /[0-9]{3}/'}}
    assert ask(g1_api, extra_body=regex).choices[0].message.content in ("yesyes", "yesno", "noyes", "nono")
    completion = g1_api.completions.create(model="tiny", prompt="x", extra_body=lark, logprobs=5, max_tokens=9)
    assert len(completion.choices[0].text) == 4
    assert [*completion.choices[0].logprobs.top_logprobs[0]] == ["a"]
    completion = g1_api.completions.create(model="tiny", prompt="x", extra_body={"response_format": form(TIME)}, max_tokens=900)
    assert_valid(TIME, completion.choices[0].text)


def test_vllm_s_constraints(g1_api: "openai.OpenAI") -> None:
    """vLLM's clients, such as outlines and guidance, send structured_outputs, and older ones guided_json and the like."""
    def texts(kind: str, value: Any) -> set[str]:
        forms: list[dict[str, Any]] = [{"structured_outputs": {kind: value}}, {f"guided_{kind}": value}]
        chats = [ask(g1_api, extra_body=form).choices[0].message.content for form in forms]
        completions = [g1_api.completions.create(model="tiny", prompt="x", extra_body=form, max_tokens=800).choices[0].text
                       for form in forms]
        return {*chats, *completions}

    assert texts("choice", ["yes", 'no "way"']) <= {"yes", 'no "way"'}
    assert texts("regex", "(yes|no){2}") <= {"yesyes", "yesno", "noyes", "nono"}
    assert texts("grammar", 'start: "a" "b"') == {"ab"}
    for schema in (TIME, json.dumps(TIME)):
        for text in texts("json", schema):
            assert_valid(TIME, text)
    both = {"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'}        # guidance sends both
    assert ask(g1_api, extra_body=both).choices[0].message.content == "a"
    equal = {"guided_json": json.dumps(TIME), "structured_outputs": {"json": TIME, "disable_fallback": False}}
    assert_valid(TIME, ask(g1_api, extra_body=equal).choices[0].message.content)
    empty = {"guided_json": "", "guided_regex": "", "guided_choice": [], "guided_grammar": "", "structured_outputs": {}}
    assert ask(g1_api, extra_body=empty).choices == ask(g1_api).choices
    answer = ask(g1_api, extra_body={"structured_outputs": {"json_object": True}}).choices[0].message.content
    assert isinstance(json.loads(answer), dict)


def test_a_blank_line_does_not_end_json(client: "openai.OpenAI") -> None:
    for seed in range(5):                # the template world ends an answer at a blank line
        answer = ask(client, response_format=form(CITY), seed=seed, temperature=2)
        assert_valid(CITY, answer.choices[0].message.content)


@pytest.mark.parametrize(("options", "param"), [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": form({"properties": {"a": {"type": "strin"}}})}, "response_format.json_schema.schema.properties.a"),
    ({"response_format": form(CITY), "grammar": {"syntax": "regex", "definition": "a"}}, "grammar"),
    ({"grammar": {"syntax": "regex", "definition": "a("}}, "grammar.definition"),
    ({"grammar": {"syntax": "lark", "definition": ""}}, "grammar.definition"),
    ({"grammar": "a"}, "grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
    ({"guided_choice": ["a"], "response_format": form(CITY)}, "response_format"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": "[]"}, "guided_json"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
    ({"tools": [tool("a"), tool("b", {"type": "object", "properties": {"x": {"if": {}}}})], "tool_choice": "required"},
     "tools[1].function.parameters.properties.x")])
def test_what_a_schema_cannot_enforce_is_a_400(g1: Running, options: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{g1.url}/v1/chat/completions", json={"messages": HELLO, **options})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"]


def test_a_schema_that_is_nested_too_deeply_is_a_400(g1: Running) -> None:
    schema = '{"items":' * 900 + "{}" + "}" * 900
    body = json.dumps({"messages": HELLO, "response_format": form({})}).replace('"schema": {}', f'"schema": {schema}')
    assert httpx.post(f"{g1.url}/v1/chat/completions", content=body, timeout=60).status_code == 400
