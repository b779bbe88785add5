"""Calls of tools as text: shown() writes them for a model, in the built-in templates; CallParser finds those in an answer.

shown() writes the form of the G1 models, "Function call" in RWKV-v7/RWKV7-G1x-templates.txt of BlinkDL/RWKV-LM (July 2026): a
system prompt that ends with the tools, an answer that is a call, and its result as the user's turn:

    System: Tools:\\n[\\n{"name":"weather","description":"...","arguments":{"city":{"type":"string"}}}\\n]\\n
    Return only a JSON function call.

    Assistant: ```json\\n{"name":"weather","arguments":{"city":"Oslo"}}\\n```

    User: Function output:\\n{"sky":"rain"}

That file has one call in an answer. Several calls are written as a list, [{"name": ...}, ...], as in the data that these models
were trained with, Salesforce/xlam-function-calling-60k (BlinkDL in issue 308 of RWKV-LM). In that file a tool's description
does not say which arguments are required; shown() adds "required" where some arguments are optional.

CallParser finds these forms:
- the form above, with or without the fence or its end, and with **Tool Call:** before the fence (that file in April 2026);
- <tool_call> with JSON, as Hermes and Qwen models write it, with or without its end;
- <tool_calls> with a list of OpenAI's calls, {"type": "function", "function": {...}} (No-22-Github/RWKV-Agent,
  docs/evaluations/g1k-official-format-20261003/REPORT.md, section 4).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

from rwkv.errors import UserError
from rwkv.io.pieces import begun_at_end
from rwkv.io.utf8 import WrongCharacter, require_unicode

START, END = "<tool_call>", "</tool_call>"
FENCE = "```"
REQUEST = "Return only a JSON function call."
RESULT = "Function output:"
CALL_START = (f'{FENCE}json\n{{"name":"', '","arguments":')     # ChatTemplate.call_start for the form of shown()


def shown(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The messages with tools, calls and results written into their contents. messages: as check_messages returns them.

    The tools are written at the end of the system's message, which comes first and is added where it is missing. Raises
    UserError, with the place, for a tool that is not a function.
    """
    found = [_shown(message) for message in messages]
    if not tools:
        return found
    if not found or found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": ""})
    listed = ",\n".join(_json(_description(tool, f"tools[{i}]")) for i, tool in enumerate(tools))
    found[0]["content"] = f"{found[0]['content']}\nTools:\n[\n{listed}\n]\n{REQUEST}".lstrip()
    return found


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "role": "user", "content": f"{RESULT}\n{message['content']}"}
    if not message.get("tool_calls"):
        return {**message}
    functions = [call.get("function", call) for call in message["tool_calls"]]
    calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
    written = f"{FENCE}json\n{_json(calls if len(calls) > 1 else calls[0])}\n{FENCE}"
    return {**message, "content": f"{message['content']}\n{written}".lstrip()}


def _description(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = _without_nulls(tool.get("function", tool))
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} has no name: a tool is "
                        '{"type": "function", "function": {"name": "...", "parameters": {}}}')
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where}.function.parameters is a JSON schema, an object, and not a list or a text")
    found = {key: function[key] for key in ("name", "description") if key in function}
    if "properties" not in parameters and not isinstance(parameters.get("type"), str):
        return {**found, "arguments": parameters}        # descriptions by argument name, and no JSON schema
    arguments = parameters.get("properties", {})
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}.function.parameters.properties must be an object, with a schema for each argument")
    required = parameters.get("required", [])
    found["arguments"] = arguments
    if isinstance(required, list) and 0 < len(required) < len(arguments):
        found["required"] = required
    return {**found, "$defs": parameters["$defs"]} if "$defs" in parameters else found


def _without_nulls(value: Any) -> Any:
    """The value without null fields: the library `datasets` writes null for a field that only other rows have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    """JSON without spaces, as in the author's examples: every token of a system prompt counts."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def stop_of(call_start: str) -> str:
    """The text that stands after a call's JSON and ends the call. call_start: the beginning of the call in the prompt.

    With "" it is not the end of a fence, because an answer may have a fence of another language before its call.
    """
    return f"\n{FENCE}" if FENCE in call_start else END


HEADING = "**Tool Call:**"               # before a fence
OPENINGS = (START, "<tool_calls>", HEADING, FENCE)
OPENING = re.compile("|".join([*map(re.escape, OPENINGS), r"[{\[]"]))
OUTER = re.compile(rf"<tool_calls?>|{FENCE}")            # begins a call even where brackets are open
INFO = re.compile(r"[ \t]*([\w.+#-]*)(?=[^\w.+#-])\s*")          # a fence's whole language name, and the space after it
CALL_INFO = ("", "json", "tool_call", "tool_calls")      # languages of fences that may hold calls
# The beginning of a call or of a list of calls, cut anywhere. Groups: the first key; whether it is complete; the value so far.
BEGINNING = re.compile(r'\[?\s*(?:\{\s*(?:"(\w*)("\s*(?::\s*(.*))?)?)?)?\Z', re.DOTALL)
FIRST_KEYS = ("name", "arguments", "type", "function", "id")
LONGEST_BEGINNING = 200                  # characters that BEGINNING is matched with; a function's name has at most 64
JSON_LIKE = re.compile(r'\{\s*"|\[\s*["{\[]')          # not a bracket in prose
BRACKETS = re.compile(r'[{}\[\]"\\]')                   # the characters that decide where JSON ends
SPACE = re.compile(r"\s*")
NO_ARGUMENTS = {"name", "id", "type"}    # keys of a call that may have no arguments


class _Step(NamedTuple):
    """A decision about the first `total` characters of the held text: the first `text` are shown; `calls` are those in them."""

    text: int
    total: int
    calls: Sequence[dict[str, Any]] = ()


class CallParser:
    """Takes an answer in pieces and finds the calls of these functions in it. How the answer is cut makes no difference.

    A call is complete when its JSON is. JSON stays text if it is no object, calls another function, or stands in a fence of
    another language, in other JSON or in thoughts (<think>...</think> at the beginning). White space beside a call is dropped.

    start: the beginning of the answer that stands in the prompt. most: the number of calls after which nothing is shown.
    spans: (start, end) of each part of the text that push returned last; places count from the first character pushed. parts:
    what push returned last, in the order in which it was written: texts, each with its place, and calls.
    decided: the place before which it is known what is text and what is a call. The places of `start` are negative.
    """

    def __init__(self, functions: Collection[str], start: str = "", most: int | None = None) -> None:
        self._functions = tuple(functions)
        self._most = most
        self._held = start               # the end of the answer so far, which may belong to a call
        self._before = ""                # the character before it
        self._begun = bool(start)        # thoughts can no longer begin
        self._until = ""                 # the mark that ends a fence or thoughts; there are no calls before it
        self._closing = ""               # the text that may end the last call
        self._nesting: _Nesting | None = None            # inside JSON that may be a call
        self._other: _Nesting | None = None              # inside JSON that is no call
        self._after_call = False         # only white space has come since a call
        self.decided = -len(start)
        self.spans: list[tuple[int, int]] = []
        self.parts: list[tuple[str, int] | dict[str, Any]] = []
        self.found = 0                   # calls so far

    def push(self, piece: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text that can be shown now, and the calls that are now complete, in OpenAI's form. last: the answer ends."""
        self._held += piece
        self.spans = []
        self.parts = []
        text = ""
        calls: list[dict[str, Any]] = []
        while self._held and (step := self._next(last)) is not None:
            shown = self._shown(self._held[:step.text])
            if shown:
                self.parts.append((shown, self.spans[-1][0]))
                text += shown
            self._before = self._held[:step.total][-1:]
            self._held = self._held[step.total:]
            self.decided += step.total
            if step.calls:
                wanted = step.calls[:self._left()]
                calls += wanted
                self.parts += wanted
                self.found += len(wanted)
                self._after_call = True
        return text, calls

    @property
    def full(self) -> bool:
        """Whether `most` calls have been found."""
        return self._left() == 0

    def _left(self) -> int | None:
        return None if self._most is None else self._most - self.found

    def _shown(self, text: str) -> str:
        """The part of `text` that is shown. text: the beginning of the held text."""
        end = self.decided + len(text)
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self.spans.append((end - len(text), end))
        return text

    def _next(self, last: bool) -> _Step | None:
        """The next decision; None where it needs more text."""
        if self.full:
            return _Step(0, len(self._held))
        if not self._begun:
            beginning = self._held.lstrip()
            if not last and len(beginning) < len("<think") and "<think".startswith(beginning):
                return None
            self._begun = True
            self._until = "</think>" if beginning.startswith("<think") else ""
        if self._until:
            return self._pass(last)
        if self._other:
            return self._pass_json(self._other, last)
        if self._closing:
            return self._close(last)
        return self._open(last)

    def _pass(self, last: bool) -> _Step | None:
        """The text up to the end of a fence or of thoughts."""
        place = self._held.find(self._until)
        if place >= 0:
            place += len(self._until)
            self._until = ""
        elif last:
            place = len(self._held)
        else:
            place = len(self._held) - begun_at_end(self._held, (self._until,))
        return _text(place)

    def _pass_json(self, nesting: "_Nesting", last: bool) -> _Step | None:
        """The text up to the end of JSON that is no call, or up to an opening in it that begins a call (OUTER)."""
        outer = OUTER.search(self._held)
        limit = outer.start() if outer else len(self._held) if last else _certain(self._held)
        end = nesting.end(self._held, limit)
        if end is not None or outer or last:
            self._other = None
        else:
            nesting.place -= limit       # what is shown is no longer held
        return _text(limit if end is None else end) or (self._open(last) if outer else None)

    def _close(self, last: bool) -> _Step | None:
        """After a call's JSON: the end of the call, or another call before that end."""
        closing = self._closing
        rest = self._held.lstrip()
        if rest.startswith(closing):
            self._closing = ""
            return _Step(0, len(self._held) - len(rest) + len(closing))
        if closing.startswith(rest):
            return _Step(0, len(self._held)) if last else None
        step = None
        if rest[0] in "{[":
            step = self._open(last)
            if step is None or step.calls:
                return step
        self._closing = ""               # what follows the call is text
        if closing == FENCE:
            self._until = FENCE
            self._other = None
        return step or self._next(last)

    def _open(self, last: bool) -> _Step | None:
        """The text before the next place where a call may begin, or that call."""
        found = OPENING.search(self._held)
        if found is None:
            return _text(len(self._held) if last else _certain(self._held))
        if before := len(self._held[:found.start()].rstrip()):
            return _text(before)
        if found[0] in "{[":
            return self._value(found.start(), "", last, quoted=self._before == "`" and found.start() == 0)
        place = found.end() if found[0] == FENCE else _after_space(self._held, found.end())
        rest = self._held[place:]
        if found[0] == FENCE:
            return self._fence(place, last)
        if not last and (not rest or (found[0] == HEADING and FENCE.startswith(rest))):
            return None
        if found[0] == HEADING and rest.startswith(FENCE):
            return self._fence(place + len(FENCE), last)
        if found[0] != HEADING and rest[:1] in ("{", "["):
            return self._value(place, f"</{found[0][1:]}", last)
        return _text(found.end())

    def _fence(self, place: int, last: bool) -> _Step | None:
        """The content of the fence that ends before this place."""
        info = INFO.match(self._held, place)
        if info is None or info.end() == len(self._held):
            return _text(len(self._held)) if last else None
        if info[1].lower() in CALL_INFO and self._held[info.end()] in "{[":
            return self._value(info.end(), FENCE, last)
        self._until = FENCE
        return _text(place)

    def _value(self, place: int, closing: str, last: bool, quoted: bool = False) -> _Step | None:
        """The JSON at a place of the held text: calls, or text. quoted: it is text, whatever it says."""
        end = None
        if quoted and not last and _after_space(self._held, place + 1) == len(self._held):
            return None
        if not quoted and self._may_call(place):
            self._nesting = self._nesting or _Nesting(place)
            end = self._nesting.end(self._held, len(self._held))
            if end is None and not last:
                return None
            self._nesting = None
            if end is not None and (calls := self._calls(self._held[place:end])):
                self._closing = closing or self._closing
                return _Step(0, end, calls)
        self._nesting = None
        if closing == FENCE:
            self._until = FENCE
            return _text(end or place)
        if end is not None:
            return _text(end)
        if JSON_LIKE.match(self._held, place):
            self._other = _Nesting(place)
            self._other.end(self._held, place + 1)       # reads the bracket
            self._other.place = 0
        return _text(place + 1)

    def _may_call(self, place: int) -> bool:
        """Whether the JSON that begins at this place may still become a call or a list of calls."""
        found = BEGINNING.match(self._held[place:place + LONGEST_BEGINNING])
        if found is None:
            return False
        key, complete, value = found.groups(default="")
        if not complete:
            return any(first.startswith(key) for first in FIRST_KEYS)
        values = {"name": self._functions, "type": ("function",)}.get(key, ())
        wanted = [f'"{each}"' for each in values]
        return key in FIRST_KEYS and (not values or any(each.startswith(value) or value.startswith(each) for each in wanted))

    def _calls(self, written: str) -> list[dict[str, Any]] | None:
        """The calls in a JSON object or list; None where it holds anything but calls of these functions."""
        try:
            items = [item for _, item in _members(written)] if written.startswith("[") else [written]
            calls = [_call(item) for item in items]
        except (ValueError, LookupError, RecursionError):
            return None
        if any(name not in self._functions for name, _ in calls):
            return None
        return [{"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls]


class _Nesting:
    """Finds the end of the JSON object or list that begins at `place` of a text; the text may grow between two calls."""

    def __init__(self, place: int) -> None:
        self.place = place               # the text before it has been read
        self._depth = 0
        self._in_string = False

    def end(self, text: str, limit: int) -> int | None:
        """The place after the JSON; None where it goes on after `limit`."""
        while (found := BRACKETS.search(text, self.place, limit)) is not None:
            self.place = found.end()
            character = found[0]
            if character == "\\" and self._in_string:
                self.place += 1          # skips the escaped character, even if it has not come yet
            elif character == '"':
                self._in_string = not self._in_string
            elif character != "\\" and not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self.place
        self.place = max(self.place, limit)
        return None


def _text(length: int) -> _Step | None:
    return _Step(length, length) if length else None


def _certain(text: str) -> int:
    """The length of `text` without a part of an opening at its end, and without white space before that."""
    return len(text[:len(text) - begun_at_end(text, OPENINGS)].rstrip())


def _after_space(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found is not None
    return found.end()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)       # of NaN and Infinity


def _call(written: str) -> tuple[str, str]:
    """The name of a call and its arguments, an object as JSON. Raises ValueError or LookupError for anything else."""
    fields = dict(_members(written))
    if "function" in fields:
        fields = dict(_members(fields["function"]))
    if "arguments" not in fields and not fields.keys() <= NO_ARGUMENTS:
        raise LookupError("arguments")   # other JSON that has a name
    arguments = fields.get("arguments", "{}")
    if arguments.startswith('"'):        # JSON in a string, as in OpenAI's interface
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


def _members(written: str) -> list[tuple[str, str]]:
    """(key, value) for each member of a JSON object, ("", value) for each of a list. A value is returned as it is written.

    Raises ValueError or LookupError for anything else.
    """
    decoded = DECODER.decode(written)
    if not isinstance(decoded, (dict, list)):
        raise ValueError("no object and no list")
    found = []
    key = ""
    place = _after_space(written, _after_space(written, 0) + 1)
    while written[place] not in "}]":
        if isinstance(decoded, dict):
            key, place = DECODER.raw_decode(written, place)
            place = _after_space(written, _after_space(written, place) + 1)      # after the colon
        _, end = DECODER.raw_decode(written, place)
        found.append((key, written[place:end]))
        place = _after_space(written, end)
        if written[place] == ",":
            place = _after_space(written, place + 1)
    return found
