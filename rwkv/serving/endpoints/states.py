"""The endpoint /v1/states, which saves states after a prompt or messages, or from uploaded state files."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rwkv.config import MIB, STATE_LAYOUTS
from rwkv.generation.request import Request as EngineRequest
from rwkv.generation.stopping import StoppingCriteria
from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.endpoints.chat import template_tools
from rwkv.serving.http.bodies import read_body
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.messages import Generate, SavedState
from rwkv.serving.openapi import FILE, GENERATION, Endpoint
from rwkv.serving.schema import StateRequest, read
from rwkv.serving.service import Service, handle_body, owner, resolve_adapter
from rwkv.serving.states.client_states import MEDIA_TYPES, describe_state
from rwkv.serving.submission import message_ids, prompt_ids, submit


class StateAnswer(Answer):
    """An answer that describes the final state of the ticket's only sequence."""

    def _full_response(self) -> Response:
        state = self._choices[0].last.state
        if state is None:
            raise ApiError(503, "the prompt requires more time than the server's timeout_s= allows: send a shorter prompt",
                           code="timeout")
        return json_response({**describe_state(state, self._spec.model), "usage": self._usage()})


async def make_state(service: Service, request: Request) -> ASGIApp:
    """Saves the state after a prompt or messages, or an uploaded state file."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() in MEDIA_TYPES:
        limit = max(service.config.max_body_mib * MIB, 2 * service.states.state_bytes + MIB)
        content = await read_body(request, limit)
        layout = request.query_params.get("state_layout")
        if layout not in (None, *STATE_LAYOUTS):
            raise ApiError(400, f"state_layout must be {' or '.join(STATE_LAYOUTS)}; got {layout[:40]!r}", "state_layout")
        state = await service.engine.upload(service.states.new_state(owner(request)), content, layout)
        if await request.is_disconnected():              # no client would learn the state's id
            service.engine.drop(state)
        return _state_response(service, state)
    sequence = await handle_body(service, request, partial(_state_sequence, owner=owner(request)))
    spec = ResponseSpec("state", service.model, False, False, [""], 1, service.tokenizer, saves=True)
    return StateAnswer(service.engine, await submit(service, [sequence]), spec, False, service.config.timeout_s)


def _state_sequence(service: Service, raw_body: bytes, owner: str) -> Generate:
    body = read(raw_body, StateRequest)
    model = resolve_adapter(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, 'the body must have either "prompt" or "messages", or must be a state file, sent with the content '
                            f"type {MEDIA_TYPES[0]}", "prompt")
    start = service.states.start_state(body.state, owner, model)
    turn = None
    if body.messages is None:
        if body.tools:
            raise ApiError(400, "tools conflicts with prompt: send the conversation as messages", "tools")
        ids = prompt_ids(service, body.prompt or "", start=start)
    else:
        tools = template_tools(service, body.tools)
        prompt = service.states.prompt(start, body.messages, tools, add_generation_prompt=False)
        turn = service.states.turn_of_messages(body.messages, tools, start)
        ids = message_ids(service, prompt, start)
    return Generate(EngineRequest(ids, stopping=StoppingCriteria(0)), model, owner, start,
                    service.states.new_state(owner, turn, model))


async def list_states(service: Service, request: Request) -> Response:
    states = [describe_state(state, service.model) for state in service.states.owned_by(owner(request))]
    return json_response({"object": "list", "data": states, "has_more": False})


async def one_state(service: Service, request: Request) -> Response:
    return _state_response(service, service.states.get(request.path_params["id"], owner(request)))


async def state_content(service: Service, request: Request) -> Response:
    state = service.states.get_usable(request.path_params["id"], owner(request))
    headers = {"content-disposition": f'attachment; filename="{state.id}.safetensors"'}
    return Response(await service.engine.download(state), media_type=MEDIA_TYPES[0], headers=headers)


async def delete_state(service: Service, request: Request) -> Response:
    state = service.states.get(request.path_params["id"], owner(request))
    service.engine.drop(state)
    return json_response({"id": state.id, "object": "state.deleted", "deleted": True})


def _state_response(service: Service, state: SavedState) -> Response:
    return json_response(describe_state(state, service.model))


ENDPOINTS = (
    Endpoint("/v1/states", "POST", make_state, StateRequest, upload=FILE, errors=GENERATION["errors"],
             query=(("state_layout", STATE_LAYOUTS),)),
    Endpoint("/v1/states", "GET", list_states),
    Endpoint("/v1/states/{id}", "GET", one_state),
    Endpoint("/v1/states/{id}", "DELETE", delete_state),
    Endpoint("/v1/states/{id}/content", "GET", state_content, answers=(FILE,)),
)
