"""/v1/responses: OpenAI's Responses in their documented form. Each is a conversation whose final state is saved.

A request becomes one for a chat completion, and its answer becomes items: thoughts, a message, calls. A response is stored with
its input and output items and its final state, which previous_response_id continues without a second prefill. If the state is
gone, or if the instructions or the tools, which begin a conversation, have changed, the items of all earlier responses are read
again.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.fair_lru import FairLRU
from rwkv.io.atomic import write_file
from rwkv.serving.answers import Answer, ResponseSpec, chat_entry
from rwkv.serving.errors import STATE_GONE, ApiError, json_response
from rwkv.serving.folder import RESPONSE, files_in
from rwkv.serving.log import say
from rwkv.serving.messages import Event, Generate, SavedState
from rwkv.serving.remote import RemoteEngine, Ticket
from rwkv.serving.schema import ChatRequest, ResponseRequest, converted
from rwkv.serving.states import ClientStates

LOGPROBS = "message.output_text.logprobs"        # a value in `include`
RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
           "response_format": "text.format"}     # fields of chat completions, and their names here
# Fields that a ChatRequest also has, but that are translated for it
TRANSLATED = ("tools", "tool_choice", "stream_options", "store", "metadata", "save_state", "top_logprobs")
TEXTS = ("input_text", "output_text", "text", "refusal")         # types of content that are text
NO_TEXT = {"input_image": "an image", "input_file": "a file", "input_audio": "audio"}


class Stored(msgspec.Struct):
    """input: the request's items. state: the id of the final state. kept: the state outlives the response."""

    owner: str
    response: dict[str, Any]
    input: list[dict[str, Any]]
    state: str | None = None
    kept: bool = False


class Responses:
    """The stored responses, in at most responses_mib of memory. Evicts the least recently used, but none of an API key that
    has no more than an equal share. With states_dir each response is also a file.
    """

    def __init__(self, config: ServeConfig, engine: RemoteEngine) -> None:
        self._limit = config.responses_mib * MIB
        self._engine = engine
        self._folder = Path(config.states_dir) if config.states_dir else None
        self._stored: dict[str, bytes] = {}
        self._lru = FairLRU[str]()
        self._on_disk: set[str] = set()  # ids of those that have a file
        self._ignored: set[str] = set()  # names of files that are no responses, or that it has deleted
        if self._folder:
            self.sync({path.name for path in self._folder.iterdir()})

    def sync(self, names: set[str]) -> None:
        """Adds the files that another server has written, and drops lost ones. names: of all files in the folder."""
        assert self._folder is not None
        new = [name for name in names if (match := RESPONSE.fullmatch(name)) and name not in self._ignored
               and match[1] not in self._stored]
        self._ignored.update(new)
        for path, _ in files_in(self._folder, RESPONSE, "responses", new):
            try:
                stored = _read(path.read_bytes(), path.stem)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ApiError) as error:
                say("responses", f"skipped {path}: {error}")
            else:
                self._ignored.discard(path.name)
                self._on_disk.add(path.stem)
                self._remember(path.stem, stored.owner, msgspec.json.encode(stored))
        for response_id in [stored_id for stored_id in self._on_disk if f"{stored_id}.json" not in names]:
            if not (self._folder / f"{response_id}.json").exists():
                self._on_disk.discard(response_id)
                self._stored.pop(response_id, None)
                self._lru.remove(response_id)

    def get(self, response_id: str, owner: str, field: str | None = None) -> Stored:
        """field: the request's field that names the response. Raises ApiError if the owner has no such response."""
        content = self._stored.get(response_id)
        stored = msgspec.json.decode(content, type=Stored) if content else None
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"unknown, deleted, evicted or unstored response {response_id[:100]!r}; responses belong to "
                                "the API key that made them", field, "response_not_found")
        with suppress(KeyError):         # it may just have been evicted: a thread reads long requests
            self._lru.use(response_id)
        return stored

    async def put(self, stored: Stored) -> None:
        response_id = stored.response["id"]
        content = msgspec.json.encode(stored)
        if self._folder:
            path = self._folder / f"{response_id}.json"
            try:
                await asyncio.to_thread(write_file, path, lambda file: file.write(content))
                self._on_disk.add(response_id)
            except OSError as error:
                say("responses", f"{path} cannot be written: {error}; it is only in memory")
        self._remember(response_id, stored.owner, content)

    def drop(self, response_id: str) -> None:
        content = self._stored.pop(response_id)
        self._lru.remove(response_id)
        stored = msgspec.json.decode(content, type=Stored)
        state = self._engine.states.get(stored.state or "")
        if state is not None and not stored.kept:
            self._engine.drop(state)
        if self._folder:
            path = self._folder / f"{response_id}.json"
            self._on_disk.discard(response_id)
            self._ignored.add(path.name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                say("responses", f"{path} cannot be deleted: {error.strerror}")

    def _remember(self, response_id: str, owner: str, content: bytes) -> None:
        self._stored[response_id] = content
        self._lru.add(response_id, owner, len(content))
        while self._lru.total > self._limit:
            self.drop(self._lru.victim(self._limit))


def _read(content: bytes, response_id: str) -> Stored:
    """The response in a file. Raises ApiError or a decoding error unless it is one that a server can continue."""
    stored = msgspec.json.decode(content, type=Stored)
    response = stored.response
    optional = (response.get("previous_response_id"), response.get("instructions"))
    if response.get("id") != response_id or not all(isinstance(value, str | None) for value in optional):
        raise ApiError(400, "its id must be its file's name")
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise ApiError(400, "its output must be a list of items")
    input_items(output)
    return msgspec.structs.replace(stored, input=input_items(stored.input))


@dataclass
class Prepared:
    """A request, its items, and its tools in the form in which the answer repeats them."""

    body: ResponseRequest
    owner: str
    input: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def prepare(body: ResponseRequest, owner: str, model: str, responses: Responses, states: ClientStates,
        shown_tools: Callable[[ChatRequest], Any],
        chat: Callable[[ChatRequest], tuple[list[Generate], ResponseSpec]]) -> tuple[list[Generate], ResponseSpec, Prepared]:
    """The sequence that answers a request. model: as in Generate. shown_tools: returns a chat request's tools in the template's
    form. chat: returns a chat request's sequences.

    Raises ApiError with field names of a ResponseRequest.
    """
    if body.background:
        raise ApiError(400, "background is not supported: send stream, and read the answer as it comes",
                       "background", "unsupported_parameter")
    if body.previous_response_id is not None and body.state is not None:
        raise ApiError(400, "state conflicts with previous_response_id: send one of them", "state")
    prepared = Prepared(body, owner, input_items(body.input), [msgspec.to_builtins(tool) for tool in body.tools or ()])
    try:
        request = _chat_request(prepared, prepared.input)
        if body.previous_response_id is not None:
            previous = responses.get(body.previous_response_id, owner, "previous_response_id")
            start = _start(previous, prepared, model, states, shown_tools(request))
            if start is None:
                request = _chat_request(prepared, [*_items_up_to(previous, owner, responses), *prepared.input])
            else:
                request = _chat_request(prepared, prepared.input, instructions=False)
                request.state = start.id
        if body.save_state or (body.store is not False and states.has_room):
            request.save_state = True
        sequences, spec = chat(request)
    except ApiError as error:
        raise renamed(error) from None
    except UserError as error:
        field = re.split(r"[^a-z_]", str(error))[0]
        raise renamed(ApiError(400, str(error), field if field in ChatRequest.__struct_fields__ else None)) from None
    return sequences, spec, prepared


def _start(previous: Stored, prepared: Prepared, model: str, states: ClientStates, tools: Any) -> SavedState | None:
    """The state to continue; None if the conversation's beginning or the model has changed, or the state is gone."""
    state = states.engine.states.get(previous.state or "")
    same = previous.response.get("instructions") == prepared.body.instructions
    if state is None or state.refusal is not None or state.model != model or not same or not states.can_continue(state, tools):
        return None
    return state


def _items_up_to(last: Stored, owner: str, responses: Responses) -> list[dict[str, Any]]:
    """The items of a response and of all responses before it.

    Raises ApiError if one of those is gone, or if edited files name each other in a circle.
    """
    chain = {last.response["id"]: last}
    while (earlier := last.response.get("previous_response_id")) is not None:
        if earlier in chain:
            raise ApiError(400, "previous_response_id: the stored responses before it name each other in a circle, at "
                                f"{earlier}; send the conversation's items as input", "previous_response_id")
        last = responses.get(earlier, owner, "previous_response_id")
        chain[earlier] = last
    return [item for each in reversed(chain.values()) for item in (*each.input, *input_items(each.response["output"]))]


def _chat_request(prepared: Prepared, items: list[dict[str, Any]], instructions: bool = True) -> ChatRequest:
    body = prepared.body
    system = [{"role": "system", "content": body.instructions}] if body.instructions and instructions else []
    messages = [*system, *messages_of(items)]
    if not messages:
        raise ApiError(400, "input must be a text, or a list of at least one item", "input")
    names = [name for name in body.__struct_fields__ if name in ChatRequest.__struct_fields__ and name not in TRANSLATED]
    fields = {name: msgspec.to_builtins(value) for name in names if (value := getattr(body, name)) is not None}
    logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    choice: Any = msgspec.to_builtins(body.tool_choice)
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    form = body.text.format if body.text else None
    if form == {"type": "text"}:
        form = None
    elif form and form.get("type") == "json_schema":     # chat completions have these fields inside another object
        form = {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    tools = [{"type": tool.pop("type"), "function": tool} for tool in map(msgspec.to_builtins, body.tools or ())]
    translated = {"tools": tools or None, "tool_choice": choice,
            "max_completion_tokens": body.max_output_tokens, "logprobs": logprobs or None,
            "top_logprobs": body.top_logprobs if logprobs else None,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
            "response_format": form}
    translated = {name: value for name, value in translated.items() if value is not None}
    return converted({"messages": messages, **fields, **translated}, ChatRequest)


def renamed(error: ApiError) -> ApiError:
    """The error of a chat request with the field names of a response request."""
    content = error.body["error"]
    message = content["message"] or ""
    param = content["param"]
    field = re.split(r"[.[]", param)[0] if param else ""
    if field in RENAMED:
        param = RENAMED[field]
        message = re.sub(rf"^{field}\b", param, message)
    return ApiError(error.status, message, param, content["code"], error.retry_after)


def input_items(items: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The items of a request, each with an id; a message's content is a list. Raises ApiError with a wrong item's place."""
    if items is None:
        return []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_input_item(item, f"input[{i}]") for i, item in enumerate(items)]


def _input_item(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(400, f"{where}.role must be user, assistant, system or developer", where)
        return {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed",
                "content": _contents(item.get("content"), role, f"{where}.content")}
    if kind == "function_call":
        names = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        if not all(isinstance(value, str) for value in names.values()):
            raise ApiError(400, f"{where} must have the strings call_id, name and arguments", where)
        return {"id": _id(item, "fc"), "type": kind, "status": "completed", **names}
    if kind == "function_call_output":
        output = item.get("output")
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not isinstance(output, (str, list)):
            raise ApiError(400, f"{where} must have a string call_id, and an output that is a text or a list of texts", where)
        if isinstance(output, list):
            output = _contents(output, "user", f"{where}.output")
        return {"id": _id(item, "fco"), "type": kind, "status": "completed", "call_id": call_id, "output": output}
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str)
                                                  for part in parts):
            raise ApiError(400, f"{where}.content must be a list of {{\"type\": \"reasoning_text\", \"text\": \"...\"}}", where)
        return {"id": _id(item, "rs"), "type": kind, "summary": [], "status": "completed",
                "content": [{"type": "reasoning_text", "text": part["text"]} for part in parts]}
    raise ApiError(400, f"{where}.type must be message, function_call, function_call_output or reasoning", where,
                   "unsupported_parameter")


def _id(item: Mapping[str, Any], kind: str) -> str:
    item_id = item.get("id")
    return item_id if isinstance(item_id, str) and 0 < len(item_id) <= 64 else f"{kind}_{secrets.token_hex(16)}"


def _contents(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of texts", where)
    contents = []
    for i, part in enumerate(content):
        sort = part.get("type") if isinstance(part, dict) else None
        if isinstance(sort, str) and sort in NO_TEXT:
            raise ApiError(400, f"{where}[{i}] must be text; got {NO_TEXT[sort]}", where)
        text = part.get("refusal" if sort == "refusal" else "text") if isinstance(part, dict) else None
        if sort not in TEXTS or not isinstance(text, str):
            raise ApiError(400, f'{where}[{i}] must be a text, {{"type": "{kind}", "text": "..."}}', where)
        contents.append({"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})})
    return contents


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as messages of a chat. Consecutive thoughts, texts and calls become one answer.

    Two assistant messages without a call between them stay two. Thoughts without text, such as other servers' encrypted ones,
    are skipped.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None         # the last message, if it is an answer that may go on
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            answer = None
            continue
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _item_text(item)})
            answer = None
            continue
        if kind == "reasoning" and not _item_text(item, "").strip():
            continue
        if answer is None or _begins_answer(answer, kind):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if kind == "message":
            answer["content"] = "\n".join(filter(None, (answer["content"], _item_text(item))))
        elif kind == "reasoning":
            answer["reasoning_content"] = "\n".join(filter(None, (answer.get("reasoning_content"), _item_text(item, ""))))
        else:
            call = {"id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]}}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    return messages


def _begins_answer(answer: dict[str, Any], kind: str) -> bool:
    """Whether an item begins another answer: thoughts after words or calls, or words right after other words."""
    if kind == "reasoning":
        return bool(answer["content"] or answer.get("tool_calls"))
    return kind == "message" and bool(answer["content"]) and not answer.get("tool_calls")


def _item_text(item: dict[str, Any], separator: str = "\n") -> str:
    return separator.join(part["text"] for part in item.get("content") or ())


class Output:
    """Builds the items of an answer while it comes, and yields their events, still without sequence_number."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False               # the last item may get more text

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends the last item if it is open."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        part = item["content"][0]
        item["status"] = status
        place = self._place()
        if item["type"] == "message":
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": part["logprobs"]}
        else:
            yield {"type": "response.reasoning_text.done", **place, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def add_text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self.close("completed")
            yield from self.begin(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"] += logprobs
            yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": logprobs}
        else:
            yield {"type": "response.reasoning_text.delta", **self._place(), "delta": text}

    def begin(self, kind: str) -> Iterator[dict[str, Any]]:
        """Adds a message or thoughts, still without text."""
        if kind == "message":
            item: dict[str, Any] = {"id": f"msg_{secrets.token_hex(16)}", "type": kind, "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{secrets.token_hex(16)}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": [part]})
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1,
               "item": {**self.items[-1], "content": []}}
        yield {"type": "response.content_part.added", **self._place(), "part": {**part}}

    def add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close("completed")
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "status": "completed", "call_id": call["id"],
                "name": name, "arguments": arguments}
        self.items.append(item)
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield {"type": "response.output_item.added", "output_index": place["output_index"],
               "item": {**item, "status": "in_progress", "arguments": ""}}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


class ResponseAnswer(Answer):
    def __init__(self, engine: RemoteEngine, ticket: Ticket, spec: ResponseSpec, timeout_s: float, prepared: Prepared,
                 responses: Responses) -> None:
        super().__init__(engine, ticket, spec, bool(prepared.body.stream), timeout_s)
        self._prepared = prepared
        self._responses = responses
        self._id = f"resp_{secrets.token_hex(16)}"
        self._output = Output()
        self._choice = self._choices[0]
        self._decoder = spec.tokenizer.decoder(spec.after)

    def _take(self, number: int, event: Event) -> None:
        for _ in self._events(event):
            pass

    def _client_error(self, error: ApiError) -> ApiError:
        """A client that named a response does not know its state: if that is lost, a second try reads the items instead."""
        if self._prepared.body.previous_response_id is None or error.body["error"]["code"] != STATE_GONE:
            return error
        return ApiError(503, "the state of previous_response_id has just been lost: send this request again, and the "
                        "conversation is read from its beginning", "previous_response_id", "state_lost", 1)

    def _whole(self) -> Response:
        return json_response(self._response())

    async def _chunks(self) -> AsyncIterator[bytes]:
        number = 0

        def sse(event: dict[str, Any]) -> bytes:
            nonlocal number
            numbered = {**event, "sequence_number": number}
            number += 1
            return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(numbered))

        start = self._response("in_progress")
        yield sse({"type": "response.created", "response": start}) + sse({"type": "response.in_progress", "response": start})
        try:
            async for _, event in self._ticket:
                if chunk := b"".join(map(sse, self._events(event))):
                    yield chunk
        except ApiError as error:
            content = self._client_error(error).body["error"]
            yield sse({"type": "error", **{name: content[name] for name in ("code", "message", "param")}})
            return
        self._complete = True
        await self._finish()
        response = self._response()
        yield sse({"type": f"response.{response['status']}", "response": response})

    def _events(self, event: Event) -> Iterator[dict[str, Any]]:
        thoughts, parts = self._choice.parsed(event)
        if thoughts:
            yield from self._output.add_text("reasoning", thoughts, [])
        for part in parts:
            if part.call:
                yield from self._output.add_call(part.call)
            else:
                yield from self._output.add_text("message", part.text, [self._entry(entry) for entry in part.logprobs])
        if event.finish_reason is None:
            return
        self._choice.last = event
        status = self._status()
        if not self._output.items:       # an empty answer is an empty message
            yield from self._output.begin("message")
        yield from self._output.close(status)

    def _entry(self, logprob: dict[str, Any]) -> dict[str, Any]:
        entry = chat_entry(logprob, self._decoder)
        for token in (entry, *entry["top_logprobs"]):
            token["bytes"] = token["bytes"] or []
        return entry

    def _status(self) -> str:
        return "incomplete" if self._choice.reason(self._choice.last) == "length" else "completed"

    async def _finish(self) -> None:
        body = self._prepared.body
        state = self._choice.last.state
        if body.store is not False:
            await self._responses.put(Stored(self._prepared.owner, self._response(), self._prepared.input,
                                        state.id if state else None, bool(body.save_state)))

    def _response(self, status: str | None = None) -> dict[str, Any]:
        body = self._prepared.body
        sampling = self._ticket.sequences[0].request.sampling
        status = status or self._status()
        finished = status != "in_progress"
        response = {
            "id": self._id, "object": "response", "created_at": self._spec.created, "status": status, "background": False,
            "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "model": self._spec.model, "output": self._output.items if finished else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default", "store": body.store is not False, "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto", "tools": self._prepared.tools,
            "top_logprobs": body.top_logprobs or 0, "top_p": sampling.top_p, "truncation": body.truncation or "disabled",
            "usage": self._counts() if finished else None, "user": body.user}
        if body.save_state:
            response["state"] = self._choice.last.state.id if self._choice.last.state else None
        return response

    def _counts(self) -> dict[str, Any]:
        usage = self._usage()
        # The engine does not count the tokens of thoughts. Encoded here, they may differ from those that were drawn
        thoughts = "".join(item["content"][0]["text"] for item in self._output.items if item["type"] == "reasoning")
        return {"input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": min(usage["completion_tokens"],
                                                                  len(self._spec.tokenizer.encode(thoughts)))},
                "total_tokens": usage["total_tokens"]}


def listed(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items, the last one first unless the query says order=asc. Raises ApiError for a wrong query."""
    order = query.get("order", "desc")
    limit = query.get("limit", "20")
    after = query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise ApiError(400, "limit must be a whole number from 1 to 100", "limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ApiError(400, "after must be the id of an item of this list", "after")
        ordered = ordered[ids.index(after) + 1:]
    page = ordered[:int(limit)]
    return {"object": "list", "data": page, "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None, "has_more": len(ordered) > len(page)}
