"""Errors with an HTTP status code and a message. The body has OpenAI's format, unless the client's API has its own format."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import msgspec
from starlette.responses import Response

from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
STATE_GONE = "state_not_found"           # the error code for an unknown, deleted, evicted or lost state
RETRY_AFTER = 1                          # seconds
SAMPLING_FIELDS = tuple(item.name for item in fields(Sampling))
# Fields whose content is checked after decoding, by functions that raise UserError
CHECKED_LATER = ("messages", "tools", "response_format", "format", "grammar", "structured_outputs", "guided_")
PLACE = re.compile(r"[a-z_]\w*(?:\[\d+\]|\.\w+)*")       # messages[1].content


class ApiError(Exception):
    """An error response.

    Args:
        param: the wrong field of the request.
        code: a name that programs can test.
        retry_after: seconds after which the client may try again.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = {"error": {"message": message, "type": TYPES.get(status, "invalid_request_error"), "param": param,
                               "code": code}}

    def response(self, form: Callable[["ApiError"], JsonObject] | None = None) -> Response:
        """Returns the error as an HTTP response. `form` makes the body; None stands for OpenAI's format."""
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status == 415:
            headers["accept-encoding"] = "gzip"
        return json_response(form(self) if form else self.body, self.status, headers)


def user_error(error: UserError) -> ApiError:
    """Returns an ApiError with status 400 for a user's mistake. If the message begins with a field, param is this field."""
    message = str(error)
    word = message.split(maxsplit=1)[0].rstrip(":,")
    is_field = word.startswith(CHECKED_LATER) or word in SAMPLING_FIELDS
    return ApiError(400, message, word if is_field else None)


@contextmanager
def rename_error_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Gives fields the client's names in errors from the `with` block, which handles a client's request in translated form.

    `rename` returns the client's name for a field.
    """
    try:
        yield
    except (ApiError, UserError) as error:
        raise rename_fields(error if isinstance(error, ApiError) else user_error(error), rename) from None


def rename_fields(error: ApiError, rename: Callable[[str], str]) -> ApiError:
    content = error.body["error"]
    message = str(error)
    if begins := PLACE.match(message):
        message = rename(begins[0]) + message[begins.end():]
    return ApiError(error.status, message, content["param"] and rename(content["param"]), content["code"], error.retry_after)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
