"""Tests of requests that programs sent when they were tried with this server, with shorter texts and fewer tools.

docs/clients.md lists the programs.
"""

import json
from typing import Any

import httpx
import pytest
from serving_runs import Running
from test_limits import check_error

pytestmark = pytest.mark.programs
HELLO = [{"role": "user", "content": "hello"}]
NO_ARGUMENTS = {"properties": {}, "type": "object"}
TOOLS = [{"type": "function", "function": {"name": "get_current_timestamp", "description": "Get the current Unix timestamp.",
                                           "parameters": NO_ARGUMENTS}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_current_timestamp", "arguments": "{}"}}
RESULT = '{"current_timestamp":1795861760}'
OLLAMA_OPTIONS = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42, "stop": ["zz", "\n\nUser"],
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repeat_penalty": 1.1, "repeat_last_n": 64, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5, "tfs_z": 1, "num_ctx": 2048, "num_batch": 512, "num_keep": 24, "num_gpu": 1,
    "num_thread": 2, "use_mmap": True, "use_mlock": False, "reasoning_effort": "medium"}
SILLY = {"model": "tiny", "prompt": "User: hello\n\nAssistant:", "temperature": 1, "top_p": 1, "frequency_penalty": 0,
         "presence_penalty": 0, "stop": ["\nUser:"]}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI, OpenAI": ("/v1/chat/completions", {
        "stream": True, "model": "tiny", "messages": HELLO, "stream_options": {"include_usage": True}, "tools": TOOLS}),
    "Open WebUI, OpenAI, a tool's result": ("/v1/chat/completions", {
        "stream": True, "model": "tiny", "stream_options": {"include_usage": True}, "tools": TOOLS, "messages": [
            *HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT}]}),
    "Open WebUI, OpenAI, all its parameters": ("/v1/chat/completions", {
        **OLLAMA_OPTIONS, "stream": True, "model": "tiny", "messages": HELLO, "stream_options": {"include_usage": True},
        "max_tokens": 50, "logit_bias": {"97": 1, "98": -1}, "think": True, "keep_alive": "5m", "tools": TOOLS}),
    "Open WebUI, OpenAI, a format": ("/v1/chat/completions", {
        "stream": True, "model": "tiny", "messages": HELLO, "stream_options": {"include_usage": True}, "max_tokens": 50,
        "format": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "chat_template_kwargs": {"enable_thinking": True}}),
    "Open WebUI, llama.cpp, Continue Response": ("/v1/chat/completions", {
        "stream": True, "model": "tiny", "stream_options": {"include_usage": True}, "tools": TOOLS, "max_tokens": 50,
        "messages": [*HELLO, {"role": "assistant", "content": "Hello, I am"}], "continue_final_message": True,
        "add_generation_prompt": False}),
    "Open WebUI, Responses": ("/v1/responses", {
        **{name: value for name, value in OLLAMA_OPTIONS.items() if name not in (
            "stop", "frequency_penalty", "presence_penalty", "reasoning_effort")},
        "stream": True, "model": "tiny", "instructions": "be", "max_output_tokens": 50, "keep_alive": "5m",
        "tools": [{"type": "function", "name": "get_current_timestamp", "description": "w", "parameters": NO_ARGUMENTS,
                   "strict": False}], "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "call_1", "name": "get_current_timestamp", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": RESULT}]}),
    "vllm bench serve": ("/v1/completions", {
        "model": "tiny", "prompt": "once", "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 20, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}),
    "GenAI-Perf": ("/v1/chat/completions", {
        "model": "tiny", "messages": HELLO, "max_tokens": 20, "min_tokens": 20, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}}),
    "Codex": ("/v1/responses", {
        "model": "tiny", "stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "01a2", "max_output_tokens": 50,
        "client_metadata": {"session_id": "01a2"}, "tools": [
            {"type": "function", "name": "exec_command", "description": "w", "strict": False, "parameters": NO_ARGUMENTS}],
        "input": [{"type": "message", "id": "msg_01", "role": role, "content": [{"type": "input_text", "text": "be"}]}
                  for role in ("developer", "user")]}),
    "Agents SDK, a tool's result": ("/v1/responses", {
        "model": "tiny", "stream": True, "include": [], "max_output_tokens": 50, "input": [
            {"content": "hello", "role": "user"},
            {"arguments": "{}", "call_id": "call_1", "name": "weather", "type": "function_call", "id": "fc_1",
             "status": "completed"},
            {"call_id": "call_1", "output": "rain", "type": "function_call_output"}],
        "tools": [{"name": "weather", "type": "function", "strict": True, "description": "Tells the weather.", "parameters": {
            "properties": {"city": {"title": "City", "type": "string"}}, "required": ["city"], "title": "weather_args",
            "type": "object", "additionalProperties": False}}]}),
    "Open WebUI, Ollama": ("/api/chat", {
        "model": "tiny:latest", "messages": HELLO, "stream": True, "keep_alive": "5m", "tools": TOOLS, "think": True,
        "options": {**OLLAMA_OPTIONS, "logit_bias": "97:1,98:-1", "num_predict": 50}}),
    "Open WebUI, Ollama, a tool's result": ("/api/chat", {
        "model": "tiny:latest", "stream": True, "tools": TOOLS, "options": {"num_predict": 50}, "messages": [
            *HELLO, {"role": "assistant", "content": "", "tool_calls": [
                {"index": 0, "id": "call_1", "function": {"name": "get_current_timestamp", "arguments": {}}}]},
            {"role": "tool", "content": RESULT, "tool_call_id": "call_1"}]}),
    "Open WebUI, Ollama, Continue Response": ("/api/chat", {
        "model": "tiny:latest", "stream": True, "tools": TOOLS, "options": {"num_predict": 50},
        "messages": [*HELLO, {"role": "assistant", "content": "Hello, I am"}]}),
    "Open WebUI, a title": ("/api/chat", {"model": "tiny:latest", "messages": HELLO, "options": {"num_predict": 50},
                                          "stream": False}),
    "Open WebUI, an Ollama server's own OpenAI interface": ("/v1/chat/completions", {"model": "tiny:latest", "messages": HELLO,
                                                                                   "max_tokens": 50}),
    "Open WebUI, embeddings": ("/v1/embeddings", {"input": ["a b", "c"], "model": "tiny"}),
    "Home Assistant": ("/api/chat", {
        "model": "tiny:latest", "stream": True, "keep_alive": "-1s", "options": {"num_ctx": 8192, "num_predict": 50},
        "tools": TOOLS, "messages": [
            {"role": "system", "content": "You are a voice assistant."}, *HELLO,
            {"role": "assistant", "content": "Hi.", "tool_calls": []}, *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "get_current_timestamp", "arguments": {}}}]},
            {"role": "tool", "content": RESULT}]}),
    "Continue, ollama": ("/v1/chat/completions", {
        "model": "tiny:latest", "messages": [{"role": "system", "content": "You are an agent."}, *HELLO], "stream": True,
        "tools": TOOLS, "max_tokens": 50, "temperature": 0.5, "stop": ["\n\n\n"], "stream_options": {"include_usage": True}}),
    "Continue, anthropic": ("/v1/messages", {
        "model": "tiny", "max_tokens": 50, "stream": True, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "get_current_timestamp", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}]}],
        "tools": [{"name": "get_current_timestamp", "description": "w", "input_schema": NO_ARGUMENTS,
                   "cache_control": {"type": "ephemeral"}}]}),
    "Continue, embeddings": ("/v1/embeddings", {"model": "tiny:latest", "input": ["a", "b"], "encoding_format": "base64"}),
    "SillyTavern, vLLM": ("/v1/completions", {
        **SILLY, "max_tokens": 50, "min_p": 0, "repetition_penalty": 1, "top_k": 0, "min_tokens": 0, "n": 1, "seed": 7,
        "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "stream": True,
        "logprobs": None}),
    "SillyTavern, Generic": ("/v1/completions", {**SILLY, "max_tokens": 50, "stream": True, "logprobs": None}),
    "SillyTavern, Ollama": ("/api/generate", {
        "model": "tiny:latest", "prompt": SILLY["prompt"], "stream": False, "keep_alive": -1, "raw": True, "options": {
            "temperature": 1, "top_p": 1, "typical_p": 1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 0,
            "stop": ["\nUser:"], "repeat_penalty": 1, "repeat_last_n": 0, "num_predict": 50, "num_ctx": 8192}}),
    "SillyTavern, Chat Completion": ("/v1/chat/completions", {
        "messages": [{"role": "system", "content": "be", "name": "example_user"}, *HELLO], "model": "tiny", "temperature": 1,
        "max_tokens": 50, "stream": True, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "logprobs": True,
        "top_logprobs": 5})}


@pytest.mark.parametrize("name", [*REQUESTS])
def test_a_program_s_request_is_answered(g1: Running, name: str) -> None:
    path, body = REQUESTS[name]
    answer = httpx.post(g1.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line and not line.startswith("event: ")]
    assert not any("error" in json.loads(line) for line in lines if line != "[DONE]")


def test_other_servers_names_of_an_option_have_its_effect(g1: Running) -> None:
    def text(path: str = "/v1/completions", **fields: Any) -> str:
        prompt = {"prompt": "once"} if path == "/v1/completions" else {"messages": HELLO}
        answer = httpx.post(g1.url + path, json={**prompt, "max_tokens": 40, "seed": 1, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        return json.dumps(answer.json()["choices"][0])

    assert text(repeat_penalty=50) == text(repetition_penalty=50) != text()
    assert text(repeat_penalty=50, repeat_last_n=0) == text()
    assert text("/v1/chat/completions", think=True) == text("/v1/chat/completions", enable_thinking=True)
    assert text("/v1/chat/completions", think="low") == text("/v1/chat/completions", reasoning_effort="low")
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(json.loads(text(format=schema, max_tokens=400))["text"]) == {"a": 3}


@pytest.mark.parametrize(("path", "body", "count"), [
    ("/v1/completions", {"prompt": "once", "max_tokens": 20}, "completion_tokens"),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20}, "completion_tokens"),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 20}, "output_tokens")])
def test_with_ignore_eos_an_answer_has_all_tokens(g1: Running, path: str, body: dict[str, Any], count: str) -> None:
    ends = {"logit_bias": {"0": 100}}
    for fields, tokens in ((ends, 0), (ends | {"ignore_eos": True}, 20), (ends | {"ignore_eos": True, "min_tokens": 20}, 20)):
        answer = httpx.post(g1.url + path, json={**body, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"][count] == tokens


def test_ignore_eos_ignores_the_template_s_stop_strings(g1: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "structured_outputs": {"regex": "(\n\nUser:){9}"}}
    tokens = [httpx.post(f"{g1.url}/v1/chat/completions", json=body | fields, timeout=60).json()["usage"]["completion_tokens"]
              for fields in ({}, {"ignore_eos": True})]
    assert tokens[0] < tokens[1] == 20


@pytest.mark.parametrize(("field", "value"), [
    ("mirostat", 2), ("typical_p", 0.5), ("tfs_z", 0.9), ("xtc_probability", 0.5), ("dry_multiplier", 0.8), ("min_tokens", 3),
    ("stop_token_ids", [3]), ("skip_special_tokens", False), ("mirostat", "x"), ("format", "xml"),
    ("format", {"type": "nothing"}), ("repeat_penalty", -1), ("unknown", 0)])
def test_an_option_that_only_other_servers_have_must_be_off(g1: Running, field: str, value: Any) -> None:
    for path, body in (("completions", {"prompt": "a", "max_tokens": 1}), ("chat/completions", {"messages": HELLO}),
                       ("responses", {"input": "a", "max_output_tokens": 1})):
        check_error(httpx.post(f"{g1.url}/v1/{path}", json={**body, field: value}, timeout=60), field)


def test_two_names_of_an_option_must_agree(g1: Running) -> None:
    for one, other in (({"repetition_penalty": 1.1}, {"repeat_penalty": 1.2}), ({"think": False}, {"enable_thinking": True}),
                       ({"response_format": {"type": "json_object"}}, {"format": {"type": "boolean"}})):
        answer = httpx.post(f"{g1.url}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **one, **other})
        check_error(answer)
        assert "conflicts" in answer.json()["error"]["message"]


def test_a_name_may_end_with_latest_as_in_ollama_s_list(g1: Running) -> None:
    for name in ("tiny", "tiny:latest", "openai/tiny", "ollama/tiny:latest"):
        for path, fields in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"}),
                             ("responses", {"input": "a"}), ("embeddings", {"input": "a"}),
                             ("messages", {"messages": HELLO})):
            limit = {"embeddings": {}, "responses": {"max_output_tokens": 1}}.get(path, {"max_tokens": 1})
            answer = httpx.post(f"{g1.url}/v1/{path}", json={**fields, **limit, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, "tiny"), (name, path)
        assert httpx.get(f"{g1.url}/v1/models/{name}").json()["id"] == "tiny"
    for name in ("other", "other:latest", "tiny:7b", ":latest", "tiny:latest:latest"):
        answer = httpx.post(f"{g1.url}/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": name})
        assert answer.status_code == 404, name
