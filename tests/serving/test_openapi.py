"""Tests that the server's OpenAPI document has every address and the schemas of bodies, without a server."""

import msgspec

from rwkv.serving import api, openapi


def test_every_endpoint_is_described() -> None:
    document = msgspec.json.decode(msgspec.json.encode(openapi.document(api.ENDPOINTS)))
    assert {endpoint.path.replace(":path", "") for endpoint in api.ENDPOINTS} == set(document["paths"])
    for endpoint in api.ENDPOINTS:
        operation = document["paths"][endpoint.path.replace(":path", "")][endpoint.method.lower()]
        assert ("requestBody" in operation) == (endpoint.body is not None)
