"""Messages as OpenAI's clients send them, in the form that chat templates take."""

from typing import Any

from rwkv.serving.errors import ApiError

NO_TEXT = {"image_url": "an image", "input_audio": "audio", "file": "a file"}


def template_messages(messages: Any) -> Any:
    """The messages without OpenAI's other forms of a text and a call. What is no message is left to the template's check.

    An assistant's content may be null or missing, and may be a refusal. The role function and the field function_call are the
    deprecated names of tool and of tool_calls. Raises ApiError, with the part's place, for content that is no text.
    """
    if not isinstance(messages, list):
        return messages
    return [_message(message, f"messages[{i}]") if isinstance(message, dict) else message for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    found = dict(message)
    if found.get("role") == "function":
        found["role"] = "tool"
    if isinstance(found.get("content"), list):
        found["content"] = [_part(part, f"{where}.content[{i}]", found) for i, part in enumerate(found["content"])]
    if found.get("role") == "assistant":
        if found.get("content") is None:
            found["content"] = found.get("refusal") or ""
        call = found.pop("function_call", None)
        if call is not None and not found.get("tool_calls"):
            found["tool_calls"] = [{"type": "function", "function": call}]
    return found


def _part(part: Any, where: str, message: dict[str, Any]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal" and message.get("role") == "assistant":
        return {"type": "text", "text": part.get("refusal")}
    if isinstance(kind, str) and kind in NO_TEXT:
        raise ApiError(400, f"{where} is {NO_TEXT[kind]}, and this model reads text alone", where)
    return part
