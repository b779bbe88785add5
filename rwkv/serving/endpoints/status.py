"""Endpoints for the server's health, for metrics, and for a web page on which to try the server."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.openapi import TEXT, Endpoint
from rwkv.serving.service import Service

PAGE_HEADERS = {"content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


async def health(service: Service, request: Request) -> Response:
    service.engine.require_engine()
    return json_response({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    if service.stopping:
        raise ApiError(503, "the server is stopping", code="stopping")
    return await health(service, request)


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def page(service: Service, request: Request) -> Response:
    text = (resources.files("rwkv.serving") / "page.html").read_text(encoding="utf-8")
    return Response(text, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


ENDPOINTS = (
    Endpoint("/health", "GET", health),
    Endpoint("/ready", "GET", ready),
    Endpoint("/metrics", "GET", metrics, answers=(TEXT,)),
    Endpoint("/", "GET", page, answers=("text/html",)),
)
