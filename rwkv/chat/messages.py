"""Checks messages in OpenAI's format, and determines which messages a model learns.

A conversation is a list of messages, {"role": "user", "content": "..."}. The roles are system, user, assistant and tool.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.io.utf8 import without_surrogates

ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
OTHER_ROLES = {"developer": "system", "function": "tool"}        # OpenAI's newer and older names
TEXTS = ("text", "input_text", "output_text")              # the last two are the names in OpenAI's Responses API
NO_TEXT = {"image_url": "an image", "input_audio": "audio", "file": "a file"}          # types of content parts in OpenAI's API
EMPTY: tuple[object, ...] = (None, "", [], {})            # a field with one of these values is treated as missing
LEARNT = ("weight", "loss", "train", "training", "trainable", "masked")  # fields that say whether an answer is learnt

Message = JsonMapping
Tool = JsonMapping                       # {"type": "function", "function": {"name": ..., "parameters": ...}}
Tools = Sequence[Tool] | None


def check_messages(messages: object) -> list[JsonObject]:
    """Checks the messages, and returns them in a uniform format, in which every content is a string.

    Raises UserError, which names the wrong field, such as messages[1].content. The content may be a list of {"type": "text",
    "text": "..."}, as in OpenAI's API. These texts are joined with newlines, as in llama.cpp and vLLM. If an answer has
    no content, the refusal or "" is used. Null and empty fields are dropped, because templates test whether a field is defined.
    Other names are accepted: OpenAI's roles developer for system and function for tool, function_call for tool_calls, and
    reasoning, the name of reasoning_content in vLLM and OpenRouter.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError("messages must be a list of at least one message, such as {\"role\": \"user\", \"content\": \"...\"}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def is_learnt(message: Message, where: str) -> bool:
    """Returns True if a model learns this message, which is an answer that no field excludes from learning.

    The excluding fields are "weight": 0 in OpenAI's and Mistral's format, "loss": false in that of ms-swift and XTuner, "train"
    or "training": false in axolotl's, and "masked": true in torchtune's. Raises UserError, which names the field, for a weight
    other than 0 and 1, and for a field that selects parts of an answer.
    """
    answer = message["role"] == "assistant"
    learnt = answer
    for field in LEARNT:
        value = message.get(field)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise UserError(f"{where}.{field} must be 0 or 1 (false or true); got {_excerpt(value)}")
        if not answer and value == 1 and field in ("train", "training", "trainable"):
            raise UserError(f"{where}.{field} requires the role assistant; got {message['role']}")
        learnt = learnt and bool(value) != (field == "masked")
    for field in ("train_detail", "training_detail"):
        if message.get(field):
            raise UserError(f"{where}.{field} is not supported, because a model always learns whole answers. Remove this field")
    return learnt


def _check_message(message: object, where: str) -> JsonObject:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} must be an object with \"role\" and \"content\"; got {_excerpt(message)}")
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}.role must be one of {', '.join(ROLES)}; got {_excerpt(role)}")
    fields = {field: value for field, value in message.items() if value not in EMPTY}
    for field in ("tool_calls", "function_call", "reasoning_content"):
        if field in fields and role != "assistant":
            raise UserError(f"{where}.{field} requires the role assistant; got {role}")
    for field in ("reasoning_content", "reasoning"):
        if role == "assistant" and field in fields:
            if not isinstance(fields[field], str):
                raise UserError(f"{where}.{field} must be a string; got {_excerpt(fields[field])}")
            fields.setdefault("reasoning_content", fields[field])
    call = fields.pop("function_call", None)
    if call is not None and "tool_calls" not in fields:
        fields["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in fields:
        calls = fields["tool_calls"]
        if not isinstance(calls, list):
            raise UserError(f"{where}.tool_calls must be a list; got {_excerpt(calls)}")
        fields["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {**fields, "role": role, "content": _content(message.get("content"), fields.get("refusal"), role, where)}


def _tool_call(call: Any, where: str) -> JsonObject:
    """Returns the tool call with its arguments as an object, because templates expect one. OpenAI's API has a JSON string."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f'{where} must be a tool call, such as {{"type": "function", "function": {{"name": "...", '
                        f'"arguments": "{{}}"}}}}; got {_excerpt(call)}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise UserError(f"{where}.function.arguments must be a JSON object; got {_excerpt(arguments)}")
    checked = {**function, "arguments": without_surrogates(arguments or {})}
    return {**call, "function": checked} if "function" in call else checked


def _read_arguments(text: str) -> JsonMapping | None:
    """Parses the arguments that a model wrote.

    Text that is not a JSON object becomes the argument "arguments", so that the chat can continue.
    """
    with suppress(ValueError, RecursionError):
        arguments = json.loads(text or "{}")
        if arguments is None or isinstance(arguments, Mapping):
            return arguments
    return {"arguments": text}


def _content(content: object, refusal: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return refusal if isinstance(refusal, str) else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}.content must be a string or a list of text parts; got {_excerpt(content)}")
    return "\n".join(_text(item, role, f"{where}.content[{i}]") for i, item in enumerate(content))


def _text(item: Any, role: str, where: str) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if isinstance(kind, str) and kind in NO_TEXT:
        raise UserError(f"{where} must be text; got {NO_TEXT[kind]}")
    field = "refusal" if kind == "refusal" and role == "assistant" else "text" if kind in TEXTS else None
    if field is None or not isinstance(item.get(field), str):
        raise UserError(f'{where} must be a text part, such as {{"type": "text", "text": "..."}}; got {_excerpt(item)}')
    text: str = item[field]
    return text


def _excerpt(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)[:60]
