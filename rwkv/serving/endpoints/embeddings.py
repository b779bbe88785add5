"""OpenAI's endpoint /v1/embeddings, and EmbeddingAnswer, which also answers Ollama's requests for embeddings."""

import base64
import sys
from array import array
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rwkv.config import Pooling
from rwkv.generation.request import Request as EngineRequest
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.messages import Event, Generate
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.schema import Ignored, TokenId, read
from rwkv.serving.service import Service, handle_body, owner, resolve_adapter
from rwkv.serving.submission import prompt_ids, submit

MOST_INPUTS = 2048                       # maximum inputs in one request, as in OpenAI's API
AT_ONCE = 4                              # maximum inputs of one request in the engine at a time


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    pooling: Pooling | None = None       # None stands for mean
    user: Ignored = None


async def embeddings(service: Service, request: Request) -> "EmbeddingAnswer":
    sequences, render = await handle_body(service, request, partial(_translate, owner=owner(request)))
    return EmbeddingAnswer(service, await submit(service, sequences[:group_size(service)]), sequences, render)


Render = Callable[[list[Event]], JsonObject]


def _translate(service: Service, raw_body: bytes, owner: str) -> tuple[list[Generate], Render]:
    body = read(raw_body, EmbeddingRequest)
    model = resolve_adapter(service, body.model)
    sequences = embedding_sequences(service, _inputs(body.input), model, owner, body.dimensions, body.pooling or "mean")

    def render(events: list[Event]) -> JsonObject:
        tokens = sum(event.prompt_tokens for event in events)
        encode = _little_endian_base64 if body.encoding_format == "base64" else list
        return {"id": f"embd-{uuid4().hex}",             # Mistral's client requires an id
                "object": "list", "model": model or service.model,
                "data": [{"object": "embedding", "index": index, "embedding": encode(event.embedding or [])}
                         for index, event in enumerate(events)],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    return sequences, render


def _inputs(value: Any) -> list[str | list[int]]:
    inputs = [value] if isinstance(value, str) or (value and all(isinstance(item, int) for item in value)) else value
    if not (all(isinstance(item, str) for item in inputs) or all(isinstance(item, list) for item in inputs)):
        raise ApiError(400, "input must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
                       "input")
    for place, item in enumerate(inputs):
        if not item:
            where = "input" if isinstance(value, str) else f"input[{place}]"
            raise ApiError(400, f"{where} must not be empty", where)
    return inputs


def embedding_sequences(service: Service, inputs: list[str | list[int]], model: str, owner: str, dimensions: int | None,
                        pooling: Pooling = "mean") -> list[Generate]:
    """Returns a sequence without new tokens for each input. Raises ApiError for too many inputs and for wrong dimensions."""
    width = service.model_info.width
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise ApiError(400, f"input must have 1 to {MOST_INPUTS} items; got {len(inputs)}", "input")
    if dimensions not in (None, width):
        raise ApiError(400, f"dimensions must be {width}, the width of the model; got {dimensions}", "dimensions")
    start = service.states.start_state(None, owner, model)
    return [Generate(EngineRequest(prompt_ids(service, text, f"input[{place}]", start), stopping=StoppingCriteria(0),
                                   pooling=pooling), model, owner, start) for place, text in enumerate(inputs)]


def group_size(service: Service) -> int:
    return min(AT_ONCE, service.config.max_rows)


class EmbeddingAnswer(Answer):
    """An answer with the embeddings of `sequences`. Submits the sequences to the engine a few at a time.

    Args:
        ticket: the ticket of the first few sequences.
        render: makes the response body from the last event of each sequence.
        error_form: makes the body of an error; None stands for OpenAI's format.
    """

    def __init__(self, service: Service, ticket: Ticket, sequences: list[Generate], render: Render,
                 error_form: Callable[[ApiError], JsonObject] | None = None) -> None:
        spec = ResponseSpec("embedding", "", False, False, [""] * len(sequences), 1, service.tokenizer)
        super().__init__(service.engine, ticket, spec, False, service.config.timeout_s)
        self._service = service
        self._unsubmitted = sequences[len(ticket.sequences):]
        self._render = render
        self._error_form = error_form

    def _cancel(self) -> None:
        super()._cancel()
        self._unsubmitted = []

    async def _whole_response(self) -> Response:
        response = json_response(self._render(await self._last_events()))
        self._complete = True
        return response

    def _error_response(self, error: ApiError) -> Response:
        return error.response(self._error_form)

    async def _last_events(self) -> list[Event]:
        last_events: list[Event] = []
        while True:
            events = {number: event async for number, event in self._ticket if event.finish_reason is not None}
            last_events += [events[number] for number in sorted(events)]
            if self._ticket.cancelled or any(event.embedding is None for event in last_events):
                raise ApiError(503, "the input requires more time than the server's timeout_s= allows: send less input",
                               code="timeout")
            if not self._unsubmitted:
                return last_events
            group = self._unsubmitted[:group_size(self._service)]
            self._unsubmitted = self._unsubmitted[len(group):]
            self._ticket = await submit(self._service, group, begun=True)


def _little_endian_base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


ENDPOINTS = (Endpoint("/v1/embeddings", "POST", embeddings, EmbeddingRequest, errors=GENERATION["errors"]),)
