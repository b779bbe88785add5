"""OpenAI's endpoint /v1/responses, which rwkv/serving/responses implements."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.endpoints.chat import chat_sequences, tools_and_call
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.messages import Generate
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.responses.events import ResponseAnswer
from rwkv.serving.responses.items import page_of_items
from rwkv.serving.responses.request import PreparedRequest, prepare, to_responses_error
from rwkv.serving.responses.store import StoredResponse
from rwkv.serving.schema import ResponseRequest, read
from rwkv.serving.service import Service, handle_body, owner, resolve_adapter
from rwkv.serving.submission import submit


async def make_response(service: Service, request: Request) -> Answer:
    sequences, spec, prepared = await handle_body(service, request, partial(_prepare, owner=owner(request)))
    try:
        ticket = await submit(service, sequences)
    except ApiError as error:
        raise to_responses_error(error) from None
    return ResponseAnswer(service.engine, ticket, spec, service.config.timeout_s, prepared, service.responses)


def _prepare(service: Service, raw_body: bytes, owner: str) -> tuple[list[Generate], ResponseSpec, PreparedRequest]:
    body = read(raw_body, ResponseRequest)
    return prepare(body, owner, resolve_adapter(service, body.model), service.responses, service.states,
                   lambda body: tools_and_call(service, body)[0], lambda body: chat_sequences(service, body, owner))


async def count_tokens(service: Service, request: Request) -> Response:
    """Counts a request's input tokens, including the tokens of the response or state that the request continues."""
    try:
        (sequence, *_), *_ = await handle_body(service, request, partial(_prepare, owner=owner(request)))
    except ApiError as error:
        raise to_responses_error(error) from None
    count = len(sequence.request.prompt_ids) + ((sequence.start and sequence.start.tokens) or 0)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def one_response(service: Service, request: Request) -> Response:
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream must not be true, because this response is already finished", "stream")
    return json_response(_stored_response(service, request).response)


async def delete_response(service: Service, request: Request) -> Response:
    stored = _stored_response(service, request)
    service.responses.drop(stored.response["id"])
    return json_response({"id": stored.response["id"], "object": "response", "deleted": True})


async def cancel_response(service: Service, request: Request) -> Response:
    _stored_response(service, request)
    raise ApiError(400, "this response cannot be cancelled, because the response is already finished. To cancel a running "
                        "response, close its connection")


async def response_input(service: Service, request: Request) -> Response:
    return json_response(page_of_items(_stored_response(service, request).input, request.query_params))


def _stored_response(service: Service, request: Request) -> StoredResponse:
    return service.responses.get(request.path_params["id"], owner(request))


ENDPOINTS = (
    Endpoint("/v1/responses", "POST", make_response, ResponseRequest, **GENERATION),
    Endpoint("/v1/responses/input_tokens", "POST", count_tokens, ResponseRequest, errors=GENERATION["errors"]),
    Endpoint("/v1/responses/{id}", "GET", one_response),
    Endpoint("/v1/responses/{id}", "DELETE", delete_response),
    Endpoint("/v1/responses/{id}/cancel", "POST", cancel_response),
    Endpoint("/v1/responses/{id}/input_items", "GET", response_input),
)
