"""Ollama's endpoints for models (/api/tags, /api/show, /api/ps, /api/pull and /api/version) and for embeddings."""

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rwkv.config import BITS
from rwkv.io.json_types import JsonObject
from rwkv.serving.endpoints.embeddings import EmbeddingAnswer, Render, embedding_sequences, group_size
from rwkv.serving.endpoints.ollama import GENERATED, OPTIONS, Model, error_body, model_id
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.messages import Event, Generate
from rwkv.serving.openapi import LINES, Endpoint
from rwkv.serving.schema import read
from rwkv.serving.service import LATEST, Service, handle_body, owner, resolve_adapter
from rwkv.serving.submission import encode_field, submit

VERSION = "0.12.6"                       # the version of Ollama's API; clients refuse older versions
NEVER_EXPIRES = "2318-01-01T00:00:00Z"   # Ollama's date for a model that is never unloaded (keep_alive=-1)


def _model_entry(service: Service, name: str) -> JsonObject:
    info = service.model_info
    facts = f"{name} {info.generation} {info.parameters} {info.dtype}"
    size = info.parameters * BITS[info.dtype] // 8
    return {"name": name if ":" in name else name + LATEST, "model": name if ":" in name else name + LATEST,
            "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(), "size": size,
            "digest": hashlib.sha256(facts.encode()).hexdigest(), "details": _details(service)}


def _details(service: Service) -> JsonObject:
    info = service.model_info
    n = info.parameters
    size = f"{n / 1e9:.1f}B" if n >= 10**9 else f"{n / 1e6:.1f}M" if n >= 10**6 else f"{n / 1e3:.1f}K"
    return {"parent_model": "", "format": "timemix", "family": info.generation, "families": [info.generation],
            "parameter_size": size, "quantization_level": info.dtype.upper()}


async def tags(service: Service, request: Request) -> Response:
    return json_response({"models": [_model_entry(service, name) for name in (service.model, *service.engine.adapters)]})


async def running(service: Service, request: Request) -> Response:
    """Lists all models as running, because they stay in memory while the server runs."""
    models = [_model_entry(service, name) for name in (service.model, *service.engine.adapters)]
    for model in models:
        model |= {"expires_at": NEVER_EXPIRES, "size_vram": model["size"] if service.model_info.device == "cuda" else 0,
                  "context_length": service.config.max_prompt_tokens}
    return json_response({"models": models})


async def show(service: Service, request: Request) -> Response:
    return await handle_body(service, request, _describe_model)


def _describe_model(service: Service, raw_body: bytes) -> Response:
    name = model_id(service, read(raw_body, Model))
    info = service.model_info
    template = service.template
    capabilities = ["completion", *(["tools"] if template.supports_tools else []), *(["thinking"] if template.thinks else [])]
    sampling = service.defaults[False, False].sampling
    parameters = {option: getattr(sampling, here) for option, here in OPTIONS.items() if hasattr(sampling, here)}
    return json_response({
        "modelfile": f"FROM {name}\n", "template": template.definition,
        "parameters": "\n".join(f"{option:30} {value}" for option, value in parameters.items()),
        "details": _details(service), "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "capabilities": capabilities,
        "model_info": {"general.architecture": info.generation, "general.basename": name,
                       "general.parameter_count": info.parameters,
                       f"{info.generation}.context_length": service.config.max_prompt_tokens,
                       f"{info.generation}.embedding_length": info.width}})


async def version(service: Service, request: Request) -> Response:
    return json_response({"version": VERSION})


async def pull(service: Service, request: Request) -> Response:
    """Reports success without any download. Raises ApiError if the server does not have the model."""
    def respond(service: Service, raw_body: bytes) -> Response:
        model_id(service, read(raw_body, Model))
        return Response(b'{"status":"success"}\n', media_type=LINES)

    return await handle_body(service, request, respond)


async def unsupported(service: Service, request: Request) -> Response:
    raise ApiError(400, f"{request.url.path} is not supported, because the models are fixed when the server starts")


# Embeddings


class EmbedRequest(Model, kw_only=True):
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class EmbeddingsRequest(Model, kw_only=True):
    """The body of Ollama's older endpoint /api/embeddings."""

    prompt: str | None = None


async def embed(service: Service, request: Request) -> ASGIApp:
    return await _respond(service, request, partial(_embed, owner=owner(request)))


async def embeddings(service: Service, request: Request) -> ASGIApp:
    return await _respond(service, request, partial(_embed_prompt, owner=owner(request)))


Translated = tuple[list[Generate], Render]


async def _respond(service: Service, request: Request, translate: Callable[[Service, bytes], Translated]) -> ASGIApp:
    sequences, render = await handle_body(service, request, translate)
    if not sequences:                    # without an input, Ollama only loads the model
        return json_response(render([]))
    return EmbeddingAnswer(service, await submit(service, sequences[:group_size(service)]), sequences, render, error_body)


def _embed(service: Service, raw_body: bytes, owner: str) -> Translated:
    body = read(raw_body, EmbedRequest)
    name = model_id(service, body)
    start = time.monotonic_ns()

    def render(events: list[Event]) -> JsonObject:
        return {"model": name, "embeddings": [event.embedding for event in events], "load_duration": 0,
                "total_duration": time.monotonic_ns() - start,
                "prompt_eval_count": sum(event.prompt_tokens for event in events)}

    inputs = [body.input] if isinstance(body.input, str) and body.input else body.input or []
    return _input_sequences(service, inputs, name, owner, body.truncate is not False, body.dimensions), render


def _embed_prompt(service: Service, raw_body: bytes, owner: str) -> Translated:
    body = read(raw_body, EmbeddingsRequest)
    name = model_id(service, body)
    sequences = _input_sequences(service, [body.prompt] if body.prompt else [], name, owner, True, None)
    return sequences, lambda events: {"embedding": events[0].embedding if events else []}


def _input_sequences(service: Service, inputs: Sequence[str], name: str, owner: str, truncate: bool,
                     dimensions: int | None) -> list[Generate]:
    if not inputs:
        return []
    ids = [encode_field(service.tokenizer.encode, text, f"input[{place}]") for place, text in enumerate(inputs)]
    if truncate:
        ids = [tokens[:service.config.max_prompt_tokens] for tokens in ids]
    return embedding_sequences(service, list(ids), resolve_adapter(service, name), owner, dimensions)


ENDPOINTS = (
    Endpoint("/api/embed", "POST", embed, EmbedRequest, **GENERATED),
    Endpoint("/api/embeddings", "POST", embeddings, EmbeddingsRequest, **GENERATED),
    Endpoint("/api/tags", "GET", tags, error="OllamaError"),
    Endpoint("/api/ps", "GET", running, error="OllamaError"),
    Endpoint("/api/version", "GET", version, error="OllamaError"),
    Endpoint("/api/show", "POST", show, Model, **GENERATED),
    Endpoint("/api/pull", "POST", pull, Model, **GENERATED),
    *(Endpoint(f"/api/{name}", "DELETE" if name == "delete" else "POST", unsupported, error="OllamaError")
      for name in ("create", "copy", "push", "delete")),
)
