"""The endpoint /v1/models, which returns objects with the fields of both OpenAI and Anthropic."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from rwkv.io.json_types import JsonObject
from rwkv.serving.http.errors import json_response
from rwkv.serving.openapi import Endpoint
from rwkv.serving.service import Service, default_max_tokens, resolve_adapter


async def models(service: Service, request: Request) -> Response:
    data = [_model_object(service, name) for name in (service.model, *service.engine.adapters)]
    return json_response({"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"],
                          "last_id": data[-1]["id"]})


async def one_model(service: Service, request: Request) -> Response:
    return json_response(_model_object(service, resolve_adapter(service, request.path_params["id"]) or service.model))


def _model_object(service: Service, name: str) -> JsonObject:
    """Returns the object that describes a model. The field max_model_len is vLLM's, and meta is this server's.

    meta.state_bytes is None if the server has no memory for saved states.
    """
    states = service.states
    usual = service.defaults[False, False]
    meta = {**vars(service.model_info), "template": service.template.name,
            "state_bytes": states.state_bytes if states.has_room else None,
            "defaults": {**vars(usual.sampling), "max_tokens": default_max_tokens(service, usual)}}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "timemix",
            "type": "model", "display_name": name, "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
            "lifecycle": "active", "max_tokens": service.config.max_tokens,
            "max_input_tokens": service.config.max_prompt_tokens,
            "max_model_len": service.config.max_prompt_tokens, "meta": meta}


ENDPOINTS = (
    Endpoint("/v1/models", "GET", models),
    Endpoint("/v1/models/{id:path}", "GET", one_model),
)
