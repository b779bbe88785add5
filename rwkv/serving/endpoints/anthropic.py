"""Anthropic's endpoints /v1/messages and /v1/messages/count_tokens.

A request becomes a ChatRequest, and the events of the answer become content blocks: thinking, text, tool_use. cache_control has
no effect, because the server caches every prefix. budget_tokens has no effect, because max_tokens limits thoughts and answer
together.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import Answer, ResponseSpec, sse
from rwkv.serving.endpoints.chat import chat_sequences
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.http.errors import ApiError, json_response, rename_error_fields
from rwkv.serving.messages import Event, Generate
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.schema import ChatRequest, Effort, Ignored, NewTokens, SamplingFields, Seed, Unchecked, convert, read
from rwkv.serving.service import Service, handle_body, owner
from rwkv.serving.submission import submit

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
NO_TEXT = {"image": "an image", "document": "a document", "container_upload": "a file"}
NAMES = {"stop": "stop_sequences", "enable_thinking": "thinking", "reasoning_effort": "output_config.effort",
         "response_format": "output_config.format"}
# The tool runners of Anthropic's clients ask for a thread, and continue without one after this error code
NO_THREADS = "thread_unsupported_request"
SIGNATURE = "unsigned"                   # every thinking block needs a signature, because clients send back only signed blocks
REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NewTokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    schema: JsonObject


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[JsonObject]


class MessagesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """A request with Anthropic's fields, a seed and all sampling options."""

    model: str
    messages: list[Message]
    max_tokens: NewTokens | None = None
    system: str | list[JsonObject] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Choice | None = None
    container: None = None               # not supported
    thread: Unchecked = None             # not supported
    metadata: Ignored = None
    cache_control: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    context_management: Ignored = None


def error_body(error: ApiError) -> JsonObject:
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": NO_THREADS}} if error.body["error"]["code"] == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


async def messages(service: Service, request: Request) -> "MessagesAnswer":
    sequences, spec, body, rename = await handle_body(service, request, partial(_translate, owner=owner(request)))
    with rename_error_fields(rename):
        return MessagesAnswer(service, await submit(service, sequences), spec, body)


async def count_tokens(service: Service, request: Request) -> Response:
    sequences, *_ = await handle_body(service, request, partial(_translate, owner=owner(request), counts=True))
    return json_response({"input_tokens": _prompt_tokens(sequences[0])})


def _prompt_tokens(sequence: Generate) -> int:
    return len(sequence.request.prompt_ids) + ((sequence.start and sequence.start.tokens) or 0)


# Translating a request into a ChatRequest


Translated = tuple[list[Generate], ResponseSpec, MessagesRequest, Callable[[str], str]]


def _translate(service: Service, raw_body: bytes, owner: str, counts: bool = False) -> Translated:
    """Returns the sequences for a request, how to present them, the request, and a function that renames fields in errors.

    `counts` says whether the request is for count_tokens, and thus has no max_tokens.
    """
    body = read(raw_body, MessagesRequest)
    if body.max_tokens is None and not counts:
        raise ApiError(400, "max_tokens is required", "max_tokens")
    if body.thread is not None:
        raise ApiError(400, "thread is not supported by this server: send the whole conversation as messages, without thread",
                       "thread", NO_THREADS)
    chat, places = _messages(body)
    sampling = {name: value for name in SamplingFields.__struct_fields__ if (value := getattr(body, name)) is not None}
    thinking = body.thinking.type if body.thinking else "adaptive"
    output = body.output_config or OutputConfig()
    schema = {"name": "format", "schema": output.format.schema} if output.format else None
    fields = {**sampling, "model": body.model, "messages": chat, "stream": body.stream, "seed": body.seed,
              "max_tokens": 0 if counts else body.max_tokens, "stop": body.stop_sequences or None,
              "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
              "enable_thinking": None if thinking == "adaptive" else thinking == "enabled",
              "reasoning_effort": None if thinking == "disabled" else output.effort,
              "response_format": schema and {"type": "json_schema", "json_schema": schema},
              "continue_final_message": bool(chat) and chat[-1]["role"] == "assistant", **_choice(body.tool_choice)}
    rename = partial(_client_field, places=places)
    with rename_error_fields(rename):
        return *chat_sequences(service, convert(fields, ChatRequest), owner), body, rename


def _client_field(field: str, places: list[str]) -> str:
    """Returns the client's name for a field of the ChatRequest.

    `places` has the place of each message of the ChatRequest in the client's request.
    """
    if place := re.match(r"messages\[(\d+)\]", field):
        return places[int(place[1])] if int(place[1]) < len(places) else field
    if tool := re.match(r"(tools\[\d+\])\.function(\.parameters)?", field):
        return tool[1] + (".input_schema" if tool[2] else "") + field[tool.end():]
    return NAMES.get(field.split(".")[0], field)


def _choice(choice: Choice | None) -> JsonObject:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(400, 'tool_choice.name must be set if tool_choice.type is "tool", and must be absent otherwise',
                       "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _tool(tool: JsonObject, where: str) -> JsonObject:
    kind = str(tool.get("type") or "custom")
    if kind != "custom":
        raise ApiError(400, f'{where}.type must be "custom", because this server does not run tools itself; got {kind[:60]!r}',
                       f"{where}.type")
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(400, f"{where}.input_schema must be a JSON schema object", f"{where}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _messages(body: MessagesRequest) -> tuple[list[JsonObject], list[str]]:
    """Returns the messages for a ChatRequest, and the place of each message in the client's request.

    Consecutive turns of the same role become one message.
    """
    chat: list[JsonObject] = []
    places: list[str] = []

    def add(message: JsonObject, where: str) -> None:
        last = chat[-1] if chat else None
        if last and last["role"] == message["role"] != "tool" and not last.get("tool_calls"):
            thoughts = [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]
            last |= message | {"content": [*last["content"], *message["content"]]}
            if thoughts:
                last["reasoning_content"] = "\n".join(thoughts)
        else:
            chat.append(message)
            places.append(where)

    if body.system:
        add({"role": "system", "content": _text_blocks(body.system, "system")}, "system")
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        for turn in _turns(message.role, message.content, f"{where}.content"):
            add(turn, where)
    if not body.messages:
        raise ApiError(400, "messages must have at least one message", "messages")
    last = chat[-1]
    if last["role"] == "assistant" and len(last) == 2 and not any(block["text"] for block in last["content"]):
        chat.pop()                       # Anthropic allows an empty assistant message only at the end
    return chat, places


def _turns(role: str, content: str | list[JsonObject], where: str) -> Iterator[JsonObject]:
    """Yields the chat messages for the blocks of one message. Each tool result becomes a separate message."""
    turn: JsonObject = {"role": role, "content": []}
    calls = []
    blocks = _text_blocks(content, where) if isinstance(content, str) else content
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            if turn["content"]:
                yield turn
                turn = {"role": role, "content": []}
            yield _result(block, place)
        elif kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                raise ApiError(400, f'{place} must have a string "name" and an object "input"', place)
            calls.append({"id": block.get("id"), "type": "function",
                          "function": {"name": block["name"], "arguments": block.get("input", {})}})
        elif kind == "thinking" and role == "assistant":
            if not isinstance(block.get("thinking"), str):
                raise ApiError(400, f"{place}.thinking must be a string", place)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
        elif kind != "redacted_thinking" or role != "assistant":         # only another model can read encrypted thoughts
            turn["content"] += _text_blocks([block], place)
    if calls:
        turn["tool_calls"] = calls
    if turn["content"] or calls or role != "user" or not blocks:
        yield turn


def _result(block: JsonObject, where: str) -> JsonObject:
    if not isinstance(block.get("tool_use_id"), str):
        raise ApiError(400, f"{where}.tool_use_id must be a string", where)
    error = [{"type": "text", "text": "Error:"}] if block.get("is_error") else []
    blocks = _text_blocks(block.get("content") or "", f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": [*error, *blocks]}


def _text_blocks(blocks: object, where: str) -> list[JsonObject]:
    """Returns text blocks without other fields, such as cache_control. Raises ApiError for any block that is not text."""
    blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
    if not isinstance(blocks, list):
        raise ApiError(400, f"{where} must be a string or a list of content blocks", where)
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in NO_TEXT:
            raise ApiError(400, f"{where} must be text; got {NO_TEXT[kind]}", where)
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f'{where} must be {{"type": "text", "text": "..."}}; got a block whose type is '
                                f"{str(kind)[:60]!r}", where)
    return [{"type": "text", "text": block["text"]} for block in blocks]


# Translating events into content blocks


class MessagesAnswer(Answer):
    def __init__(self, service: Service, ticket: Ticket, spec: ResponseSpec, body: MessagesRequest) -> None:
        super().__init__(service.engine, ticket, spec, bool(body.stream), service.config.timeout_s)
        self._stops = body.stop_sequences or []
        self._shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
        self._blocks: list[JsonObject] = []
        self._open = False               # whether the last block may get more text
        self._choice = self._choices[0]

    def _error_response(self, error: ApiError) -> Response:
        return error.response(error_body)

    def _add_event(self, number: int, event: Event) -> None:
        list(self._events(event))

    def _full_response(self) -> Response:
        return json_response({**self._message(), **self._ending(), "content": self._blocks, "usage": self._counts()})

    async def _chunks(self) -> AsyncIterator[bytes]:
        usage = {"input_tokens": _prompt_tokens(self._ticket.sequences[0]), "output_tokens": 0}
        start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield sse({"type": "message_start", "message": start}) + sse({"type": "ping"})
        try:
            async for _, event in self._ticket:
                if chunk := b"".join(map(sse, self._events(event))):
                    yield chunk
        except ApiError as error:
            yield sse(error_body(self._end_stream(error)))
            return
        self._complete = True
        yield sse({"type": "message_delta", "delta": self._ending(), "usage": self._counts()}) + sse({"type": "message_stop"})

    def _message(self) -> JsonObject:
        return {"id": f"msg_{self._spec.id}", "type": "message", "role": "assistant", "model": self._spec.model}

    def _ending(self) -> JsonObject:
        last = self._choice.last
        reason = self._choice.reason(last)
        if reason == "stop" and last.stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        return {"stop_reason": REASONS[reason], "stop_sequence": None}

    def _counts(self) -> JsonObject:
        usage = self._usage()
        # Claude Code treats 0 as absent and keeps message_start's count, which includes the cached tokens
        cached = min(usage["prompt_tokens_details"]["cached_tokens"], max(usage["prompt_tokens"] - 1, 0))
        return {"input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}

    def _events(self, event: Event) -> Iterator[JsonObject]:
        thoughts, parts = self._choice.parse(event)
        if thoughts:
            yield from self._add("thinking", thoughts if self._shows_thoughts else "")
        for part in parts:
            if part.call:
                yield from self._add_call(part.call["function"], part.call["id"])
            elif part.text:
                yield from self._add("text", part.text)
        if event.finish_reason is not None:
            self._choice.last = event
            if not self._blocks:         # clients read the first block even of an empty answer
                yield from self._add("text", "")
            yield from self._close()

    def _add(self, kind: str, text: str) -> Iterator[JsonObject]:
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            self._open = True
            yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, function: JsonObject, call_id: str) -> Iterator[JsonObject]:
        yield from self._close()
        block = {"type": "tool_use", "id": call_id.replace("call_", "toolu_"), "name": function["name"], "input": {}}
        yield from self._begin(block)
        self._blocks[-1]["input"] = msgspec.Raw(function["arguments"].encode())      # Raw keeps numbers as the model wrote them
        yield self._delta("input_json_delta", "partial_json", function["arguments"])
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin(self, block: JsonObject) -> Iterator[JsonObject]:
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _close(self) -> Iterator[JsonObject]:
        if not self._open:
            return
        self._open = False
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = SIGNATURE
            yield self._delta("signature_delta", "signature", SIGNATURE)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, kind: str, name: str, text: str) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, name: text}}


ENDPOINTS = (
    Endpoint("/v1/messages", "POST", messages, MessagesRequest, **GENERATION, error="AnthropicError"),
    Endpoint("/v1/messages/count_tokens", "POST", count_tokens, MessagesRequest, errors=GENERATION["errors"],
             error="AnthropicError"),
)
