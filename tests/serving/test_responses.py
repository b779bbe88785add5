"""Tests of OpenAI's Responses by the official client, against the real server."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest
from serving_runs import LETTERS, Running
from test_limits import check_error
from test_tools import TOOLS

from rwkv.serving.responses.items import input_items, messages_of

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def read_of(response: Any) -> int:
    """Returns the number of prompt tokens that were read for the response and not cached."""
    return int(response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens)


def test_a_response_is_the_answer_of_a_chat(client: "openai.OpenAI") -> None:
    chat = client.chat.completions.create(model="tiny", seed=5, max_tokens=12, messages=[
        {"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    forms: list[Any] = ["hi", [{"role": "user", "content": "hi"}],
                        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]]
    for form in forms:
        response = client.responses.create(model="tiny", instructions="be", input=form, max_output_tokens=12,
                                           metadata={"a": "b"}, extra_body={"seed": 5})
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None
        assert chat.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens,
                                                                              chat.usage.completion_tokens)
        assert (response.object, response.metadata, response.instructions) == ("response", {"a": "b"}, "be")
        cut = chat.choices[0].finish_reason == "length"
        assert (response.status, response.incomplete_details is not None) == ("incomplete" if cut else "completed", cut)


def test_the_streams_events_tell_the_whole_response(client: "openai.OpenAI") -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 12,
                               "extra_body": {"seed": 5, "logit_bias": LETTERS}}
    whole: Any = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
                     "response.output_text.done", "response.content_part.done", "response.output_item.done",
                     "response.incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    options["extra_body"]["stop"] = ["a", "e", "i", "o"]
    options["max_output_tokens"] = 100
    with client.responses.stream(**options) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_text == client.responses.create(**options).output_text
    stored = client.responses.retrieve(last.response.id)
    assert stored.to_dict() == last.response.to_dict()


@pytest.mark.parametrize("stream", [False, True])
def test_a_previous_response_is_a_state(client: "openai.OpenAI", stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 5, "logit_bias": LETTERS}}
    long = "It was a long story. " * 90

    def ask(**more: Any) -> Any:
        answer = client.responses.create(**options, **more, stream=stream)
        return list(answer)[-1].response if stream else answer

    first = ask(instructions="be", input=long)
    turn = "\n\nUser: and?\n\nAssistant:"
    second = ask(instructions="be", input="and?", previous_response_id=first.id)
    assert read_of(second) == len(turn), "nothing is read again"
    third = ask(instructions="be", input="so?", previous_response_id=second.id)
    assert read_of(third) == len(turn.replace("and", "so"))
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": long},
                {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and?"}]
    chat = client.chat.completions.create(model="tiny", max_tokens=12, seed=5, messages=messages,         # type: ignore[arg-type]
                                          extra_body={"logit_bias": LETTERS})
    items = [{"role": "user", "content": long}, *[item.to_dict() for item in first.output], {"role": "user", "content": "and?"}]
    alone = ask(instructions="be", input=items)
    assert alone.output_text == chat.choices[0].message.content
    other = ask(instructions="do", input="and?", previous_response_id=first.id)
    messages[0]["content"] = "do"
    chat = client.chat.completions.create(model="tiny", max_tokens=12, seed=5, messages=messages,         # type: ignore[arg-type]
                                          extra_body={"logit_bias": LETTERS})
    assert other.output_text == chat.choices[0].message.content, "instructions are those of the last request"


def test_a_reference_stands_for_a_stored_item(client: "openai.OpenAI", api: httpx.Client) -> None:
    """Vercel's AI SDK sends references in place of its earlier answers."""
    def ask(items: list[Any], **more: Any) -> Any:
        return client.responses.create(model="tiny", input=items, max_output_tokens=12,
                                       extra_body={"seed": 5, "logit_bias": LETTERS}, **more)

    first = ask([{"role": "user", "content": "a"}])
    sent = client.responses.input_items.list(first.id).data[0]
    question = {"role": "user", "content": "and?"}
    whole = ask([sent.to_dict(), first.output[0].to_dict(), question])
    second = ask([*({"type": "item_reference", "id": item.id} for item in (sent, *first.output)), question])
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    client.responses.delete(whole.id)
    client.responses.delete(second.id)
    body = {"input": [question, {"type": "item_reference", "id": first.output[0].id}], "max_output_tokens": 1, "store": False}
    assert api.post("/responses", json=body).status_code == 200, "the first response still has the item"
    client.responses.delete(first.id)
    answer = api.post("/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input[1]")


def test_responses_are_kept_listed_and_deleted(client: "openai.OpenAI", api: httpx.Client) -> None:
    import openai

    response = client.responses.create(model="tiny", input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
                                       max_output_tokens=3)
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    items: list[Any] = list(client.responses.input_items.list(response.id, limit=1))
    assert [item.content[0].text for item in items] == ["b", "a"]
    assert [item.id for item in client.responses.input_items.list(response.id, order="asc")] == [items[1].id, items[0].id]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)
    states = len(api.get("/states").json()["data"])
    client.responses.delete(response.id)
    assert len(api.get("/states").json()["data"]) == states - 1, "its state is freed"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    not_stored = client.responses.create(model="tiny", input="a", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)
    assert len(api.get("/states").json()["data"]) == states - 1
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="a", previous_response_id=not_stored.id)


@pytest.mark.parametrize(("mib", "metadata"), [(0, {}), (1, {"a": "b" * 2**20})], ids=["none", "less"])
def test_a_response_without_room_says_that_it_is_not_stored(start: Callable[..., Running], mib: int,
                                                            metadata: dict[str, str]) -> None:
    """Stored responses stay, and no state is left for a response that is not stored."""
    server = start(f"responses_mib={mib}")

    def ask(**fields: Any) -> Any:
        return httpx.post(f"{server.url}/v1/responses", json={"max_output_tokens": 2, **fields}, timeout=60).json()

    earlier = ask(input="a")
    states = httpx.get(f"{server.url}/v1/states").json()["data"]
    assert (earlier["store"], len(states)) == (bool(mib), mib)
    answer = ask(input="a", store=True, metadata=metadata)
    assert answer["store"] is False
    for response, status in ((earlier, 200 if mib else 404), (answer, 404)):
        assert httpx.get(f"{server.url}/v1/responses/{response['id']}").status_code == status
    assert httpx.get(f"{server.url}/v1/states").json()["data"] == states


def test_a_response_without_its_state_reads_everything_again(client: "openai.OpenAI", api: httpx.Client) -> None:
    import openai

    options: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "extra_body": {"seed": 5, "logit_bias": LETTERS}}
    first = client.responses.create(input="hi", **options)
    second = client.responses.create(input="and?", previous_response_id=first.id, **options)
    for state in api.get("/states").json()["data"]:
        assert api.delete(f"/states/{state['id']}").status_code == 200
    again = client.responses.create(input="and?", previous_response_id=first.id, **options)
    assert again.output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="so?", previous_response_id=again.id, instructions="x", **options)


def test_a_response_continues_a_state_and_gives_one(client: "openai.OpenAI", api: httpx.Client) -> None:
    state = api.post("/states", json={"messages": [{"role": "system", "content": "be"}]}).json()["id"]
    response: Any = client.responses.create(model="tiny", input="hi", max_output_tokens=5,
                                            extra_body={"state": state, "save_state": True, "seed": 1})
    whole = client.responses.create(model="tiny", instructions="be", input="hi", max_output_tokens=5, extra_body={"seed": 1})
    assert response.output_text == whole.output_text
    client.responses.delete(response.id)
    assert api.get(f"/states/{response.state}").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_and_results_continue_the_response(tool_client: "openai.OpenAI", stream: bool) -> None:
    def ask(**more: Any) -> Any:
        answer = tool_client.responses.create(model="tiny", temperature=0, max_output_tokens=50, tools=FUNCTIONS, stream=stream,
                                              **more)
        if not stream:
            return answer
        events = list(answer)
        deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        assert deltas == "".join(item.arguments for item in events[-1].response.output if item.type == "function_call")
        return events[-1].response

    response = ask(input="1")
    text, call = response.output
    assert (text.type, text.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments), call.status) == ("function_call", "weather", {"city": "Oslo"},
                                                                             "completed")
    assert response.status == "completed"
    two = ask(input="2")
    assert [item.name for item in two.output] == ["weather", "time_of_day"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    after = ask(input=[result], previous_response_id=response.id)
    sent_back = ask(input=[{"role": "user", "content": "1"}, *[item.to_dict() for item in response.output], result])
    assert after.output_text == sent_back.output_text
    demanded = ask(input="x", tool_choice={"type": "function", "name": "weather"})
    assert demanded.tool_choice.name == "weather"
    for mode, question, names in (("auto", "2", ["time_of_day"]), ("required", "1", ["time_of_day"])):
        subset = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time_of_day"}]}
        some = ask(input=question, tool_choice=subset)
        assert [item.name for item in some.output if item.type == "function_call"] == names
        assert some.tool_choice.mode == mode


def test_log_probabilities_are_those_of_the_text(client: "openai.OpenAI") -> None:
    response: Any = client.responses.create(model="tiny", input="hi", max_output_tokens=5, top_logprobs=2,
                                            include=["message.output_text.logprobs"], extra_body={"logit_bias": LETTERS})
    part = response.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_include_may_name_fields_that_this_server_never_returns(client: "openai.OpenAI") -> None:
    request: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 5, "extra_body": {"seed": 1}}
    include: Any = ["reasoning.encrypted_content", "web_search_call.action.sources", "file_search_call.results"]
    assert client.responses.create(**request, include=include).output_text == client.responses.create(**request).output_text


def test_a_schema_is_enforced_and_parsed(client: "openai.OpenAI") -> None:
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Answer(pydantic.BaseModel):
        good: bool
        kind: Literal["a", "b"]

    first = client.responses.parse(model="tiny", input="hi", text_format=Answer, max_output_tokens=100)
    assert isinstance(first.output_parsed, Answer)
    second = client.responses.parse(model="tiny", input="and?", text_format=Answer, previous_response_id=first.id)
    assert isinstance(second.output_parsed, Answer)
    with client.responses.stream(model="tiny", input="hi", text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_items_are_messages() -> None:
    items = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
             {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
             {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
             {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
             {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "1", "output": "c"},
             {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "d"}]},
             {"role": "assistant", "content": "e"}, {"role": "assistant", "content": "f"}]
    calls = [{"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}} for each, name in ("1f", "2g")]
    assert messages_of(input_items(items)) == [
        {"role": "developer", "content": "be"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "c"}, {"role": "tool", "tool_call_id": "2", "content": "d"},
        {"role": "assistant", "content": "e"}, {"role": "assistant", "content": "f"}]


BARE: list[dict[str, Any]] = [{"type": "reasoning", "summary": [], "encrypted_content": "zz"},
                              {"type": "reasoning", "content": [], "summary": [{"type": "summary_text", "text": "\n"}]},
                              {"type": "reasoning", "content": None}, {"type": "reasoning", "content": [{"text": " "}]}]
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "c"}
QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("items", [[QUESTION, ANSWER, QUESTION], [QUESTION, CALL, RESULT], [QUESTION], [ANSWER, CALL, RESULT],
                                   [QUESTION, ANSWER, ANSWER]], ids=str)
def test_reasoning_without_text_changes_nothing(items: list[dict[str, Any]]) -> None:
    expected = messages_of(input_items(items))
    for bare in BARE:
        for place in range(len(items) + 1):
            assert messages_of(input_items([*items[:place], bare, bare, *items[place:]])) == expected


def test_a_summary_replaces_reasoning_without_text() -> None:
    """Other servers encrypt the text of reasoning, and a conversation may continue here."""
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]}
    text = [{"type": "reasoning_text", "text": "hm"}]
    for item, expected in ((summary | {"encrypted_content": "zz"}, "s\nt"), (summary | {"content": None}, "s\nt"),
                           (summary | {"content": text}, "hm")):
        items = input_items([item, ANSWER])
        assert items[0]["summary"] == summary["summary"]
        assert messages_of(items) == [ANSWER | {"reasoning_content": expected}]


def test_texts_around_calls_are_one_answer() -> None:
    """The results of calls follow the message with the calls, as templates expect."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    after = {"role": "assistant", "content": "c"}
    answer, tool = messages_of(input_items([thought, thought, ANSWER, CALL, after, RESULT]))
    assert (answer["content"], answer["reasoning_content"], len(answer["tool_calls"])) == ("b\nc", "hm\nhm", 1)
    assert tool["role"] == "tool"
    assert [message["content"] for message in messages_of(input_items([CALL, after, ANSWER]))] == ["c\nb"]
    assert [message.get("reasoning_content") for message in messages_of(input_items([ANSWER, thought, after]))] == [None, "hm"]


WRONG: list[tuple[str, Any]] = [
    *[("input", value) for value in ([], 3, {}, [3], [{}], [{"role": "nobody", "content": "x"}], [{"role": "user"}],
                                     [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "input_image"}]}],
                                     [{"type": "item_reference", "id": "x"}], [{"type": "function_call", "name": "f"}],
                                     [{"type": "function_call_output", "call_id": "x"}], [{"type": []}],
                                     [{"type": "reasoning", "content": [3]}], "\0", "a" * 40_000)],
    *[("previous_response_id", value) for value in ("x", 3, "", "../x", "resp_" + "0" * 32)],
    *[("background", value) for value in (True, 3)], *[("conversation", value) for value in ("x", {})],
    *[("tools", value) for value in ([{"type": "web_search"}], [{}], 3, [{"type": "function", "name": "f"}])],
    *[("tool_choice", value) for value in ("required", "x", {"type": "function", "name": "f"}, {"type": "web_search"},
                                           {"type": "allowed_tools", "mode": "auto", "tools": []},
                                           {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]})],
    *[("include", value) for value in (["unknown"], "message.output_text.logprobs", [3])],
    *[("max_output_tokens", value) for value in (-2, 1.5, "x", 2**40)],
    *[("reasoning", value) for value in (3, {"effort": "x"})],
    *[("text", value) for value in ({"format": {"type": "x"}}, {"format": 3}, {"x": 1})], ("top_logprobs", 21),
    *[("metadata", value) for value in ({"a": 1}, 3, {str(number): "" for number in range(17)})], ("temperature", 3),
    *[("state", value) for value in ("x", 3)], ("unknown", 1), ("model", "other"), ("stop", ""), ("instructions", 3),
    ("prompt", {"id": "x"}), ("stream", "yes"), ("n", 2)]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda each: str(each)[:30])
def test_a_wrong_field_is_named(api: httpx.Client, field: str, value: Any) -> None:
    check_error(api.post("/responses", json={"input": "a", "max_output_tokens": 1, field: value}), field)


def test_the_tokens_of_an_input_are_counted(client: "openai.OpenAI") -> None:
    """The count is the number of tokens that the response then reads, with and without an earlier response."""
    request: dict[str, Any] = {"model": "tiny", "input": "hi", "instructions": "be"}
    first = client.responses.create(**request, max_output_tokens=4)
    assert first.usage is not None
    assert client.responses.input_tokens.count(**request).input_tokens == first.usage.input_tokens
    more: dict[str, Any] = {"model": "tiny", "input": "more", "previous_response_id": first.id}
    count = client.responses.input_tokens.count(**more)
    second = client.responses.create(**more, max_output_tokens=4, truncation="auto")
    assert second.usage is not None
    assert (count.object, count.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    assert second.truncation == "auto"


def test_another_truncation_is_refused(api: httpx.Client) -> None:
    check_error(api.post("/responses", json={"input": "hi", "truncation": "some"}), "truncation")
    check_error(api.post("/responses/input_tokens", json={"input": 3}), "input")
