"""Converts tool calls to and from text.

write_tools() writes tools, calls and results into messages. CallParser finds the calls in an answer. The written format is
that of the G1 models, "Function call" in RWKV-v7/RWKV7-G1x-templates.txt of BlinkDL/RWKV-LM (July 2026). The system prompt ends
with the tools, a call is an answer, and the result of a call is a turn of the user:

    System: Tools:\\n[\\n{"name":"weather","description":"...","arguments":{"city":{"type":"string"}}}\\n]\\n
    Return only a JSON function call.

    Assistant: ```json\\n{"name":"weather","arguments":{"city":"Oslo"}}\\n```

    User: Function output:\\n{"sky":"rain"}

The templates file has at most one call per answer. Several calls are written as a list, [{"name": ...}, ...], as in these
models' training data, Salesforce/xlam-function-calling-60k (BlinkDL in issue 308 of RWKV-LM). The tool descriptions in the
templates file do not say which arguments are required. write_tools() adds "required" if some arguments are optional.

CallParser finds calls in these formats:
- the format above, also without the fence or its end, or with **Tool Call:** before the fence (as in April 2026);
- the format of Hermes and Qwen models: <tool_call>, JSON, and optionally </tool_call>;
- <tool_calls> with a list of OpenAI's calls, {"type": "function", "function": {...}} (No-22-Github/RWKV-Agent,
  docs/evaluations/g1k-official-format-20261003/REPORT.md, section 4).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

from rwkv.chat.markers import partial_mark_length
from rwkv.chat.messages import Message, Tool, Tools
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import WrongCharacter, require_unicode

START, END = "<tool_call>", "</tool_call>"
FENCE = "```"
REQUEST = "Return only a JSON function call."
RESULT = "Function output:"
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")          # keys of a JSON schema under which other schemas declare properties
CALL_START = (f'{FENCE}json\n{{"name":"', '","arguments":')     # ChatTemplate.call_start for the format of write_tools()


def write_tools(messages: Sequence[Message], tools: Tools = None) -> list[JsonObject]:
    """Returns the messages with the tools, calls and results written into the contents.

    `messages` must come from check_messages. The tools are appended to the system message, which is added if there is none.
    Raises UserError for a tool that is not a function.
    """
    result = [_write_calls(message) for message in messages]
    if not tools:
        return result
    if not result or result[0]["role"] != "system":
        result.insert(0, {"role": "system", "content": ""})
    descriptions = ",\n".join(_json(_description(tool, f"tools[{i}]")) for i, tool in enumerate(tools))
    result[0]["content"] = f"{result[0]['content']}\nTools:\n[\n{descriptions}\n]\n{REQUEST}".lstrip()
    return result


def _write_calls(message: Message) -> JsonObject:
    if message["role"] == "tool":
        return {**message, "role": "user", "content": f"{RESULT}\n{message['content']}"}
    if not message.get("tool_calls"):
        return {**message}
    functions = [call.get("function", call) for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    text = f"{FENCE}json\n{_json(calls if len(calls) > 1 else calls[0])}\n{FENCE}"
    return {**message, "content": f"{message['content']}\n{text}".lstrip()}


def _description(tool: Tool, where: str) -> JsonObject:
    function = _without_nulls(tool.get("function", tool))
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} must be a function with a name, such as "
                        '{"type": "function", "function": {"name": "...", "parameters": {}}}')
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where}.function.parameters must be a JSON schema object")
    result = {key: function[key] for key in ("name", "description") if key in function}
    if "properties" not in parameters and not isinstance(parameters.get("type"), str):
        return {**result, "arguments": parameters}       # not a JSON schema: the keys are argument names
    arguments = parameters.get("properties", {})
    if not arguments and any(key in parameters for key in COMBINING):
        return {**result, "arguments": parameters}       # the names of the arguments are deeper in the schema
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}.function.parameters.properties must be an object that maps each argument's name to its JSON "
                        "schema")
    required = parameters.get("required", [])
    result["arguments"] = arguments
    if isinstance(required, list) and 0 < len(required) < len(arguments):
        result["required"] = required
    return {**result, **{key: parameters[key] for key in ("$defs", "definitions") if key in parameters}}


def _without_nulls(value: Any) -> Any:
    """Returns the value without null fields. The library `datasets` writes null for fields that only other rows have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _json(value: object) -> str:
    """Returns JSON without spaces, as in BlinkDL's examples, to save tokens in the prompt."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def call_stop(call_start: str) -> str:
    """Returns the stop string that comes directly after the JSON of a call.

    `call_start` is the beginning of the call in the prompt. If `call_start` is "", the stop string is not the end of a fence,
    because another fence may precede the call.
    """
    return f"\n{FENCE}" if FENCE in call_start else END


HEADING = "**Tool Call:**"               # may come before a fence
OPENINGS = (START, "<tool_calls>", HEADING, FENCE)
OPENING = re.compile("|".join([*map(re.escape, OPENINGS), r"[{\[]"]))
OUTER = re.compile(rf"<tool_calls?>|{FENCE}")            # may begin a call even inside other JSON
INFO = re.compile(r"[ \t]*([\w.+#-]*)(?=[^\w.+#-])\s*")          # a fence's complete language name, and following space
CALL_INFO = ("", "json", "tool_call", "tool_calls")      # languages of fences that may hold calls
# Matches any beginning of a call or a list of calls. The groups are the first key, the text after this key if the key is
# complete, and the key's value so far.
BEGINNING = re.compile(r'\[?\s*(?:\{\s*(?:"(\w*)("\s*(?::\s*(.*))?)?)?)?\Z', re.DOTALL)
FIRST_KEYS = ("name", "arguments", "type", "function", "id")
LONGEST_BEGINNING = 200                  # BEGINNING is matched against at most this many characters; a name has at most 128
JSON_LIKE = re.compile(r'\{\s*"|\[\s*["{\[]')          # matches JSON, but not a bracket in prose
BRACKETS = re.compile(r'[{}\[\]"\\]')                   # the characters that determine where JSON ends
SPACE = re.compile(r"\s*")
NO_ARGUMENTS = {"name", "id", "type"}    # JSON with only these keys is a call without arguments


class _Step(NamedTuple):
    """A decision about the buffer's first `total` characters. The first `text` characters are shown, and the others are not.

    `calls` are the calls found in these characters.
    """

    text: int
    total: int
    calls: Sequence[JsonObject] = ()


class CallParser:
    """Separates calls of the given functions from the text in a streamed answer.

    The result does not depend on how the answer is split into pieces. A call is complete when the JSON is complete. JSON
    remains text if it is not an object or if it calls an unknown function. JSON also remains text inside a fence of another
    language, inside other JSON, and inside thoughts (<think>...</think> at the beginning of the answer). White space next to a
    call is dropped. Offsets count from the first character pushed, so offsets within `start` are negative.

    Args:
        start: the beginning of the answer, if the prompt ends with it.
        most: the number of calls after which the rest of the answer is dropped.

    Attributes:
        parts: the calls, and the texts with their offsets, that the last push() returned, in order.
        spans: the start and end offsets of each text that the last push() returned.
        decided: the offset up to which the answer has been separated into text and calls.
    """

    def __init__(self, functions: Collection[str], start: str = "", most: int | None = None) -> None:
        self._functions = tuple(functions)
        self._most = most
        self._buffer = start             # holds the end of the answer so far, which may be part of a call
        self._before = ""                # the character that precedes the buffer
        self._has_begun = bool(start)    # True when the answer has begun, so that thoughts can no longer begin
        self._end_mark = ""              # the mark that ends the current fence or the thoughts
        self._closing = ""               # the text that may end the last call
        self._nesting: _Nesting | None = None            # is set inside JSON that may be a call
        self._other_json: _Nesting | None = None         # is set inside JSON that is not a call
        self._after_call = False         # True while only white space has followed the last call
        self.decided = -len(start)
        self.spans: list[tuple[int, int]] = []
        self.parts: list[tuple[str, int] | JsonObject] = []
        self.n_calls = 0                 # counts the calls found so far

    def push(self, piece: str, last: bool = False) -> tuple[str, list[JsonObject]]:
        """Appends a piece, and returns the text that can now be shown and the completed calls, in OpenAI's format.

        `last` says that the answer ends with this piece.
        """
        self._buffer += piece
        self.spans = []
        self.parts = []
        text = ""
        calls: list[JsonObject] = []
        while self._buffer and (step := self._next_step(last)) is not None:
            visible = self._take_visible(self._buffer[:step.text])
            if visible:
                self.parts.append((visible, self.spans[-1][0]))
                text += visible
            self._before = self._buffer[:step.total][-1:]
            self._buffer = self._buffer[step.total:]
            self.decided += step.total
            if step.calls:
                new = step.calls[:self._calls_left()]
                calls += new
                self.parts += new
                self.n_calls += len(new)
                self._after_call = True
        return text, calls

    @property
    def full(self) -> bool:
        """Returns True if `most` calls have been found."""
        return self._calls_left() == 0

    def _calls_left(self) -> int | None:
        return None if self._most is None else self._most - self.n_calls

    def _take_visible(self, text: str) -> str:
        """Removes white space after a call from `text`, the beginning of the buffer. Appends the result's span to `spans`."""
        end = self.decided + len(text)
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self.spans.append((end - len(text), end))
        return text

    def _next_step(self, last: bool) -> _Step | None:
        """Returns the next decision, or None if more text is needed to decide."""
        if self.full:
            return _Step(0, len(self._buffer))
        if not self._has_begun:
            beginning = self._buffer.lstrip()
            if not last and len(beginning) < len("<think") and "<think".startswith(beginning):
                return None
            self._has_begun = True
            self._end_mark = "</think>" if beginning.startswith("<think") else ""
        if self._end_mark:
            return self._show_until_mark(last)
        if self._other_json:
            return self._show_json(self._other_json, last)
        if self._closing:
            return self._close_call(last)
        return self._find_opening(last)

    def _show_until_mark(self, last: bool) -> _Step | None:
        place = self._buffer.find(self._end_mark)
        if place >= 0:
            place += len(self._end_mark)
            self._end_mark = ""
        elif last:
            place = len(self._buffer)
        else:
            place = len(self._buffer) - partial_mark_length(self._buffer, (self._end_mark,))
        return _text_step(place)

    def _show_json(self, nesting: "_Nesting", last: bool) -> _Step | None:
        """Shows text up to the end of JSON that is not a call, or up to a mark in the JSON that may begin a call (OUTER)."""
        outer = OUTER.search(self._buffer)
        limit = outer.start() if outer else len(self._buffer) if last else _certain_length(self._buffer)
        end = nesting.end(self._buffer, limit)
        if end is not None or outer or last:
            self._other_json = None
        else:
            nesting.place -= limit       # keeps the offset valid, because the shown text is removed from the buffer
        return _text_step(limit if end is None else end) or (self._find_opening(last) if outer else None)

    def _close_call(self, last: bool) -> _Step | None:
        """Handles the text after a call's JSON: the mark that ends the call, or another call before this mark."""
        closing = self._closing
        rest = self._buffer.lstrip()
        if rest.startswith(closing):
            self._closing = ""
            return _Step(0, len(self._buffer) - len(rest) + len(closing))
        if closing.startswith(rest):
            return _Step(0, len(self._buffer)) if last else None
        step = None
        if rest[0] in "{[":
            step = self._find_opening(last)
            if step is None or step.calls:
                return step
        self._closing = ""               # text follows instead of the end mark
        if closing == FENCE:
            self._end_mark = FENCE
            self._other_json = None
        return step or self._next_step(last)

    def _find_opening(self, last: bool) -> _Step | None:
        """Shows the text before the next position where a call may begin. At this position, handles the call."""
        opening = OPENING.search(self._buffer)
        if opening is None:
            return _text_step(len(self._buffer) if last else _certain_length(self._buffer))
        if before := len(self._buffer[:opening.start()].rstrip()):
            return _text_step(before)
        if opening[0] in "{[":
            return self._handle_json(opening.start(), "", last, quoted=self._before == "`" and opening.start() == 0)
        place = opening.end() if opening[0] == FENCE else _after_space(self._buffer, opening.end())
        rest = self._buffer[place:]
        if opening[0] == FENCE:
            return self._open_fence(place, last)
        if not last and (not rest or (opening[0] == HEADING and FENCE.startswith(rest))):
            return None
        if opening[0] == HEADING and rest.startswith(FENCE):
            return self._open_fence(place + len(FENCE), last)
        if opening[0] != HEADING and rest[:1] in ("{", "["):
            return self._handle_json(place, f"</{opening[0][1:]}", last)
        return _text_step(opening.end())

    def _open_fence(self, place: int, last: bool) -> _Step | None:
        info = INFO.match(self._buffer, place)
        if info is None or info.end() == len(self._buffer):
            return _text_step(len(self._buffer)) if last else None
        if info[1].lower() in CALL_INFO and self._buffer[info.end()] in "{[":
            return self._handle_json(info.end(), FENCE, last)
        self._end_mark = FENCE
        return _text_step(place)

    def _handle_json(self, place: int, closing: str, last: bool, quoted: bool = False) -> _Step | None:
        """Handles the JSON at a place in the buffer, which is either calls or text. With `quoted`, the JSON is always text."""
        end = None
        if quoted and not last and _after_space(self._buffer, place + 1) == len(self._buffer):
            return None
        if not quoted and self._may_call(place):
            self._nesting = self._nesting or _Nesting(place)
            end = self._nesting.end(self._buffer, len(self._buffer))
            if end is None and not last:
                return None
            self._nesting = None
            if end is not None and (calls := self._calls(self._buffer[place:end])):
                self._closing = closing or self._closing
                return _Step(0, end, calls)
        self._nesting = None
        if closing == FENCE:
            self._end_mark = FENCE
            return _text_step(end or place)
        if end is not None:
            return _text_step(end)
        if JSON_LIKE.match(self._buffer, place):
            self._other_json = _Nesting(place)
            self._other_json.end(self._buffer, place + 1)                # counts the opening bracket
            self._other_json.place = 0
        return _text_step(place + 1)

    def _may_call(self, place: int) -> bool:
        """Returns True if the JSON that begins at this place may still become a call or a list of calls."""
        match = BEGINNING.match(self._buffer[place:place + LONGEST_BEGINNING])
        if match is None:
            return False
        key, complete, value = match.groups(default="")
        if not complete:
            return any(first.startswith(key) for first in FIRST_KEYS)
        values = {"name": self._functions, "type": ("function",)}.get(key, ())
        allowed = [f'"{name}"' for name in values]
        return key in FIRST_KEYS and (not values or any(name.startswith(value) or value.startswith(name) for name in allowed))

    def _calls(self, text: str) -> list[JsonObject] | None:
        """Returns the calls in a JSON object or list, or None if the JSON contains anything but calls of known functions."""
        try:
            items = [item for _, item in _members(text)] if text.startswith("[") else [text]
            calls = [_call(item) for item in items]
        except (ValueError, LookupError, RecursionError):
            return None
        if any(name not in self._functions for name, _ in calls):
            return None
        return [{"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls]


class _Nesting:
    """Finds the end of the JSON object or list that begins at `place`, in a text that grows between the calls of end()."""

    def __init__(self, place: int) -> None:
        self.place = place               # offset up to which the text has been read
        self._depth = 0
        self._in_string = False

    def end(self, text: str, limit: int) -> int | None:
        """Returns the offset after the JSON, or None if the JSON continues beyond `limit`."""
        while (match := BRACKETS.search(text, self.place, limit)) is not None:
            self.place = match.end()
            character = match[0]
            if character == "\\" and self._in_string:
                self.place += 1          # skips the escaped character, even if it has not arrived yet
            elif character == '"':
                self._in_string = not self._in_string
            elif character != "\\" and not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self.place
        self.place = max(self.place, limit)
        return None


def _text_step(length: int) -> _Step | None:
    return _Step(length, length) if length else None


def _certain_length(text: str) -> int:
    """Returns the length of `text` without a partial opening mark at the end, and without white space before this mark."""
    return len(text[:len(text) - partial_mark_length(text, OPENINGS)].rstrip())


def _after_space(text: str, place: int) -> int:
    space = SPACE.match(text, place)
    assert space is not None
    return space.end()


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)      # rejects NaN and Infinity, which are not JSON


def _call(text: str) -> tuple[str, str]:
    """Returns the name of a call, and the arguments as the JSON of an object.

    Raises ValueError or LookupError if `text` is not a call.
    """
    fields = dict(_members(text))
    if "function" in fields:
        fields = dict(_members(fields["function"]))
    if "arguments" not in fields and not fields.keys() <= NO_ARGUMENTS:
        raise LookupError("arguments")   # other JSON may have a name, too
    arguments = fields.get("arguments", "{}")
    if arguments.startswith('"'):        # OpenAI's API has JSON inside a string
        arguments = json.loads(arguments).strip()
    if arguments in ("null", ""):
        arguments = "{}"
    value = DECODER.decode(arguments)
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    try:
        require_unicode(arguments)
    except WrongCharacter:
        arguments = json.dumps(value)
    return json.loads(fields["name"]), arguments


def _members(text: str) -> list[tuple[str, str]]:
    """Returns (key, value) for each member of a JSON object, or ("", value) for each item of a list.

    Each value is the unchanged JSON text. Raises ValueError or LookupError if `text` is neither an object nor a list.
    """
    decoded = DECODER.decode(text)
    if not isinstance(decoded, (dict, list)):
        raise ValueError("neither an object nor a list")
    members = []
    key = ""
    place = _after_space(text, _after_space(text, 0) + 1)
    while text[place] not in "}]":
        if isinstance(decoded, dict):
            key, place = DECODER.raw_decode(text, place)
            place = _after_space(text, _after_space(text, place) + 1)    # skips the colon
        _, end = DECODER.raw_decode(text, place)
        members.append((key, text[place:end]))
        place = _after_space(text, end)
        if text[place] == ",":
            place = _after_space(text, place + 1)
    return members
