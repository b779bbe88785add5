"""Calls of tools in what a model writes, in the form of Hermes and Qwen models:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from collections.abc import Collection
from typing import Any
from uuid import uuid4

import msgspec

START, END = "<tool_call>", "</tool_call>"


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class CallParser:
    """Takes an answer in pieces, and finds the calls of these functions in it, however it is cut into pieces.

    A call is complete with its end, or where the answer ends. What is no JSON object, or calls another function, stays text.
    White space beside a call is no text. start: the beginning of an answer that the model was given. spans: where the text that
    push returned last stands in all that it was given, from the first character to after the last. decided: the number of
    characters of which it is known whether they are text; start is before them, at negative places.
    """

    def __init__(self, functions: Collection[str], start: str = "") -> None:
        self._functions = functions
        self._held = start               # the end of the answer so far, which may belong to a call
        self.decided = -len(start)
        self.spans: list[tuple[int, int]] = []
        self._after_call = False         # whether nothing but white space has come since a call
        self.found = 0                   # calls so far

    def push(self, piece: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text that can be shown now, and the calls that are complete, in OpenAI's form. last: the answer ends."""
        self._held += piece
        self.spans = []
        text, calls = "", []
        while START in self._held:
            before, _, rest = self._held.partition(START)
            body, end, _ = rest.partition(END)
            if not (end or last):
                break
            whole = before + START + body + end
            call = self._call(body)
            text += self._shown(whole if call is None else before.rstrip())
            self._drop(len(whole))
            if call is not None:
                calls.append(call)
                self._after_call = True
        certain = len(self._held) if last else _certain(self._held)
        text += self._shown(self._held[:certain])
        self._drop(certain)
        self.found += len(calls)
        return text, calls

    def _shown(self, text: str) -> str:
        """What is shown of `text`, with which what is held begins."""
        end = self.decided + len(text)
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self.spans.append((end - len(text), end))
        return text

    def _drop(self, length: int) -> None:
        self._held = self._held[length:]
        self.decided += length

    def _call(self, body: str) -> dict[str, Any] | None:
        try:
            call = msgspec.json.decode(body, type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return None
        arguments = bytes(call.arguments).decode()
        if call.name not in self._functions or not arguments.startswith("{"):
            return None
        return {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _certain(text: str) -> int:
    """The length of the beginning of `text` that belongs to no call: all but START or a part of it, and white space before."""
    place = text.find(START)
    if place < 0:
        part = next(length for length in range(len(START) - 1, -1, -1) if text.endswith(START[:length]))
        place = len(text) - part
    return len(text[:place].rstrip())
