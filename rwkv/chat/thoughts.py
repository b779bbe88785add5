r"""Thoughts before an answer: <think> ... </think>, then the answer.

A prompt ends in one of three ways, by the models' author (RWKV7-G1x-templates.txt in BlinkDL/RWKV-LM, RWKV-v7):

    false   nothing             the model answers at once
    true    <think              without ">", because the model writes the token ">" or ">\n" itself
    fake    <think></think      an empty thought: as fast as none, with results that the author recommends
"""

import re
from collections.abc import Sequence
from typing import Literal

from rwkv.chat.marks import begun_at_end
from rwkv.chat.messages import Message
from rwkv.io.json_types import JsonObject

Think = bool | Literal["fake"]

START, END = "<think>", "</think>"
BEGUN: dict[Think, str] = {False: "", True: "<think", "fake": "<think></think"}
HINTS = {"low": " (think a bit)", "medium": " (think)", "high": " (think a lot)"}         # the author's, after a user's text
_AT_END = re.compile(r"<think>?(\s*</think>?)?\s*\Z")


def parse_think(option: str) -> Think:
    """The value of the option think=, one of config.THINK."""
    return "fake" if option == "fake" else option == "true"


def begun_by(prompt: str) -> str:
    """The beginning of thoughts, or a whole empty thought, at the end of a prompt; "" if there is none."""
    match = _AT_END.search(prompt)
    return match[0] if match else ""


def thoughts_end(start: str) -> str:
    """The text that ends the thoughts begun by `start`, which begun_by returned."""
    bracket = "" if start.rstrip().endswith(">") else ">"
    return f"{bracket}\n" if "</think" in start else f"{bracket}\n{END}\n"


def with_hint(messages: Sequence[Message], effort: str | None) -> list[Message]:
    """The messages with the hint for `effort`, if any, after the user's last text, unless that ends with a hint."""
    result = list(messages)
    last = next((i for i in reversed(range(len(result))) if result[i]["role"] == "user"), None)
    if effort is None or last is None:
        return result
    text = result[last]["content"].rstrip()
    if not text.endswith(tuple(hint.strip() for hint in HINTS.values())):
        result[last] = {**result[last], "content": text + HINTS[effort]}
    return result


def answer_message(start: str, text: str) -> JsonObject:
    """The assistant's message with its thoughts in reasoning_content. start: the answer's beginning in the prompt."""
    thoughts, content = ThoughtParser(start).push(text, last=True)
    return {"role": "assistant", **({"reasoning_content": thoughts} if thoughts else {}), "content": content.rstrip()}


class ThoughtParser:
    """Separates the thoughts from the text in an answer that comes in pieces, however it is cut.

    Thoughts begin with <think> at the answer's beginning, and end with </think> or with the answer. White space around them is
    dropped. start: the beginning of the answer that is in the prompt, from begun_by. thinks: as in ChatTemplate; if it is
    False, the whole answer is text, without white space before it.

    Offsets count from the first character pushed. thinking: inside thoughts. text_place: the offset of the text after the
    thoughts; before that text, the number of characters pushed. decided: the offset before which thoughts and text are told
    apart.
    """

    def __init__(self, start: str = "", thinks: bool = True) -> None:
        begins = start.startswith(BEGUN[True])
        ends = "</think" in start
        self.thinking = begins and not ends
        self._looking = thinks and not begins       # for <think>, before anything else
        self._skips = ">" if begins and not start.rstrip().endswith(">") else ""        # the rest of the prompt's last mark
        self._buffer = ""                # undecided: thoughts or text
        self._shows = False              # more than white space of the current part (thoughts or text) has come
        self._pushed = 0
        self._text_place: int | None = None

    @property
    def text_place(self) -> int:
        return self._pushed if self._text_place is None else self._text_place

    @property
    def decided(self) -> int:
        return self._pushed - len(self._buffer) * (not self.thinking)

    def push(self, piece: str, last: bool = False) -> tuple[str, str]:
        """The newly shown thoughts and text. last: the answer ends."""
        self._buffer += piece
        self._pushed += len(piece)
        if self._skips and self._buffer:
            self._buffer = self._buffer.removeprefix(self._skips)
            self._skips = ""
        if self._looking and not self._decide_beginning(last):
            return "", ""
        thoughts = self._take_thoughts(last) if self.thinking else ""
        return thoughts, "" if self.thinking else self._take_text()

    def _decide_beginning(self, last: bool) -> bool:
        """Decides whether the answer begins with thoughts. Returns False if that needs more text."""
        beginning = self._buffer.lstrip()
        if beginning.startswith(START):
            self._buffer = beginning.removeprefix(START)
            self.thinking = True
        elif START.startswith(beginning) and not last:
            return False
        self._looking = False
        return True

    def _take_thoughts(self, last: bool) -> str:
        thoughts, mark, rest = self._buffer.partition(END)
        if mark:
            self.thinking = False
            self._buffer = rest
        else:
            certain = len(thoughts) if last else len(thoughts) - begun_at_end(thoughts, (END,))
            self._buffer = thoughts[certain:]
            thoughts = thoughts[:certain]
        shown = thoughts.rstrip()
        if not (mark or last):           # this white space may be inside the thoughts
            self._buffer = thoughts[len(shown):] + self._buffer
        if not self._shows:
            shown = shown.lstrip()
        self._shows = bool(shown) or self._shows
        if mark:
            self._shows = False
        return shown

    def _take_text(self) -> str:
        text = self._buffer if self._shows else self._buffer.lstrip()
        self._buffer = ""
        if text and not self._shows:
            self._shows = True
            self._text_place = self._pushed - len(text)
        return text
