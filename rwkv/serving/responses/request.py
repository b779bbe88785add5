"""Translates a request for a response into a chat request, which continues from the state of the previous response.

The instructions and the tools begin a conversation. If they have changed, or if the previous response's state is gone, the
chat request has the items of all earlier responses, and the model reads them again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import ResponseSpec
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Generate, SavedState
from rwkv.serving.responses.items import input_items, messages_of
from rwkv.serving.responses.store import Responses, StoredResponse
from rwkv.serving.schema import CONTINUATION, NEUTRAL, ChatRequest, ResponseRequest, convert, require_off
from rwkv.serving.states.client_states import ClientStates

LOGPROBS = "message.output_text.logprobs"        # the value of the field include that requests log-probabilities
RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
           "response_format": "text.format"}     # fields of chat completions, with their names in the Responses API
# ChatRequest also has these fields. The chat request omits them, or gets other values
TRANSLATED = ("tools", "tool_choice", "stream_options", "store", "metadata", "save_state", "top_logprobs",
              *CONTINUATION)


@dataclass
class PreparedRequest:
    """A checked request, with the input items, and with the tools as the response repeats them."""

    body: ResponseRequest
    owner: str
    input: list[JsonObject]
    tools: list[JsonObject]


def prepare(body: ResponseRequest, owner: str, model: str, responses: Responses, states: ClientStates,
            template_tools: Callable[[ChatRequest], Any],
            chat: Callable[[ChatRequest], tuple[list[Generate], ResponseSpec]]
            ) -> tuple[list[Generate], ResponseSpec, PreparedRequest]:
    """Returns the sequences that answer a request, and how to present them. Raises ApiError with names of the Responses API.

    Args:
        model: the adapter's name; "" for the checkpoint's model.
        template_tools: returns a chat request's tools as the chat template expects them.
        chat: returns a chat request's sequences.
    """
    if body.background:
        raise ApiError(400, "background is not supported by this server. To read the answer while the model writes, send "
                            "stream=true", "background", "unsupported_parameter")
    require_off({name: getattr(body, name) for name in CONTINUATION}, NEUTRAL, "option")
    if body.previous_response_id is not None and body.state is not None:
        raise ApiError(400, "state conflicts with previous_response_id: send only one of the two", "state")
    # Vercel's AI SDK sends references in place of its earlier answers
    items = input_items(responses.resolve(body.input, owner) if isinstance(body.input, list) else body.input)
    prepared = PreparedRequest(body, owner, items, [msgspec.to_builtins(tool) for tool in body.tools or ()])
    try:
        request = _chat_request(prepared, prepared.input)
        if body.previous_response_id is not None:
            previous = responses.get(body.previous_response_id, owner, "previous_response_id")
            start = _state_to_continue(previous, prepared, model, states, template_tools(request))
            if start is None:
                request = _chat_request(prepared, [*_items_up_to(previous, owner, responses), *prepared.input])
            else:
                request = _chat_request(prepared, prepared.input, instructions=False)
                request.state = start.id
        if body.save_state or (body.store is not False and responses.has_room and states.has_room):
            request.save_state = True
        sequences, spec = chat(request)
    except ApiError as error:
        raise to_responses_error(error) from None
    except UserError as error:
        field = re.split(r"[^a-z_]", str(error))[0]
        raise to_responses_error(ApiError(400, str(error), field if field in ChatRequest.__struct_fields__ else None)) from None
    return sequences, spec, prepared


def _state_to_continue(previous: StoredResponse, prepared: PreparedRequest, model: str, states: ClientStates,
                       tools: Any) -> SavedState | None:
    """Returns the state to continue, or None if it is gone or if the instructions, the tools or the model have changed."""
    state = states.states.get(previous.state or "")
    same_instructions = previous.response.get("instructions") == prepared.body.instructions
    if (state is None or state.refusal is not None or state.model != model or not same_instructions
            or not states.can_continue(state, tools)):
        return None
    return state


def _items_up_to(last: StoredResponse, owner: str, responses: Responses) -> list[JsonObject]:
    """Returns the input and output items of a response and of all earlier responses in the conversation.

    Raises ApiError if an earlier response is gone, or if the chain of previous_response_id is a cycle, as in edited files.
    """
    chain = {last.response["id"]: last}
    while (earlier := last.response.get("previous_response_id")) is not None:
        if earlier in chain:
            raise ApiError(400, "previous_response_id leads to an endless loop: the stored responses refer back to "
                                f"{earlier}. Send the conversation's items as input", "previous_response_id")
        last = responses.get(earlier, owner, "previous_response_id")
        chain[earlier] = last
    return [item for each in reversed(chain.values()) for item in (*each.input, *input_items(each.response["output"]))]


def _chat_request(prepared: PreparedRequest, items: list[JsonObject], instructions: bool = True) -> ChatRequest:
    body = prepared.body
    system = [{"role": "system", "content": body.instructions}] if body.instructions and instructions else []
    messages = [*system, *messages_of(items)]
    if not messages:
        raise ApiError(400, "input must be a string, or a list with at least one item", "input")
    names = [name for name in body.__struct_fields__ if name in ChatRequest.__struct_fields__ and name not in TRANSLATED]
    fields = {name: msgspec.to_builtins(value) for name in names if (value := getattr(body, name)) is not None}
    logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    response_format = body.text.format if body.text else None
    if response_format == {"type": "text"}:
        response_format = None
    elif response_format and response_format.get("type") == "json_schema":     # nested in another object in chat completions
        schema = {name: value for name, value in response_format.items() if name != "type"}
        response_format = {"type": "json_schema", "json_schema": schema}
    tools = [{"type": tool.pop("type"), "function": tool} for tool in map(msgspec.to_builtins, body.tools or ())]
    translated = {"tools": tools or None, "tool_choice": _chat_tool_choice(body),
                  "max_completion_tokens": body.max_output_tokens, "logprobs": logprobs or None,
                  "top_logprobs": body.top_logprobs if logprobs else None,
                  "reasoning_effort": body.reasoning.effort if body.reasoning else None,
                  "response_format": response_format}
    translated = {name: value for name, value in translated.items() if value is not None}
    return convert({"messages": messages, **fields, **translated}, ChatRequest)


def _chat_tool_choice(body: ResponseRequest) -> Any:
    choice: Any = msgspec.to_builtins(body.tool_choice)
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def to_responses_error(error: ApiError) -> ApiError:
    """Returns the error with the Responses API's name for the field of a chat request."""
    content = error.body["error"]
    message = content["message"] or ""
    param = content["param"]
    field = re.split(r"[.[]", param)[0] if param else ""
    if field in RENAMED:
        param = RENAMED[field]
        message = re.sub(rf"^{field}\b", param, message)
    return ApiError(error.status, message, param, content["code"], error.retry_after)
