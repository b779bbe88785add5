"""/openapi.json: the routes with bodies, and the schemas of these, derived from rwkv/serving/schema.py."""

from functools import cache
from typing import Any

from rwkv.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, schema_of

BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/tokenize": TokenizeRequest,
          "/detokenize": DetokenizeRequest}
PLAIN = ("/v1/models", "/tokenizer_info", "/health", "/ready")
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
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        content: dict[str, Any] = {"application/json": {}, **({"text/event-stream": {}} if path.startswith("/v1") else {})}
        paths[path] = {"post": {"requestBody": body, "responses": {
            "200": {"description": "the answer", "content": content}, **_errors("400", "401", "404", "413", "429", "503")}}}
    for path in PLAIN:
        paths[path] = {"get": {"responses": {"200": {"description": "the answer", "content": {"application/json": {}}},
                                             **_errors("401", "503")}}}
    return {"openapi": "3.1.0", "info": {"title": "timemix", "version": "1"}, "paths": paths,
            "components": {"schemas": components}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": "an error", "content": content} for status in statuses}
