"""The ASGI application, with the routes and the handling of API keys and errors. The endpoints are in endpoints/."""

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.serving import openapi
from rwkv.serving.endpoints import (
    anthropic,
    chat,
    completions,
    embeddings,
    models,
    ollama,
    ollama_models,
    responses,
    states,
    status,
    tokenizer,
)
from rwkv.serving.http.errors import ApiError, json_response, user_error
from rwkv.serving.http.origins import check_origin, check_preflight
from rwkv.serving.log import say_refused
from rwkv.serving.openapi import Endpoint, Handler
from rwkv.serving.service import Service
from rwkv.serving.states.client_states import owner_digest

OPEN_PATHS = ("/", "/health", "/ready")  # these paths need no API key


def application(service: Service) -> ASGIApp:
    paths: dict[str, dict[str, Handler]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint.handler
    routes = [Route(path, _endpoint(service, handlers), methods=[*handlers]) for path, handlers in paths.items()]
    cors = [Middleware(CORSMiddleware, allow_origins=service.config.cors, allow_methods=["GET", "POST", "DELETE"],
                       allow_headers=["*"], allow_private_network=True,
                       expose_headers=["x-request-id"])] if service.config.cors else []
    app = Starlette(routes=routes, middleware=cors, exception_handlers={HTTPException: _http_error, Exception: _internal_error})
    return _with_log(app, service.config)


def _with_log(app: ASGIApp, config: ServeConfig) -> ASGIApp:
    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        """Logs refused requests and failed streams, and ignores double and trailing slashes, as in some clients' base URLs."""
        request = f"{scope['method']} {scope['raw_path'].decode('ascii')}"               # raw_path keeps a newline as %0A
        state = scope["state"]

        async def log_refusal(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                say_refused(message["status"], request, state["request_id"], state.get("refusal", ""))
            elif "stream_error" in state:                # comes with the last message of a stream
                error = state.pop("stream_error")
                say_refused(error.status, request, state["request_id"], str(error))
            await send(message)

        if scope["method"] == "OPTIONS":
            try:
                check_preflight(config, Headers(scope=scope))
            except ApiError as error:
                state["refusal"] = str(error)
                await error.response()(scope, receive, log_refusal)
                return
        await app({**scope, "path": re.sub("/+", "/", scope["path"]).rstrip("/") or "/"}, receive, log_refusal)

    return logged


def _endpoint(service: Service, handlers: Mapping[str, Handler]) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Returns the ASGI endpoint of one path. `handlers` maps HTTP methods to handlers; GET's handler also answers HEAD."""
    async def endpoint(request: Request) -> ASGIApp:
        try:
            check_origin(service.config, request.headers)
            _authorize(service, request)
            if service.shared is not None and request.url.path not in OPEN_PATHS:
                await service.shared.sync(lost_too=request.method != "POST")
            handler = handlers["GET" if request.method == "HEAD" else request.method]
            return await handler(service, request)
        except ApiError as error:
            return _refusal_response(request, error)
        except UserError as error:
            return _refusal_response(request, user_error(error))
        except RecursionError:
            return _refusal_response(request, ApiError(400, "the body's objects and lists are nested too deeply"))
        except ClientDisconnect:
            request.scope["state"]["refusal"] = "the connection closed before the whole body had arrived"
            return Response(status_code=400)             # only for the log

    return endpoint


def _refusal_response(request: Request, error: ApiError) -> Response:
    request.scope["state"]["refusal"] = str(error)
    return error.response(_error_formatter(request))


def _error_formatter(request: Request) -> Callable[[ApiError], JsonObject] | None:
    """Returns the function that formats error bodies for the client's API, or None for OpenAI's API."""
    if request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        return anthropic.error_body
    return ollama.error_body if request.url.path.startswith("/api/") else None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    form = _error_formatter(request)
    if error.status_code == 405:
        response = ApiError(405, f"{path} does not accept the method {request.method}").response(form)
        response.headers.update(error.headers or {})             # Allow
        return response
    if error.status_code == 404:
        return ApiError(404, f"unknown path {path}{_hint(path)}").response(form)
    return ApiError(error.status_code, error.detail).response(form)


def _hint(path: str) -> str:
    """Returns the rest of the error message if an unknown path lacks the beginning of an endpoint's path, or repeats it."""
    similar = [endpoint.path for endpoint in ENDPOINTS if endpoint.path.endswith(path) or path.endswith(endpoint.path)]
    return f". The endpoint is {min(similar, key=len)}: correct the base URL in the client's settings" if similar else ""


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "an internal error occurred: see the server's log").response(_error_formatter(request))


def _authorize(service: Service, request: Request) -> None:
    """Checks the API key and sets the request's owner. Raises ApiError for a wrong key."""
    keys = service.config.api_key
    request.scope["state"]["owner"] = owner_digest("")
    if not keys or request.url.path in OPEN_PATHS:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    request_keys = [request.headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
    matching = [key for key in keys for value in request_keys
                if hmac.compare_digest(value.strip().encode("latin-1", "replace"), key.encode())]
    if not matching:
        raise ApiError(401, 'the request must contain one of the server\'s API keys. Send the header "Authorization: Bearer '
                            'KEY" or "x-api-key: KEY"', code="invalid_api_key")
    request.scope["state"]["owner"] = owner_digest(matching[0])


async def openapi_document(service: Service, request: Request) -> Response:
    return json_response(openapi.document(ENDPOINTS))


ENDPOINTS = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *ollama.ENDPOINTS,
    *ollama_models.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *states.ENDPOINTS,
    *models.ENDPOINTS,
    *tokenizer.ENDPOINTS,
    *status.ENDPOINTS,
    Endpoint("/openapi.json", "GET", openapi_document),
)
