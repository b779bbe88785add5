"""Turns an answer into the items of a response, sends them whole or as streamed events, and stores the complete response."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
from starlette.responses import Response

from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import Answer, ResponseSpec, chat_entry, sse
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.http.errors import RETRY_AFTER, STATE_GONE, ApiError, json_response
from rwkv.serving.messages import Event
from rwkv.serving.responses.request import PreparedRequest
from rwkv.serving.responses.store import Responses, StoredResponse
from rwkv.serving.schema import NO_LIMIT


class Output:
    """Builds the items of an answer while it is generated. Yields the events of the items, without sequence_number."""

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        self._open = False               # whether the last item may get more text

    def close(self, status: str) -> Iterator[JsonObject]:
        """Ends the last item if it may get more text."""
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

    def add_text(self, kind: str, text: str, logprobs: list[JsonObject]) -> Iterator[JsonObject]:
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

    def begin(self, kind: str) -> Iterator[JsonObject]:
        """Adds an empty message or empty thoughts."""
        if kind == "message":
            item: JsonObject = {"id": f"msg_{secrets.token_hex(16)}", "type": kind, "role": "assistant"}
            part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{secrets.token_hex(16)}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": [part]})
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1,
               "item": {**self.items[-1], "content": []}}
        yield {"type": "response.content_part.added", **self._place(), "part": {**part}}

    def add_call(self, call: JsonObject) -> Iterator[JsonObject]:
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

    def _place(self) -> JsonObject:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


class ResponseAnswer(Answer):
    def __init__(self, engine: RemoteEngine, ticket: Ticket, spec: ResponseSpec, timeout_s: float, prepared: PreparedRequest,
                 responses: Responses) -> None:
        super().__init__(engine, ticket, spec, bool(prepared.body.stream), timeout_s)
        self._prepared = prepared
        self._responses = responses
        self._store = prepared.body.store is not False and responses.has_room
        self._id = f"resp_{secrets.token_hex(16)}"
        self._output = Output()
        self._choice = self._choices[0]
        self._final: JsonObject = {}     # the complete response
        self._decoder = spec.tokenizer.decoder(spec.after)

    def _add_event(self, number: int, event: Event) -> None:
        for _ in self._events(event):
            pass

    def _client_error(self, error: ApiError) -> ApiError:
        """Returns an error that asks the client to retry if the state of previous_response_id is lost, otherwise `error`.

        The retry reads the whole conversation instead of continuing the state.
        """
        if self._prepared.body.previous_response_id is None or error.body["error"]["code"] != STATE_GONE:
            return error
        return ApiError(503, "the saved state of the response in previous_response_id was just lost. Send the same request "
                        "again: the server will then read the whole conversation", "previous_response_id", "state_lost",
                        RETRY_AFTER)

    def _full_response(self) -> Response:
        return json_response(self._final)

    async def _chunks(self) -> AsyncIterator[bytes]:
        number = 0

        def add_number(event: JsonObject) -> bytes:
            nonlocal number
            number += 1
            return sse({**event, "sequence_number": number - 1})

        start = self._response("in_progress")
        yield add_number({"type": "response.created", "response": start})
        yield add_number({"type": "response.in_progress", "response": start})
        try:
            async for _, event in self._ticket:
                if chunk := b"".join(map(add_number, self._events(event))):
                    yield chunk
        except ApiError as error:
            content = self._end_stream(error).body["error"]
            yield add_number({"type": "error", **{name: content[name] for name in ("code", "message", "param")}})
            return
        self._complete = True
        await self._finish()
        yield add_number({"type": f"response.{self._final['status']}", "response": self._final})

    def _events(self, event: Event) -> Iterator[JsonObject]:
        thoughts, parts = self._choice.parse(event)
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
        if not self._output.items:       # clients expect one message even in an empty answer
            yield from self._output.begin("message")
        yield from self._output.close(status)

    def _entry(self, logprob: JsonObject) -> JsonObject:
        entry = chat_entry(logprob, self._decoder)
        for token in (entry, *entry["top_logprobs"]):
            token["bytes"] = token["bytes"] or []
        return entry

    def _status(self) -> str:
        return "incomplete" if self._choice.reason(self._choice.last) == "length" else "completed"

    async def _finish(self) -> None:
        body = self._prepared.body
        state = self._choice.last.state
        self._final = self._response()
        if self._store:
            self._final["store"] = await self._responses.put(StoredResponse(
                self._prepared.owner, self._final, self._prepared.input, state.id if state else None, bool(body.save_state)))

    def _response(self, status: str | None = None) -> JsonObject:
        body = self._prepared.body
        request = self._ticket.sequences[0].request
        sampling = request.sampling
        status = status or self._status()
        finished = status != "in_progress"
        response = {
            "id": self._id, "object": "response", "created_at": self._spec.created, "status": status, "background": False,
            "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "metadata": body.metadata or {},
            "max_output_tokens": None if body.max_output_tokens in (None, NO_LIMIT) else request.stopping.max_new_tokens,
            "model": self._spec.model, "output": self._output.items if finished else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default", "store": self._store, "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto", "tools": self._prepared.tools,
            "top_logprobs": body.top_logprobs or 0, "top_p": sampling.top_p, "truncation": body.truncation or "disabled",
            "usage": self._counts() if finished else None, "user": body.user}
        if body.save_state:
            response["state"] = self._choice.last.state.id if self._choice.last.state else None
        return response

    def _counts(self) -> JsonObject:
        usage = self._usage()
        # The engine does not count the tokens of thoughts. Encoding their text may give other tokens than the sampled ones.
        thoughts = "".join(item["content"][0]["text"] for item in self._output.items if item["type"] == "reasoning")
        return {"input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": min(usage["completion_tokens"],
                                                                  len(self._spec.tokenizer.encode(thoughts)))},
                "total_tokens": usage["total_tokens"]}
