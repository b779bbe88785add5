"""The application: routes, authorisation and errors. The endpoints are in endpoints/, a file for each interface."""

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.serving import openapi
from rwkv.serving.endpoints import chat, completions, models, responses, states, status, tokenizer
from rwkv.serving.errors import ApiError, json_response
from rwkv.serving.log import say_refused
from rwkv.serving.openapi import Endpoint, Handler
from rwkv.serving.origins import check_origin
from rwkv.serving.service import Service
from rwkv.serving.states import owner_of

SAMPLING_FIELDS = tuple(item.name for item in fields(Sampling))
OPEN_PATHS = ("/", "/health", "/ready")  # these need no key


def application(service: Service) -> ASGIApp:
    paths: dict[str, dict[str, Handler]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint.handler
    routes = [Route(path, _endpoint(service, handlers), methods=[*handlers]) for path, handlers in paths.items()]
    cors = [Middleware(CORSMiddleware, allow_origins=service.config.cors, allow_methods=["GET", "POST", "DELETE"],
                       allow_headers=["*"], expose_headers=["x-request-id"])] if service.config.cors else []
    return _logged(Starlette(routes=routes, middleware=cors,
                             exception_handlers={HTTPException: _http_error, Exception: _internal_error}))


def _logged(app: ASGIApp) -> ASGIApp:
    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        """Paths with slashes at the end or twice, as of a base address that ends with one, are those without."""
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                request = f"{scope['method']} {scope['raw_path'].decode('ascii')}"       # %0A stays: the log gets no line end
                say_refused(message["status"], request, scope["state"]["request_id"], scope["state"].get("refusal", ""))
            await send(message)

        await app({**scope, "path": re.sub("/+", "/", scope["path"]).rstrip("/") or "/"}, receive, noted)

    return logged


def _endpoint(service: Service, handlers: Mapping[str, Handler]) -> Callable[[Request], Awaitable[Any]]:
    """handlers: by method. The one of GET also answers HEAD."""
    async def endpoint(request: Request) -> Any:
        try:
            check_origin(service.config, request.headers)
            _authorize(service, request)
            handler = handlers["GET" if request.method == "HEAD" else request.method]
            return await handler(service, request)
        except ApiError as error:
            return _refusal(request, error)
        except UserError as error:
            return _refusal(request, ApiError(400, str(error), _field_in(str(error))))
        except RecursionError:
            return _refusal(request, ApiError(400, "the body has too many objects or lists inside each other"))
        except ClientDisconnect:
            return Response(status_code=400)

    return endpoint


def _refusal(request: Request, error: ApiError) -> Response:
    """The answer; its message is also for the log."""
    request.scope["state"]["refusal"] = str(error)
    return error.response()


def _field_in(message: str) -> str | None:
    """The request's field with which an error message begins, such as messages[1].content or banned; None for no field."""
    word = message.split(maxsplit=1)[0].rstrip(":,")
    held = ("messages", "tools", "response_format", "grammar")
    return word if word.startswith(held) or word in SAMPLING_FIELDS else None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer = ApiError(405, f"{request.url.path} has no method {request.method}").response()
        answer.headers.update(error.headers or {})               # Allow
        return answer
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {request.url.path[:200]}").response()
    return ApiError(error.status_code, error.detail).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has failed; its log says more").response()


def _authorize(service: Service, request: Request) -> None:
    """Checks the key, and notes the request's owner."""
    keys = service.config.api_key
    request.scope["state"]["owner"] = owner_of("")
    if not keys or request.url.path in OPEN_PATHS:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1", "replace")
    matching = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    if scheme.lower() != "bearer" or not matching:
        raise ApiError(401, "the header Authorization: Bearer KEY is missing or holds another key", code="invalid_api_key")
    request.scope["state"]["owner"] = owner_of(matching[0])


async def openapi_document(service: Service, request: Request) -> Response:
    return json_response(openapi.document(ENDPOINTS))


ENDPOINTS = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *states.ENDPOINTS,
    *models.ENDPOINTS,
    *tokenizer.ENDPOINTS,
    *status.ENDPOINTS,
    Endpoint("/openapi.json", "GET", openapi_document),
)
