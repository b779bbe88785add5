"""/openapi.json: the routes with bodies, and the schemas of these, derived from rwkv/serving/schema.py."""

from functools import cache
from typing import Any

from rwkv.serving.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    StateRequest,
    TokenizeRequest,
    schema_of,
)
from rwkv.serving.states import FORMS

BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponseRequest,
          "/v1/states": StateRequest, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
FILE: dict[str, Any] = {FORMS[0]: {"schema": {"type": "string", "format": "binary"}}}
PLAIN = ("/v1/models", "/v1/states", "/tokenizer_info", "/health", "/ready")
JSON: dict[str, Any] = {"application/json": {}}
OF_ONE = {"/v1/states/{id}": {"get": JSON, "delete": JSON}, "/v1/states/{id}/content": {"get": FILE},
          "/v1/responses/{id}": {"get": JSON, "delete": JSON}, "/v1/responses/{id}/cancel": {"post": JSON},
          "/v1/responses/{id}/input_items": {"get": JSON}}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                   "code": {"type": ["string", "null"]}}}}}


@cache
def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    components: dict[str, Any] = {"Error": ERROR}
    for path, kind in BODIES.items():
        schema, more = schema_of(kind)
        components |= more
        body: dict[str, Any] = {"required": True, "content": {"application/json": {"schema": schema}}}
        content: dict[str, Any] = {"application/json": {}, **({"text/event-stream": {}} if path in STREAMED else {})}
        if kind is StateRequest:
            body["content"] |= FILE
        paths[path] = {"post": {"requestBody": body, "responses": {
            "200": {"description": "the answer", "content": content}, **_errors("400", "401", "404", "413", "429", "503")}}}
    for path in PLAIN:
        paths.setdefault(path, {})["get"] = _without_body(JSON, "401", "503")
    for path, methods in OF_ONE.items():
        place = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        paths[path] = {method: {"parameters": [place], **_without_body(content, "400", "401", "404", "503")}
                       for method, content in methods.items()}
    return {"openapi": "3.1.0", "info": {"title": "timemix", "version": "1"}, "paths": paths,
            "components": {"schemas": components}}


def _without_body(content: dict[str, Any], *statuses: str) -> dict[str, Any]:
    return {"responses": {"200": {"description": "the answer", "content": content}, **_errors(*statuses)}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": "an error", "content": content} for status in statuses}
