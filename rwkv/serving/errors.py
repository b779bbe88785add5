"""Errors as OpenAI's interface has them: {"error": {"message", "type", "param", "code"}} and a status."""

from typing import Any

import msgspec
from starlette.responses import Response

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
STATE_GONE = "state_not_found"           # a code


class ApiError(Exception):
    """param: the field that is wrong. code: a word for programs. retry_after: seconds."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = {"error": {"message": message, "type": TYPES.get(status, "invalid_request_error"), "param": param,
                               "code": code}}

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status == 415:
            headers["accept-encoding"] = "gzip"
        return json_response(self.body, self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
