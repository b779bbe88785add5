"""Checks and completes the input and output items of a response, and turns them into chat messages."""

import secrets
from collections.abc import Mapping
from typing import Any

from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.serving.http.errors import ApiError

TEXTS = ("input_text", "output_text", "text", "refusal")         # content types that are text
NO_TEXT = {"input_image": "an image", "input_file": "a file", "input_audio": "audio"}


def input_items(items: str | list[JsonObject] | None) -> list[JsonObject]:
    """Returns the items of a request in complete form. Raises ApiError, naming the wrong item.

    A complete item has an id, and a complete message has a list as its content.
    """
    if items is None:
        return []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_input_item(item, f"input[{i}]") for i, item in enumerate(items)]


def _input_item(item: JsonObject, where: str) -> JsonObject:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(400, f"{where}.role must be user, assistant, system or developer", where)
        return {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed",
                "content": _contents(item.get("content"), role, f"{where}.content")}
    if kind == "function_call":
        names = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        if not all(isinstance(value, str) for value in names.values()):
            raise ApiError(400, f'{where} must have the fields "call_id", "name" and "arguments", each a string', where)
        return {"id": _id(item, "fc"), "type": kind, "status": "completed", **names}
    if kind == "function_call_output":
        output = item.get("output")
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not isinstance(output, (str, list)):
            raise ApiError(400, f'{where} must have a string "call_id", and an "output" that is a string or a list of text '
                                'parts', where)
        if isinstance(output, list):
            output = _contents(output, "user", f"{where}.output")
        return {"id": _id(item, "fco"), "type": kind, "status": "completed", "call_id": call_id, "output": output}
    if kind == "reasoning":
        return {"id": _id(item, "rs"), "type": kind, "status": "completed",
                "summary": _thoughts(item, "summary", "summary_text", where),
                "content": _thoughts(item, "content", "reasoning_text", where)}
    raise ApiError(400, f"{where}.type must be message, function_call, function_call_output, reasoning or item_reference",
                   where, "unsupported_parameter")


def _id(item: JsonMapping, kind: str) -> str:
    item_id = item.get("id")
    return item_id if isinstance(item_id, str) and 0 < len(item_id) <= 64 else f"{kind}_{secrets.token_hex(16)}"


def _thoughts(item: JsonMapping, field: str, kind: str, where: str) -> list[JsonObject]:
    parts = item.get(field) or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, f'{where}.{field} must be a list of objects such as {{"type": "{kind}", "text": "..."}}', where)
    return [{"type": kind, "text": part["text"]} for part in parts]


def _contents(content: Any, role: str, where: str) -> list[JsonObject]:
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of text parts", where)
    contents = []
    for i, part in enumerate(content):
        type_name = part.get("type") if isinstance(part, dict) else None
        if isinstance(type_name, str) and type_name in NO_TEXT:
            raise ApiError(400, f"{where}[{i}] must be text; got {NO_TEXT[type_name]}", where)
        text = part.get("refusal" if type_name == "refusal" else "text") if isinstance(part, dict) else None
        if type_name not in TEXTS or not isinstance(text, str):
            raise ApiError(400, f'{where}[{i}] must be a text part such as {{"type": "{kind}", "text": "..."}}', where)
        contents.append({"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})})
    return contents


def messages_of(items: list[JsonObject]) -> list[JsonObject]:
    """Returns the items as chat messages. Consecutive thoughts, texts and calls become one assistant message.

    Two assistant messages without a call between them remain separate. Thoughts without text are replaced by their summary, as
    in vLLM; without a summary they are skipped. Other servers encrypt thoughts.
    """
    messages: list[JsonObject] = []
    answer: JsonObject | None = None         # the last message, if it is the assistant's and may get more items
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            answer = None
            continue
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _item_text(item)})
            answer = None
            continue
        thoughts = _item_text(item, "") if kind == "reasoning" else ""
        if kind == "reasoning" and not thoughts.strip():
            thoughts = _item_text(item, field="summary")
            if not thoughts.strip():
                continue
        if answer is None or _begins_answer(answer, kind):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if kind == "message":
            answer["content"] = "\n".join(filter(None, (answer["content"], _item_text(item))))
        elif kind == "reasoning":
            answer["reasoning_content"] = "\n".join(filter(None, (answer.get("reasoning_content"), thoughts)))
        else:
            call = {"id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]}}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    return messages


def _begins_answer(answer: JsonObject, kind: str) -> bool:
    """Returns True if an item of this kind begins a new assistant message: thoughts after text or calls, or text after text."""
    if kind == "reasoning":
        return bool(answer["content"] or answer.get("tool_calls"))
    return kind == "message" and bool(answer["content"]) and not answer.get("tool_calls")


def _item_text(item: JsonObject, separator: str = "\n", field: str = "content") -> str:
    return separator.join(part["text"] for part in item.get(field) or ())


def page_of_items(items: list[JsonObject], query: Mapping[str, str]) -> JsonObject:
    """Returns a page of the list of items. Raises ApiError for an invalid query.

    The last item comes first, unless the query has order=asc.
    """
    order = query.get("order", "desc")
    limit = query.get("limit", "20")
    after = query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise ApiError(400, "limit must be a whole number from 1 to 100", "limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ApiError(400, "after must be the id of an item in this list", "after")
        ordered = ordered[ids.index(after) + 1:]
    page = ordered[:int(limit)]
    return {"object": "list", "data": page, "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None, "has_more": len(ordered) > len(page)}
