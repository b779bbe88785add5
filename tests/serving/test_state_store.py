"""Tests states made of prompts, messages, files and answers: continued, listed, downloaded, freed and kept over a restart."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from models import small_model
from safetensors.torch import load, save
from serving_runs import LETTERS, Running, post, reset, serving, wait_until
from test_limits import BODIES, check_error

from rwkv.chat.turn_templates import chat_template
from rwkv.config import Sampling, ServeConfig
from rwkv.errors import UserError
from rwkv.generation.engine import Engine, generate, generate_batch
from rwkv.generation.prefill import prefill
from rwkv.generation.request import Request
from rwkv.generation.state_files import CHECKSUM, StateFormat, checksum, load_context, metadata_of, save_context
from rwkv.generation.stopping import StoppingCriteria
from rwkv.pretrained import RWKV
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import SavedState
from rwkv.serving.responses.store import Responses, StoredResponse
from rwkv.serving.states.client_states import ClientStates
from rwkv.serving.states.store import StateGone, StateStore
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.programs
BYTES = ByteTokenizer()
FILE = {"content-type": "application/octet-stream"}
PLAIN = {"temperature": 1.0, "top_p": 1.0}
TURN = ("role", "tail", "tools", "template")
STATE_MIB = 1                            # this holds 64 states of `deep`


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def make_state(api: httpx.Client, **body: Any) -> Any:
    return ok(api.post("/states", json=body))


def complete(api: httpx.Client, **body: Any) -> Any:
    return ok(api.post("/completions", json={"max_tokens": 12, "seed": 3, **body}))


def text_after(model: RWKV, prompt: str, n: int = 12, seed: int = 3, **options: Any) -> str:
    return generate_batch(model, BYTES, [prompt], n, seeds=[seed], **{**PLAIN, **options})[0].text


def test_a_state_is_continued_as_its_text_and_nothing_is_read_again(api: httpx.Client, model: RWKV) -> None:
    long = "It was a long story. " * 100
    state = make_state(api, prompt=long)
    assert (state["object"], state["tokens"]) == ("state", len(long))
    assert state["bytes"] == prefill(model, torch.tensor([BYTES.encode(long)])).nbytes()
    for more in ("And then", ""):
        answer = complete(api, state=state["id"], prompt=more)
        assert answer["choices"][0]["text"] == text_after(model, long + more)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(long + more)
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] == len(more), "tokens read"
    assert complete(api, state=state["id"])["choices"] == complete(api, state=state["id"], prompt="")["choices"]
    branch = make_state(api, state=state["id"], prompt="And")
    assert (branch["tokens"], branch["usage"]["prompt_tokens"]) == (len(long) + 3, len(long) + 3)
    assert complete(api, state=branch["id"], prompt=" then")["choices"][0]["text"] == text_after(model, long + "And then")
    echoed = complete(api, state=state["id"], prompt="a", echo=True, logprobs=1)["choices"][0]
    assert echoed["logprobs"]["tokens"][0] == "a"
    ids = complete(api, state=state["id"], prompt=[[*b"A"], [*b"B"]])["choices"]
    assert [choice["text"] for choice in ids] == [text_after(model, long + more) for more in "AB"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", [{}, {"stop": ["e", "\n"]}, {"logit_bias": {"0": 100}}, {"max_tokens": 0}], ids=str)
def test_the_end_of_an_answer_is_a_state_as_generate_saves_it(api: httpx.Client, model: RWKV, tmp_path: Path, stream: bool,
                                                              ending: dict[str, Any]) -> None:
    """The state is the one after the text, and after the stop string that ended the text."""
    body = {"prompt": "once", "max_tokens": 20, "seed": 7, "save_state": True, "stream": stream, **ending}
    answer = api.post("/completions", json=body)
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert [chunk["choices"][0].get("state") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        state = chunks[-1]["choices"][0]["state"]
    else:
        state = ok(answer)["choices"][0]["state"]
    engine = Engine(model, BYTES)
    stopping = StoppingCriteria(body["max_tokens"], ending.get("stop", ()))
    sampling = Sampling(**PLAIN, logit_bias={0: 100.0} if "logit_bias" in ending else {})
    engine.add_all([Request("once", 7, stopping, sampling)])
    engine.run()
    (tmp_path / "found.safetensors").write_bytes(api.get(f"/states/{state}/content").content)
    actual, expected = load_context(tmp_path / "found.safetensors", model, BYTES), engine.context()
    assert actual.last_ids == expected.last_ids
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)
    for one, other in zip(actual.state, expected.state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert ok(api.get(f"/states/{state}"))["tokens"] == len(expected.last_ids)


def test_each_of_several_texts_has_its_state(api: httpx.Client, model: RWKV) -> None:
    choices = complete(api, prompt="ab", n=3, save_state=True, logit_bias=LETTERS)["choices"]
    assert len({choice["state"] for choice in choices}) == 3
    for choice in choices:
        after = complete(api, state=choice["state"], prompt="!")["choices"][0]["text"]
        assert after == text_after(model, f"ab{choice['text']}!")


def test_states_are_listed_and_deleted(api: httpx.Client) -> None:
    states = [make_state(api, prompt=prompt) for prompt in ("a", "ab")]
    listed = {state["id"]: state for state in ok(api.get("/states"))["data"]}
    for state in states:
        assert state.pop("usage")
        assert listed[state["id"]] == ok(api.get(f"/states/{state['id']}")) == state
    state_id = states[0]["id"]
    assert ok(api.delete(f"/states/{state_id}"))["deleted"] is True
    for answer in (api.get(f"/states/{state_id}"), api.get(f"/states/{state_id}/content"), api.delete(f"/states/{state_id}"),
                   api.post("/completions", json={"prompt": "a", "state": state_id}),
                   api.post("/states", json={"prompt": "a", "state": state_id}),
                   api.post("/chat/completions", json={"messages": MESSAGES, "state": state_id})):
        check_error(answer)
        assert answer.status_code == 404
    assert state_id not in {state["id"] for state in ok(api.get("/states"))["data"]}


def test_a_file_is_downloaded_and_a_file_of_generate_is_uploaded(api: httpx.Client, model: RWKV, tmp_path: Path) -> None:
    state = make_state(api, prompt="once upon")
    content = api.get(f"/states/{state['id']}/content").content
    assert "owner" not in json.dumps(metadata_of(content)).replace('"owner": ""', "").replace('\\"owner\\": \\"\\"', "")
    again = ok(api.post("/states", content=content, headers=FILE))
    assert again["id"] != state["id"]
    assert (again["tokens"], again["bytes"]) == (state["tokens"], state["bytes"])
    read = prefill(model, torch.tensor([[*b"once upon"]]))._replace(last_ids=(*b"once upon",))
    save_context(tmp_path / "own.safetensors", read, model, BYTES)
    own = ok(api.post("/states", content=(tmp_path / "own.safetensors").read_bytes(), headers=FILE))
    assert own["tokens"] is None
    for each in (again, own):
        assert complete(api, state=each["id"], prompt=" a")["choices"][0]["text"] == text_after(model, "once upon a")


def state_file(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """Returns a state file with this content and its checksum."""
    return save(tensors, metadata | {CHECKSUM: checksum(tensors, metadata)})


def test_other_files_are_refused_in_one_sentence(api: httpx.Client, model: RWKV, tmp_path: Path) -> None:
    content = api.get(f"/states/{make_state(api, prompt='a')['id']}/content").content
    other = small_model("reference", vocab_size=256, n_embd=32, seed=1)
    save_context(tmp_path / "other.safetensors", prefill(other, torch.tensor([[1]])), other, BYTES)
    tensors, metadata = load(content), metadata_of(content)
    changed = save({**tensors, "logits": torch.zeros_like(tensors["logits"])}, metadata)
    broken = [*BODIES, b"x" * 100, content[:-1], content[:50], (tmp_path / "other.safetensors").read_bytes(), changed,
              state_file(tensors, {**metadata, "timemix-serve": json.dumps({"turn": dict.fromkeys(TURN, "nobody")})}),
              state_file({**tensors, "logits": tensors["logits"] * torch.nan}, metadata),
              state_file({"a": torch.ones(1)}, metadata),
              state_file(tensors, {**metadata, "last_ids": "[300]"}),
              state_file(tensors, {**metadata, "timemix-serve": '{"turn": 3}'}),
              state_file(tensors, {**metadata, "timemix-serve": '{"tokens": -1}'}),
              state_file(tensors, {**metadata, "timemix-serve": "[]"}),
              state_file({name: tensor.long() for name, tensor in tensors.items()}, metadata)]
    for each in broken:
        check_error(api.post("/states", content=each, headers=FILE))
    assert "different model" in api.post("/states", content=broken[len(BODIES) + 3], headers=FILE).json()["error"]["message"]
    assert "has changed" in api.post("/states", content=changed, headers=FILE).json()["error"]["message"]
    assert complete(api, prompt="a")["choices"]


@pytest.mark.parametrize("size", [1e38, -1e38])
def test_numbers_at_the_limit_of_float32_do_not_end_the_server(api: httpx.Client, size: float) -> None:
    content = api.get(f"/states/{make_state(api, prompt='a')['id']}/content").content
    tensors = {name: torch.full_like(tensor, size) for name, tensor in load(content).items()}
    state = ok(api.post("/states", content=state_file(tensors, metadata_of(content)), headers=FILE))["id"]
    for options in ({}, {"temperature": 0}, {"top_k": 5, "temperature": 2}, {"logprobs": 2, "presence_penalty": 1},
                    {"save_state": True}, {"prompt": "", "save_state": True, "max_tokens": 0}, {"stream": True}):
        assert api.post("/completions", json={"prompt": "a", "state": state, "max_tokens": 5, **options}).status_code < 500
    assert complete(api, prompt="a")["choices"]


MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("n_read", [1, 2])
def test_a_conversation_continues_from_its_messages_and_from_its_answers(api: httpx.Client, model: RWKV, n_read: int) -> None:
    chat = {"max_tokens": 12, "seed": 5, "save_state": True, "logit_bias": LETTERS}
    bias = {int(letter): value for letter, value in LETTERS.items()}
    first = ok(api.post("/chat/completions", json={**chat, "messages": MESSAGES}))
    state = make_state(api, messages=MESSAGES[:n_read])
    if n_read == 1:                        # with n_read == 2, no message is left to send
        again = ok(api.post("/chat/completions", json={**chat, "messages": MESSAGES[n_read:], "state": state["id"]}))
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    more = [{"role": "user", "content": "and?"}]
    second = ok(api.post("/chat/completions", json={**chat, "messages": more, "state": first["choices"][0]["state"]}))
    assert second["usage"]["prompt_tokens"] - second["usage"]["prompt_tokens_details"]["cached_tokens"] \
        <= len("\n\nUser: and?\n\nAssistant:")
    first_prompt = "System: be\n\nUser: hi\n\nAssistant:"
    prompt = f"{first_prompt}{text_after(model, first_prompt, 12, 5, logit_bias=bias)}\n\nUser: and?\n\nAssistant:"
    assert second["choices"][0]["message"]["content"] == text_after(model, prompt, 12, 5, logit_bias=bias)


def test_a_stop_string_that_was_read_is_not_read_again(api: httpx.Client, model: RWKV) -> None:
    """The bias makes the model write newlines, and so the template's stop string."""
    answer = ok(api.post("/chat/completions", json={"messages": MESSAGES, "max_tokens": 9, "save_state": True,
                                                    "logit_bias": {"10": 100}}))
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    second = ok(api.post("/chat/completions", json={"messages": [{"role": "user", "content": "and?"}], "state": choice["state"],
                                                    "max_tokens": 12, "seed": 5}))
    prompt = "System: be\n\nUser: hi\n\nAssistant:\n\nUser: and?\n\nAssistant:"
    assert second["choices"][0]["message"]["content"] == text_after(model, prompt, 12, 5, stop=["\n\n"]).lstrip()
    assert second["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("name", ["world", "g1", "flower"])
def test_turns_after_a_state_equal_those_of_the_whole_conversation(name: str) -> None:
    """The ids that are read up to the last message and after it are together those of the whole conversation."""
    template = chat_template(name)
    keeper = ClientStates(ServeConfig(), {}, {}, BYTES, template, 0)
    tool = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"},
                                      {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"},
                                      {"role": "assistant", "content": "it is"}, {"role": "user", "content": "good"}]
    if name == "world":                  # the template world has no form for calls, but it has one for their results
        messages += [{"role": "tool", "content": "rain"}, {"role": "assistant", "content": "it rains"}]
    for tools in ([None] if name == "world" else [None, tool]):
        whole = template.render(messages, tools=tools)
        for place in range(1, len(messages)):
            turn = keeper.turn_of_messages(messages[:place], tools, None)
            start: Any = type("State", (), {"turn": turn, "last_ids": ()})
            read = template.render(messages[:place], False, tools)
            assert read + keeper.prompt(start, messages[place:], tools) == whole


@pytest.mark.parametrize(("name", "role", "message", "field"), [
    ("file", "tool", {"role": "user", "content": "a"}, "state"),
    ("file", "user", {"role": "tool", "content": "a"}, "the chat template"),
    ("world", "tool", {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
    ("world", "user", {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
    ("flower", "assistant", {"role": "user", "content": "✿"}, "messages[0].content"),
    ("flower", "tool", {"role": "user", "content": "✿"}, "messages[0].content")])
def test_an_error_after_a_state_names_what_is_wrong_and_where_the_request_has_it(name: str, role: str, message: Any,
                                                                                 field: str, tmp_path: Path) -> None:
    path = tmp_path / "no_tools.jinja"
    path.write_text("{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
                    "{{ message.role }}: {{ message.content }}\n{% endfor %}")
    template = chat_template(str(path) if name == "file" else name)
    keeper = ClientStates(ServeConfig(), {}, {}, BYTES, template, 0)
    turn = replace(keeper.turn_of_answer(None, None), role=role)
    start: Any = type("State", (), {"turn": turn, "last_ids": ()})
    with pytest.raises((ApiError, UserError)) as error:
        keeper.prompt(start, [message], None)
    assert re.match(rf"{re.escape(field)}\b", str(error.value))


def test_a_file_of_a_tuned_state_precedes_a_whole_conversation(api: httpx.Client, model: RWKV, tmp_path: Path) -> None:
    """The state precedes the conversation as state= of chat.py does."""
    save_context(tmp_path / "tuned.safetensors", prefill(model, torch.tensor([[*b"learnt"]])), model, BYTES)
    state = ok(api.post("/states", content=(tmp_path / "tuned.safetensors").read_bytes(), headers=FILE))["id"]
    answer = ok(api.post("/chat/completions", json={"messages": MESSAGES, "state": state, "max_tokens": 12, "seed": 5}))
    context = load_context(tmp_path / "tuned.safetensors", model, BYTES)
    prompt = "System: be\n\nUser: hi\n\nAssistant:"
    expected = "".join(generate(model, BYTES, prompt, 12, 5, ["\n\n"], context=context, **PLAIN))
    assert answer["choices"][0]["message"]["content"] == expected.lstrip()


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with large states, so that few of them fill the memory."""
    path = tmp_path_factory.mktemp("deep") / "deep.pth"
    small_model("reference", vocab_size=256, n_embd=32, n_layer=24).save_pretrained(path, BYTES, format="pth")
    return path


def test_memory_is_bounded_and_the_most_recently_used_states_stay(start: Callable[..., Running], deep: Path) -> None:
    server = start(f"states_mib={STATE_MIB}", f"checkpoint={deep}")
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as api:
        first, used = make_state(api, prompt="first"), make_state(api, prompt="used")
        room = STATE_MIB * 2**20 // first["bytes"]
        assert f"{STATE_MIB} MiB" in server.log
        for number in range(room):
            make_state(api, prompt=f"{number}")
            complete(api, state=used["id"], prompt="x", max_tokens=1)
        wait_until(lambda: len(ok(api.get("/states"))["data"]) == room)
        remaining = {state["id"] for state in ok(api.get("/states"))["data"]}
        assert used["id"] in remaining
        assert first["id"] not in remaining
        used_bytes, = re.findall(r"^timemix_state_bytes (\S+)$", api.get(f"{server.url}/metrics").text, re.MULTILINE)
        assert 0 < float(used_bytes) <= STATE_MIB * 2**20


@pytest.fixture(scope="module")
def folder(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """Yields a server that keeps states in a folder with room for a few states, and the folder."""
    states_dir = tmp_path_factory.mktemp("kept")
    with serving(deep.parent, f"checkpoint={deep}", "tokenizer=byte", "states_mib=0", f"states_dir={states_dir}",
                 f"states_dir_mib={STATE_MIB}", "api_key=busy", "api_key=quiet", "api_key=third") as running:
        yield running, states_dir


def test_a_busy_key_evicts_only_its_own_states(folder: tuple[Running, Path]) -> None:
    with httpx.Client(base_url=f"{folder[0].url}/v1", timeout=60, headers=key("busy")) as busy, \
            httpx.Client(base_url=f"{folder[0].url}/v1", timeout=60, headers=key("quiet")) as quiet:
        mine = [make_state(quiet, prompt=f"quiet {number}")["id"] for number in range(3)]
        size = make_state(busy, prompt="first")["bytes"]
        n = STATE_MIB * 2**20 // size + 5
        theirs = [make_state(busy, prompt=f"{number}")["id"] for number in range(n)]
        wait_until(lambda: len(ok(busy.get("/states"))["data"]) < n)
        assert {state["id"] for state in ok(quiet.get("/states"))["data"]} == {*mine}
        assert all(complete(quiet, state=state, prompt="a")["choices"] for state in mine)
        assert theirs[-1] in {state["id"] for state in ok(busy.get("/states"))["data"]}


def test_a_state_whose_file_is_lost_is_reported_as_missing(folder: tuple[Running, Path]) -> None:
    server, states_dir = folder
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers=key("third")) as api:
        for path, body in (("/completions", {}), ("/completions", {"stream": True}), ("/states", {}), ("", {})):
            state = make_state(api, prompt="once")["id"]
            wait_until((states_dir / f"{state}.safetensors").is_file)
            (states_dir / f"{state}.safetensors").unlink()
            request = {"prompt": "a", "state": state, **body}
            answer = api.post(path, json=request) if path else api.get(f"/states/{state}/content")
            data = answer.json() if "json" in answer.headers["content-type"] else json.loads(answer.text.splitlines()[0][6:])
            assert (data["error"]["param"], data["error"]["code"]) == ("state", "state_not_found")
            wait_until(lambda: ok(api.get("/states"))["data"] == [])


def test_states_in_a_folder_survive_a_restart_and_belong_to_their_key(start: Callable[..., Running], tmp_path: Path,
                                                                      model: RWKV) -> None:
    """The folder keeps states, and responses with their states, in bounded memory."""
    states_dir = tmp_path / "kept"
    options = ("states_mib=0", f"states_dir={states_dir}", "responses_mib=1", "max_tokens=100", "api_key=one", "api_key=two")
    server = start(*options)
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers=key("one")) as api:
        state, freed = make_state(api, messages=MESSAGES)["id"], make_state(api, prompt="freed")["id"]
        response = ok(api.post("/responses", json={"input": "hi", "max_output_tokens": 5}))
        assert ok(api.delete(f"/states/{freed}"))
        before = ok(api.post("/completions", json={"prompt": "a", "state": state, "seed": 1}))["choices"]
        listed = {each["id"]: each for each in ok(api.get("/states"))["data"]}
        assert api.post("/responses", json={"input": "a", "previous_response_id": response["id"]},
                        headers=key("two")).status_code == 404
        assert ok(api.get("/states", headers=key("two")))["data"] == []
    wait_until(lambda: {path.stem for path in states_dir.glob("state_*.safetensors")} == {*listed})
    server.process.kill()
    server.process.wait()
    (states_dir / f"state_{'0' * 32}.safetensors").write_bytes(b"nothing")
    server = start(*options)
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers=key("one")) as api:
        assert {each["id"]: each for each in ok(api.get("/states"))["data"]} == listed
        assert ok(api.post("/completions", json={"prompt": "a", "state": state, "seed": 1}))["choices"] == before
        for path in (f"/states/{state}", f"/responses/{response['id']}"):
            assert api.get(path, headers=key("two")).status_code == api.delete(path, headers=key("two")).status_code == 404
        assert ok(api.get(f"/responses/{response['id']}")) == response
        item = response["output"][0]
        reference = {"input": [{"type": "item_reference", "id": item["id"]}], "max_output_tokens": 1}
        assert api.post("/responses", json=reference, headers=key("two")).status_code == 404
        same_id = {"input": [{**item, "content": "other"}], "max_output_tokens": 1}      # clients choose the ids of their items
        assert api.post("/responses", json=same_id, headers=key("two")).status_code == 200
        read, expected = (ok(api.post("/responses", json=body))["usage"]["input_tokens"]
                          for body in (reference, {**reference, "input": [item]}))
        assert read == expected
        many = api.post("/responses", json={**reference, "input": 10_000 * reference["input"]})
        assert (many.status_code, "exceed 1 MiB" in many.text) == (400, True)
        again = ok(api.post("/responses", json={"input": "a", "previous_response_id": response["id"], "max_output_tokens": 5}))
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= response["usage"]["total_tokens"]
        body = {"input": "long", "max_output_tokens": 1, "metadata": {"a": "b" * 300_000}}
        large = [ok(api.post("/responses", json=body)) for _ in range(4)]
        assert api.get(f"/responses/{response['id']}").status_code == 404, "the least recently used responses must be dropped"
        assert api.get(f"/responses/{large[-1]['id']}").status_code == 200
        assert sum(path.stat().st_size for path in states_dir.glob("resp_*.json")) <= 2**20
    other = small_model("reference", vocab_size=256, n_embd=32, seed=1)
    states = StateStore(ServeConfig(states_dir=str(states_dir)), {"": StateFormat.of(other, BYTES)}, {"": ""})
    initial, = (each for each in states.initial if each.id == state)
    with pytest.raises(StateGone):
        states.get(initial)
    states.close()


def test_names_of_deleted_files_do_not_stay_in_memory(tmp_path: Path, model: RWKV) -> None:
    """A server that stores a response per request deletes millions of files."""
    config = ServeConfig(states_dir=str(tmp_path))
    states = StateStore(config, {"": StateFormat.of(model, BYTES)}, {"": ""})
    engine: Any = SimpleNamespace(states={})
    responses = Responses(config, engine)
    for number in range(3):
        state = SavedState(f"state_{number:032x}", "", 0, 1, 0)
        states.put(state, prefill(model, torch.tensor([[1]])))
        states.drop(state.id)
        name = f"resp_{number:032x}"
        asyncio.run(responses.put(StoredResponse("", {"id": name, "output": []}, [])))
        responses.drop(name)
    states.close()
    responses.sync({path.name for path in tmp_path.iterdir()})
    assert [*tmp_path.iterdir(), *states._ignored, *responses._ignored] == []


def test_servers_on_one_folder_see_each_other_s_states_and_responses(start: Callable[..., Running], tmp_path: Path) -> None:
    """When the first server, which holds the lock, is killed, the next server locks the folder."""
    options = ("states_mib=0", f"states_dir={tmp_path / 'kept'}", "api_key=one", "api_key=two")
    servers = [start(*options), start(*options)]
    assert "another server" not in servers[0].log
    assert "another server uses" in servers[1].log
    first, second = (httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers=key("one")) for server in servers)
    with first, second:
        for one, other in ((first, second), (second, first)):
            state, response = make_state(one, messages=MESSAGES)["id"], ok(one.post("/responses", json={"input": "hi"}))
            wait_until((tmp_path / "kept" / f"{state}.safetensors").is_file)
            body = {"prompt": "a", "state": state, "seed": 1}
            assert ok(other.post("/completions", json=body))["choices"] == ok(one.post("/completions", json=body))["choices"]
            assert other.get(f"/states/{state}", headers=key("two")).status_code == 404
            wait_until(lambda one=one, other=other: ok(other.get("/states"))["data"] == ok(one.get("/states"))["data"])
            assert ok(other.get(f"/responses/{response['id']}")) == response
            again = ok(other.post("/responses", json={"input": "a", "previous_response_id": response["id"]}))
            assert again["usage"]["input_tokens_details"]["cached_tokens"] >= response["usage"]["total_tokens"]
            assert ok(other.delete(f"/states/{state}"))
            wait_until(lambda state=state: not (tmp_path / "kept" / f"{state}.safetensors").exists())
            assert one.get(f"/states/{state}").status_code == 404
            assert state not in {each["id"] for each in ok(one.get("/states"))["data"]}
            assert ok(other.delete(f"/responses/{response['id']}"))
            assert one.get(f"/responses/{response['id']}").status_code == 404
        earlier = make_state(first, prompt="left")["id"]
        wait_until((tmp_path / "kept" / f"{earlier}.safetensors").is_file)
        servers[0].process.kill()
        servers[0].process.wait()
        assert ok(second.get(f"/states/{earlier}"))["id"] == earlier
        third = start(*options)
        assert "another server" not in third.log, "the system has released the lock"
        more = make_state(second, prompt="more")["id"]
        with httpx.Client(base_url=f"{third.url}/v1", timeout=60, headers=key("one")) as api:
            wait_until((tmp_path / "kept" / f"{more}.safetensors").is_file)
            assert {earlier, more} <= {each["id"] for each in ok(api.get("/states"))["data"]}


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of another process's files")
def test_a_folder_that_cannot_be_written_and_a_full_disk(start: Callable[..., Running], tmp_path: Path) -> None:
    """A folder that cannot be written is an error before the model is loaded.

    On a full disk, states stay in memory, and those of other servers are seen.
    """
    import resource

    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/1")):
        refusal = start(f"states_dir={wrong}")
        assert refusal.process.wait() == 2
        assert f"states_dir={wrong} cannot be used" in refusal.log
        assert "Traceback" not in refusal.log
    states_dir = tmp_path / "kept"
    server, other = start(f"states_dir={states_dir}"), start(f"states_dir={states_dir}")
    for process in [server.process.pid, *children(server.process.pid)]:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))     # a state has more bytes
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as api, httpx.Client(base_url=f"{other.url}/v1") as second:
        state = make_state(api, prompt="kept in memory")["id"]
        elsewhere = make_state(second, prompt="elsewhere")["id"]
        wait_until((states_dir / f"{elsewhere}.safetensors").is_file)
        for each in (state, elsewhere):
            assert complete(api, state=each, prompt="a")["choices"]
        assert second.get(f"/states/{state}").status_code == 404
    assert [path.stem for path in states_dir.glob("state_*")] == [elsewhere]


def children(process: int) -> list[int]:
    return [int(word) for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()]


def test_a_folder_may_contain_files_that_no_server_wrote(start: Callable[..., Running], tmp_path: Path) -> None:
    """Files that no server wrote are left out with a line each, and no request waits for them."""
    states_dir = tmp_path / "kept"
    options = ("states_mib=0", f"states_dir={states_dir}")
    first = start(*options)
    with httpx.Client(base_url=f"{first.url}/v1", timeout=60) as api:
        state = make_state(api, prompt="once")["id"]
        one, two, three = (ok(api.post("/responses", json={"input": "hi", "max_output_tokens": 2}))["id"] for _ in range(3))
        wait_until((states_dir / f"{state}.safetensors").is_file)
    first.process.kill()
    first.process.wait()

    def change(response: str, **fields: Any) -> None:
        path = states_dir / f"{response}.json"
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "state": None, "response": {**stored["response"], **fields}}))

    change(one, previous_response_id=one)
    change(two, previous_response_id=three)
    change(three, previous_response_id=two)
    content = (states_dir / f"{state}.safetensors").read_bytes()
    (states_dir / f"{state}.safetensors").write_bytes(content[:-1000] + bytes(1000))
    kinds = (("state", "safetensors"), ("resp", "json"))
    names = [f"{kind}_{digit * 32}.{ending}" for digit in "abcdef" for kind, ending in kinds]
    for name, other in zip(names[:4], names[4:8], strict=True):
        (states_dir / name).symlink_to(states_dir / ("nothing" if name < "s" else other))
    for name in names[4:6]:
        (states_dir / name).mkdir()
    os.mkfifo(states_dir / names[6])
    os.mkfifo(states_dir / names[7])
    (states_dir / names[8]).write_bytes(content)
    (states_dir / names[9]).write_text('{"owner": "", "response": {"id": "another"}, "input": []}')
    (states_dir / names[11]).write_text('{"owner": "", "response": {}, "input": [{}]}')
    (states_dir / f".{names[11]}.1").write_text("not finished")
    third = start(*options)
    with httpx.Client(base_url=f"{third.url}/v1", timeout=20) as api:
        assert sum("skipped " in line for line in third.log.splitlines()) == 10, third.log
        assert not (states_dir / f".{names[11]}.1").exists()
        for response in (one, two):
            body = {"input": "a", "previous_response_id": response, "max_output_tokens": 1}
            check_error(api.post("/responses", json=body), "previous_response_id")
        answer = api.post("/completions", json={"prompt": "a", "state": state})
        check_error(answer, "state")
        assert "has changed" in answer.json()["error"]["message"]
        assert ok(api.get("/states"))["data"] != []


def test_a_client_that_hangs_up_leaves_no_state(server: Running, api: httpx.Client) -> None:
    before = {state["id"] for state in ok(api.get("/states"))["data"]}
    body = {"prompt": "a", "max_tokens": 100_000, "save_state": True, "logit_bias": {"0": -100}}
    for stream in (True, False):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(post("/v1/completions", {**body, "stream": stream}))
        wait_until(lambda: server.running_texts() > 0)
        reset(connection)
        wait_until(lambda: server.running_texts() == 0)
    state = ok(api.post("/states", json={"prompt": "a"}))["id"]
    content = api.get(f"/states/{state}/content").content
    binary = {"content-type": "application/octet-stream"}
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    files = server.open_files()
    for child in children:               # the engine reads the upload when its client has gone
        os.kill(int(child), signal.SIGSTOP)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(post("/v1/states", content, "content-type: application/octet-stream\r\n"))
            time.sleep(0.1)
        wait_until(lambda: server.open_files() <= files)
    finally:
        for child in children:
            os.kill(int(child), signal.SIGCONT)
    after = {state, ok(api.post("/states", content=content, headers=binary))["id"]}     # the engine has read the first upload
    assert {state["id"] for state in ok(api.get("/states"))["data"]} == before | after
    for state in after:
        api.delete(f"/states/{state}")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "a", "tools": [{}]}, {"prompt": 3},
                                  {"prompt": [-1]}, {"prompt": [256]}, {"messages": []}, {"messages": "x"}, {"state": "x"},
                                  {"prompt": "a", "state": 3}, {"prompt": "a", "state": "x" * 100}, {"prompt": "a", "other": 1},
                                  {"prompt": "a", "model": "other"}, {"prompt": "a" * 40_000}, {"prompt": "a", "state": ""},
                                  {"prompt": "a", "state": "../../etc/passwd"}], ids=lambda each: str(each)[:40])
def test_a_wrong_request_for_a_state_is_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    check_error(api.post("/states", json=body))


def test_a_response_whose_state_is_lost_continues_at_the_second_attempt(folder: tuple[Running, Path]) -> None:
    server, states_dir = folder
    before = {*states_dir.glob("state_*.safetensors")}
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers=key("third")) as api:
        first = api.post("/responses", json={"input": "hi", "max_output_tokens": 5}).json()
        wait_until(lambda: len({*states_dir.glob("state_*.safetensors")} - before) == 1)
        ({*states_dir.glob("state_*.safetensors")} - before).pop().unlink()
        body = {"input": "a", "previous_response_id": first["id"], "max_output_tokens": 5}
        lost = api.post("/responses", json=body)
        assert (lost.status_code, lost.json()["error"]["param"]) == (503, "previous_response_id")
        assert "retry-after" in lost.headers
        again = api.post("/responses", json=body).json()
        assert again["usage"]["input_tokens"] > first["usage"]["total_tokens"]
