"""Ollama's endpoints /api/chat and /api/generate. ollama_models.py has the rest of Ollama's API.

A request becomes a ChatRequest, or a CompletionRequest with raw=true, and the choices of the answer become JSON lines. As in
Ollama, the server ignores unknown fields and options, and streams answers by default.
"""

import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import Answer, ResponseSpec, one_line
from rwkv.serving.endpoints.chat import chat_sequences
from rwkv.serving.endpoints.completions import completion_sequences
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.http.errors import ApiError, json_response, rename_error_fields
from rwkv.serving.messages import Event, Generate
from rwkv.serving.openapi import GENERATION, JSON, LINES, Endpoint
from rwkv.serving.schema import (
    OFF,
    ChatRequest,
    CompletionRequest,
    Function,
    TokenId,
    Unchecked,
    convert,
    read,
    require_off,
    with_whole_numbers,
)
from rwkv.serving.service import Service, handle_body, owner, resolve_adapter
from rwkv.serving.submission import prompt_ids, submit

GENERATED: JsonObject = {**GENERATION, "answers": (JSON, LINES), "error": "OllamaError"}         # fields of an Endpoint
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "temperature": "temperature", "top_k": "top_k",
           "top_p": "top_p", "min_p": "min_p", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
           "seed": "seed", "stop": "stop"}
NAMES = {**{here: f"options.{option}" for option, here in OPTIONS.items()}, "reasoning_content": "thinking",
         "enable_thinking": "think", "reasoning_effort": "think", "response_format": "format"}


class Model(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None              # older clients send this field instead of model


class OllamaRequest(Model, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    stream: bool | None = None
    options: JsonObject | None = None
    format: Literal["", "json"] | JsonObject | None = None
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChat(OllamaRequest, kw_only=True):
    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Unchecked] | None = None


def error_body(error: ApiError) -> JsonObject:
    return {"error": str(error)}


def _ollama_field(field: str) -> str:
    first, _, rest = field.partition(".")
    if first == "messages" or first.startswith("messages["):
        return field.replace(".reasoning_content", ".thinking")
    if first == "response_format":
        return "format"
    return NAMES.get(first, first) + (f".{rest}" if rest else "")


def model_id(service: Service, body: Model) -> str:
    """Returns the id of the model that a request names. Raises ApiError for an unknown name.

    The name may end with ":latest".
    """
    return resolve_adapter(service, body.model or body.name or None) or service.model


async def chat(service: Service, request: Request) -> ASGIApp:
    return await _respond(service, request, partial(_chat, owner=owner(request)))


async def generate(service: Service, request: Request) -> ASGIApp:
    return await _respond(service, request, partial(_generate, owner=owner(request)))


Translated = tuple[list[Generate], ResponseSpec, OllamaRequest]


async def _respond(service: Service, request: Request, translate: Callable[[Service, bytes], Translated]) -> ASGIApp:
    sequences, spec, body = await handle_body(service, request, translate)
    stream = body.stream is not False
    is_chat = isinstance(body, OllamaChat)
    if not sequences:                    # without a prompt, Ollama only loads the model, or unloads it with keep_alive=0
        reason = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
        line = _line(spec.model, {"content": ""}, is_chat) | {"done": True, "done_reason": reason}
        return Response(msgspec.json.encode(line) + b"\n", media_type=LINES if stream else "application/json")
    with rename_error_fields(_ollama_field):
        ticket = await submit(service, sequences)
    return OllamaAnswer(service, ticket, spec, stream, is_chat)


def _chat(service: Service, raw_body: bytes, owner: str) -> Translated:
    body = read(raw_body, OllamaChat)
    name = model_id(service, body)
    if not body.messages:
        return [], _empty_spec(service, name), body
    fields = _common_fields(body, name)
    fields["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    fields["tools"] = [_tool(tool) for tool in body.tools or ()] or None
    last = fields["messages"][-1]
    if last.get("role") == "assistant" and not last.get("tool_calls"):   # Ollama continues an assistant message
        if last["content"] or last.get("reasoning_content"):
            fields["continue_final_message"] = True
        else:
            fields["messages"].pop()
    with rename_error_fields(_ollama_field):
        return *chat_sequences(service, convert(fields, ChatRequest), owner), body


def _generate(service: Service, raw_body: bytes, owner: str) -> Translated:
    body = read(raw_body, OllamaGenerate)
    name = model_id(service, body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported, because an RWKV model reads text only from left to right", "suffix")
    if body.template:
        raise ApiError(400, "template is not supported: the server always uses its own chat template, or none if raw is true",
                       "template")
    _refuse_images(body.images, "images")
    if not body.prompt and not (body.raw and body.context):
        return [], _empty_spec(service, name), body
    if body.context:
        prompt_ids(service, body.context, "context")             # raises ApiError for invalid ids
    fields = _common_fields(body, name)
    prompt = body.prompt or ""
    with rename_error_fields(_ollama_field):
        if body.raw:
            return *completion_sequences(service, _completion_request(service, body, prompt, fields), owner), body
        # The context already includes the conversation's system prompt.
        system = [{"role": "system", "content": body.system}] if body.system and not body.context else []
        fields["messages"] = [*system, {"role": "user", "content": prompt}]
        return *chat_sequences(service, convert(fields, ChatRequest), owner, body.context or ()), body


def _completion_request(service: Service, body: OllamaGenerate, prompt: str, fields: JsonObject) -> CompletionRequest:
    """Returns the CompletionRequest for raw=true, which completes the prompt without a chat template."""
    if body.think or body.system:
        raise ApiError(400, f"{'think' if body.think else 'system'} conflicts with raw, which turns off the chat template",
                       "raw")
    for name in ("enable_thinking", "reasoning_effort"):
        fields.pop(name)
    logprobs = fields.pop("logprobs")
    top = fields.pop("top_logprobs")
    fields["logprobs"] = (top or 0) if logprobs else None
    if fields["max_tokens"] is None:
        fields["max_tokens"] = service.config.max_tokens
    fields["prompt"] = [*body.context, *service.tokenizer.encode_after(prompt, body.context)] if body.context else prompt
    return convert(fields, CompletionRequest)


def _common_fields(body: OllamaRequest, model: str) -> JsonObject:
    options = {name: value for name, value in with_whole_numbers(body.options or {}).items() if value is not None}
    require_off({name: options[name] for name in OFF if name in options}, OFF, "sampler", "options.")
    fields = {here: options[option] for option, here in OPTIONS.items() if option in options}
    limit = fields.get("max_tokens")
    if limit is None or (isinstance(limit, int) and limit <= 0):         # in Ollama, 0 and negative numbers mean no limit
        fields["max_tokens"] = None
    if options.get("repeat_last_n") == 0:
        fields["repetition_penalty"] = 1.0
    response_format: JsonObject | None = None
    if body.format:
        schema = {"name": "format", "schema": body.format}
        response_format = {"type": "json_object"} if body.format == "json" else {"type": "json_schema", "json_schema": schema}
    return {**fields, "model": model, "response_format": response_format, "stream": body.stream is not False,
            "enable_thinking": body.think if isinstance(body.think, bool) else None,
            "reasoning_effort": body.think if isinstance(body.think, str) and body.think else None,
            "logprobs": body.logprobs, "top_logprobs": body.top_logprobs if body.logprobs else None}


def _message(message: JsonObject, where: str) -> JsonObject:
    _refuse_images(message.get("images"), f"{where}.images")
    fields = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if fields.get("content") is None:    # Ollama reads null as ""
        fields["content"] = ""
    if message.get("thinking"):
        fields["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        fields["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return fields


def _tool(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    if isinstance(function, dict):       # Ollama ignores unknown fields here, too
        function = {name: value for name, value in function.items() if name in Function.__struct_fields__}
    return {"type": tool.get("type") or "function", **({"function": function} if "function" in tool else {})}


def _refuse_images(images: object, where: str) -> None:
    if images:
        raise ApiError(400, f"{where} must be empty, because this model reads only text", where)


def _empty_spec(service: Service, model: str) -> ResponseSpec:
    return ResponseSpec("chatcmpl", model, False, False, [], 1, service.tokenizer)


def _line(model: str, delta: JsonObject, is_chat: bool) -> JsonObject:
    """Returns the JSON line for a delta or a message in OpenAI's format."""
    text = delta.get("content") or ""
    thinking = delta.get("reasoning_content")
    calls = [{"id": call["id"], "function": {"name": call["function"]["name"],
                                             "arguments": msgspec.Raw(call["function"]["arguments"].encode())}}
             for call in delta.get("tool_calls") or ()]
    line: JsonObject = {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    if not is_chat:
        return line | {"response": text} | ({"thinking": thinking} if thinking else {}) | {"done": False}
    message = {"role": "assistant", "content": text} | ({"thinking": thinking} if thinking else {})
    return line | {"message": message | ({"tool_calls": calls} if calls else {}), "done": False}


class OllamaAnswer(Answer):
    content_type = LINES

    def __init__(self, service: Service, ticket: Ticket, spec: ResponseSpec, stream: bool, is_chat: bool) -> None:
        super().__init__(service.engine, ticket, spec, stream, service.config.timeout_s)
        self._is_chat = is_chat
        self._start = time.monotonic_ns()
        self._first = 0                  # time of the first event, in nanoseconds
        self._text = ""

    def _add_event(self, number: int, event: Event) -> None:
        self._record(event)
        super()._add_event(number, event)

    def _record(self, event: Event) -> None:
        self._first = self._first or time.monotonic_ns()
        self._text += event.text

    def _error_response(self, error: ApiError) -> Response:
        return error.response(error_body)

    def _full_response(self) -> Response:
        choice = self._choices[0].whole()
        return json_response({**self._choice_line(choice), **self._end(choice["finish_reason"])})

    async def _chunks(self) -> AsyncIterator[bytes]:
        reason = None
        try:
            async for _, event in self._ticket:
                self._record(event)
                for piece in self._choices[0].pieces(event):
                    reason = piece["finish_reason"]
                    if reason is None:
                        yield one_line(self._choice_line(piece)) + b"\n"
        except ApiError as error:
            yield one_line(error_body(self._end_stream(error))) + b"\n"
        else:
            self._complete = True
            yield one_line(_line(self._spec.model, {}, self._is_chat) | self._end(reason)) + b"\n"

    def _choice_line(self, choice: JsonObject) -> JsonObject:
        delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        line = _line(self._spec.model, delta, self._is_chat)
        return line | {"logprobs": _entries(choice["logprobs"])} if choice["logprobs"] else line

    def _end(self, reason: str | None) -> JsonObject:
        """Returns the fields of the last line. Durations are in nanoseconds."""
        usage = self._usage()
        now = time.monotonic_ns()
        first = self._first or now
        end = {"done": True, "done_reason": "length" if reason == "length" else "stop", "total_duration": now - self._start,
               "load_duration": 0, "prompt_eval_count": usage["prompt_tokens"], "prompt_eval_duration": first - self._start,
               "eval_count": usage["completion_tokens"], "eval_duration": now - first}
        if not self._is_chat:
            ids = self._ticket.sequences[0].request.prompt_ids
            end["context"] = [*ids, *self._spec.tokenizer.encode_after(self._text, ids)]
        return end


def _entries(logprobs: JsonObject) -> list[JsonObject]:
    """Returns the log-probabilities of a chat completion or a completion in Ollama's format, with one entry per token."""
    if "content" in logprobs:
        entries: list[JsonObject] = logprobs["content"]
        return entries
    lists = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [{"token": token, "logprob": logprob,
             "top_logprobs": [{"token": name, "logprob": value} for name, value in (top or {}).items()]}
            for token, logprob, top in lists]


ENDPOINTS = (
    Endpoint("/api/chat", "POST", chat, OllamaChat, **GENERATED),
    Endpoint("/api/generate", "POST", generate, OllamaGenerate, **GENERATED),
)
