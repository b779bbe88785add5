"""Tests of thoughts through the server: apart from the text, whole and streamed, with stops and log-probabilities.

The model is a tiny one with the name of a released model, and no option names its chat template.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from models import writing
from serving_runs import Running, client_of, serving

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
NAME = "rwkv7-g1k-1.5b-20260930-ctx25600"
# The model writes UNASKED after "Assistant:", and ASKED after "<think" and "<think></think". Each token occurs once.
UNASKED = [b":", b" <thi", b"nk>", b"\nOne, \n\n", b"two. </", b"think>\n", b"\xe2", b"\x82\xac", b" for STOP", b" all"]
ASKED = [b"k", b">\n", b"Hm.", b" Well </t", b"hink>", b"\nNo", b"!"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("thoughts")
    model, tokenizer = writing(UNASKED, ASKED)
    path = folder / f"{NAME}.safetensors"
    model.save_pretrained(path, tokenizer)
    with serving(folder, f"checkpoint={path}") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator["openai.OpenAI"]:
    with client_of(server) as openai_client:
        yield openai_client


FALSE, TRUE, FAKE = ({"chat_template_kwargs": {"think": think}} for think in (False, "true", "fake"))


@pytest.mark.parametrize(("options", "thoughts", "content", "reason"), [
    ({}, "One, \n\ntwo.", "€ for STOP all", "stop"), ({"extra_body": FALSE}, "One, \n\ntwo.", "€ for STOP all", "stop"),
    ({"n": 2, "stop": "STOP"}, "One, \n\ntwo.", "€ for ", "stop"), ({"stop": "two"}, "One,", "", "stop"),
    ({"max_tokens": 1}, "", "<thi", "length"), ({"max_tokens": 4}, "One, \n\ntwo. </", "", "length"),
    ({"max_tokens": 6}, "One, \n\ntwo.", "\ufffd", "length"), ({"extra_body": TRUE}, "Hm. Well", "No!", "stop"),
    ({"extra_body": {"enable_thinking": True}, "max_tokens": 2}, "Hm.", "", "length"),
    ({"extra_body": {"thinking": {"type": "enabled", "budget_tokens": 9}}}, "Hm. Well", "No!", "stop"),
    ({"extra_body": {"thinking": {"type": "disabled"}}}, "One, \n\ntwo.", "€ for STOP all", "stop"),
    ({"reasoning_effort": "high"}, "Hm. Well", "No!", "stop"), ({"extra_body": FAKE}, "", "Hm. Well </think>\nNo!", "stop"),
    ({"reasoning_effort": "minimal"}, "", "Hm. Well </think>\nNo!", "stop"),
    ({"reasoning_effort": "none", "max_tokens": 3}, "One,", "", "length")], ids=str)
def test_thoughts_are_separate_from_the_text(client: "openai.OpenAI", options: dict[str, Any], thoughts: str, content: str,
                                             reason: str) -> None:
    request = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 20,
               "logprobs": True, **options}
    whole = client.chat.completions.create(**request)
    streamed = {choice.index: ["", "", [], None] for choice in whole.choices}
    for chunk in client.chat.completions.create(**request, stream=True):
        choice, = chunk.choices
        of_choice: list[Any] = streamed[choice.index]
        of_choice[0] += getattr(choice.delta, "reasoning_content", None) or ""
        of_choice[1] += choice.delta.content or ""
        of_choice[2] += choice.logprobs.content if choice.logprobs else []
        of_choice[3] = choice.finish_reason
    for choice in whole.choices:
        assert (getattr(choice.message, "reasoning_content", ""), choice.message.content) == (thoughts, content)
        assert choice.finish_reason == reason
        assert streamed[choice.index] == [thoughts, content, choice.logprobs.content, reason]
        assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode(errors="replace") == content


def test_a_required_call_follows_an_empty_thought(client: "openai.OpenAI") -> None:
    """The prompt has the empty thought only if the request asks for it.

    think=true is refused, because thoughts cannot precede a required call.
    """
    import openai

    tool = {"type": "function", "function": {"name": "f"}}
    request: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1,
                               "tools": [tool], "tool_choice": "required"}
    plain = client.chat.completions.create(**request).usage.prompt_tokens
    fake = client.chat.completions.create(**request, extra_body=FAKE).usage.prompt_tokens
    assert fake > plain
    assert client.chat.completions.create(**request, reasoning_effort="high").usage.prompt_tokens == plain
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**request, extra_body=TRUE)


def test_an_answer_with_its_thoughts_can_be_sent_back(client: "openai.OpenAI") -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    first = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=20)
    messages += [first.choices[0].message.model_dump(), messages[0]]
    second = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=20)
    assert second.choices[0].message.content == first.choices[0].message.content
    del messages[1]["reasoning_content"]
    bare = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=20)
    assert bare.usage.prompt_tokens < second.usage.prompt_tokens, "the template shows thoughts of earlier turns"


@pytest.mark.parametrize(("beginning", "thoughts", "content"), [
    ("<think>\nHm.", "Well", "No!"), ("<think", "Hm. Well", "No!"), ("<think>", "One, \n\ntwo.", "€ for STOP all"),
    ("<think></think", "", "Hm. Well </think>\nNo!"), ("<think>So</think>\n", "", "€ for STOP all"),
    ("<think>So</think>\n\nNo", "", "!"), ("So\nNo", "", "!"), ("So <think>\nHm.", "", " Well </think>\nNo!")])
def test_an_answer_is_continued_in_its_thoughts_or_in_its_text(client: "openai.OpenAI", beginning: str, thoughts: str,
                                                               content: str) -> None:
    request: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"},
                                                           {"role": "assistant", "content": beginning}], "temperature": 0,
                               "max_tokens": 20, "extra_body": {"continue_final_message": True}}
    message = client.chat.completions.create(**request).choices[0].message
    assert (getattr(message, "reasoning_content", "").strip(), message.content) == (thoughts, content)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == thoughts
    assert "".join(delta.content or "" for delta in deltas) == content


@pytest.mark.parametrize(("options", "field"), [
    ({"reasoning_effort": "much"}, "reasoning_effort"), ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"chat_template_kwargs": {"think": "maybe"}}, "chat_template_kwargs.think"),
    ({"chat_template_kwargs": {"reasoning_effort": "x"}}, "chat_template_kwargs.reasoning_effort"),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
    ({"enable_thinking": True, "chat_template_kwargs": {"think": False}}, "enable_thinking"),
    ({"enable_thinking": False, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"), ({"thinking": {"type": "on"}}, "thinking.type"),
    *((options, None) for options in (
        {"enable_thinking": False, "thinking": {"type": "auto"}}, {"enable_thinking": None}, {"reasoning_effort": None},
        {"chat_template_kwargs": {"think": None}},
        {"enable_thinking": True, "chat_template_kwargs": {"think": "fake"}}, {"reasoning_effort": "max"},
        {"enable_thinking": True, "reasoning_effort": "minimal"}, {"enable_thinking": False, "reasoning_effort": "none"}))],
    ids=str)
def test_conflicting_options_are_named(server: Running, options: dict[str, Any], field: str | None) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **options}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == (400 if field else 200)
    if field:
        assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_an_item_of_a_response(client: "openai.OpenAI", stream: bool) -> None:
    answer: Any = client.responses.create(model=NAME, input="Hi", temperature=0, max_output_tokens=20, stream=stream,
                                          reasoning={"effort": "high"})
    response = answer
    if stream:
        events = list(answer)
        response = events[-1].response
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm. Well"
    assert [(item.type, item.content[0].text) for item in response.output] == [("reasoning", "Hm. Well"), ("message", "No!")]
    assert (response.output_text, response.reasoning.effort) == ("No!", "high")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens <= response.usage.output_tokens
    cut = client.responses.create(model=NAME, input="Hi", temperature=0, max_output_tokens=2, reasoning={"effort": "high"})
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]      # type: ignore[union-attr]
