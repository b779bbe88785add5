"""Generates /openapi.json from the server's endpoints and the request bodies that rwkv/serving/schema.py declares."""

import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from rwkv.io.json_types import JsonObject
from rwkv.serving.schema import schema_of
from rwkv.serving.service import Service
from rwkv.serving.states.client_states import MEDIA_TYPES

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
TEXT = "text/plain"
FILE = MEDIA_TYPES[0]
BYTES: JsonObject = {"schema": {"type": "string", "format": "binary"}}
GENERATION: JsonObject = {"answers": (JSON, EVENTS), "errors": (400, 401, 404, 413, 415, 429, 503)}       # Endpoint fields


def _object_schema(**properties: object) -> JsonObject:
    return {"type": "object", "required": [*properties], "properties": properties}


STRING, STRING_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
ERRORS = {                               # schemas of error bodies, by API
    "Error": _object_schema(error=_object_schema(message=STRING, type=STRING, param=STRING_OR_NULL, code=STRING_OR_NULL)),
    "OllamaError": _object_schema(error=STRING),
    "AnthropicError": _object_schema(type={"const": "error"}, error=_object_schema(type=STRING, message=STRING))}
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]


class Endpoint(NamedTuple):
    """One HTTP method of one path.

    Attributes:
        body: the type of the JSON body that requests have.
        upload: the media type of an alternative to the JSON body.
        error: the name of the schema of error bodies.
    """

    path: str
    method: str
    handler: Handler
    body: type | None = None
    upload: str | None = None
    answers: tuple[str, ...] = (JSON,)   # media types of the answer
    errors: tuple[int, ...] = (400, 401, 404, 503)
    error: str = "Error"
    query: tuple[tuple[str, tuple[str, ...]], ...] = ()          # query parameters, each with its allowed values


@cache
def document(endpoints: tuple[Endpoint, ...]) -> JsonObject:
    paths: JsonObject = {}
    components: JsonObject = {**ERRORS}
    for endpoint in endpoints:
        refused = {"description": "an error",
                   "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{endpoint.error}"}}}}
        success = {"description": "the answer",
                   "content": {media_type: BYTES if media_type == FILE else {} for media_type in endpoint.answers}}
        method: JsonObject = {"responses": {"200": success, **{str(status): refused for status in endpoint.errors}}}
        if endpoint.body is not None:
            schema, more = schema_of(endpoint.body)
            components |= more
            body = {JSON: {"schema": schema}} | ({endpoint.upload: BYTES} if endpoint.upload else {})
            method["requestBody"] = {"required": True, "content": body}
        path = endpoint.path.replace(":path", "")
        method["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                                for name in re.findall(r"{(\w+)}", path)]
        method["parameters"] += [{"name": name, "in": "query", "schema": {"enum": list(values)}}
                                 for name, values in endpoint.query]
        paths.setdefault(path, {})[endpoint.method.lower()] = method
    return {"openapi": "3.1.0", "info": {"title": "timemix", "version": "1"}, "paths": paths,
            "components": {"schemas": components}}
