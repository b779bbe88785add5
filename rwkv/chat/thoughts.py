r"""Asks for thoughts before an answer, and separates the thoughts, <think> ... </think>, from the answer.

think= determines how a prompt ends. The three ways are BlinkDL's (RWKV7-G1x-templates.txt in BlinkDL/RWKV-LM, RWKV-v7):

    false   nothing             the model answers directly
    true    <think              without ">", because the model generates the token ">" or ">\n" itself
    fake    <think></think      empty thoughts: as fast as false, with better answers according to BlinkDL
"""

import re
from collections.abc import Sequence
from typing import Literal

from rwkv.chat.markers import partial_mark_length
from rwkv.chat.messages import Message
from rwkv.io.json_types import JsonObject

Think = bool | Literal["fake"]

START, END = "<think>", "</think>"
THOUGHT_STARTS: dict[Think, str] = {False: "", True: "<think", "fake": "<think></think"}
HINTS = {"low": " (think a bit)", "medium": " (think)", "high": " (think a lot)"}         # BlinkDL's, appended to a message
_AT_END = re.compile(r"<think>?(\s*</think>?)?\s*\Z")


def parse_think(option: str) -> Think:
    """Converts the option think=, which must be one of config.THINK."""
    return "fake" if option == "fake" else option == "true"


def thoughts_at_end(prompt: str) -> str:
    """Returns the beginning of thoughts, or the empty thoughts, at the end of a prompt, or "" if there are none."""
    match = _AT_END.search(prompt)
    return match[0] if match else ""


def thoughts_end(start: str) -> str:
    """Returns the text that completes the thoughts in `start`, which is a result of thoughts_at_end."""
    bracket = "" if start.rstrip().endswith(">") else ">"
    return f"{bracket}\n" if "</think" in start else f"{bracket}\n{END}\n"


def parser_arguments(answer: str, thinks: bool) -> tuple[str, bool]:
    """Returns the arguments `start` and `continues` of a ThoughtParser for the rest of an answer that begins with `answer`.

    The arguments are ("<think>", True) if `answer` ends inside thoughts. Directly after a mark that begins or ends thoughts,
    the arguments are (mark, False), and otherwise ("", True). `thinks` is as in ChatTemplate.
    """
    text = answer.lstrip()
    if not thinks or not text.startswith(THOUGHT_STARTS[True]):
        return "", True
    if thoughts_at_end(text) == text:
        return text, False
    if not text.startswith(START):       # a longer word, such as <thinking>
        return "", True
    _, mark, rest = text.partition(END)
    if not mark:
        return START, True
    return ("", True) if rest.strip() else (f"{START}{END}", False)


def with_hint(messages: Sequence[Message], effort: str | None) -> list[Message]:
    """Returns the messages with the hint for `effort` at the end of the last user message, unless there already is a hint."""
    result = list(messages)
    last = next((i for i in reversed(range(len(result))) if result[i]["role"] == "user"), None)
    if effort is None or last is None:
        return result
    text = result[last]["content"].rstrip()
    if not text.endswith(tuple(hint.strip() for hint in HINTS.values())):
        result[last] = {**result[last], "content": text + HINTS[effort]}
    return result


def answer_message(start: str, text: str) -> JsonObject:
    """Returns the assistant's message, with the thoughts in reasoning_content. `start` begins the thoughts in the prompt."""
    thoughts, content = ThoughtParser(start).push(text, last=True)
    return {"role": "assistant", **({"reasoning_content": thoughts} if thoughts else {}), "content": content.rstrip()}


class ThoughtParser:
    """Separates the thoughts from the text in a streamed answer. The result does not depend on how the answer is split.

    Thoughts begin with <think> at the beginning of the answer, and end with </think> or with the answer. White space around
    thoughts is dropped. Offsets count from the first character pushed.

    Args:
        start: the beginning of thoughts in the prompt, as thoughts_at_end() returns it.
        thinks: as in ChatTemplate. If False, the whole answer is text, without leading white space.
        continues: the pieces continue thoughts or text that have already begun (see parser_arguments()). Leading white space is
            kept.

    Attributes:
        thinking: True if the last piece ended inside thoughts.
        text_place: the offset at which the text after the thoughts begins, or else the number of characters pushed.
        decided: the offset up to which the answer has been separated into thoughts and text.
    """

    def __init__(self, start: str = "", thinks: bool = True, continues: bool = False) -> None:
        begins = start.startswith(THOUGHT_STARTS[True])
        ends = "</think" in start
        self.thinking = begins and not ends
        self._may_begin = thinks and not begins and not continues        # True while <think> may still begin the answer
        self._rest_of_mark = ">" if begins and not start.rstrip().endswith(">") else ""  # completes the mark in the prompt
        self._buffer = ""                # holds characters that may be thoughts or text
        self._has_content = continues    # True if the current part (thoughts or text) has more than white space
        self._pushed = 0
        self._text_place: int | None = 0 if continues and not self.thinking else None

    @property
    def text_place(self) -> int:
        return self._pushed if self._text_place is None else self._text_place

    @property
    def decided(self) -> int:
        return self._pushed - len(self._buffer) * (not self.thinking)

    def push(self, piece: str, last: bool = False) -> tuple[str, str]:
        """Appends a piece, and returns the thoughts and the text that can now be shown. With `last`, the answer ends here."""
        self._buffer += piece
        self._pushed += len(piece)
        if self._rest_of_mark and self._buffer:
            self._buffer = self._buffer.removeprefix(self._rest_of_mark)
            self._rest_of_mark = ""
        if self._may_begin and not self._decide_beginning(last):
            return "", ""
        thoughts = self._take_thoughts(last) if self.thinking else ""
        return thoughts, "" if self.thinking else self._take_text()

    def _decide_beginning(self, last: bool) -> bool:
        """Decides if the answer begins with thoughts. Returns False if more text is needed to decide."""
        beginning = self._buffer.lstrip()
        if beginning.startswith(START):
            self._buffer = beginning.removeprefix(START)
            self.thinking = True
        elif START.startswith(beginning) and not last:
            return False
        self._may_begin = False
        return True

    def _take_thoughts(self, last: bool) -> str:
        thoughts, mark, rest = self._buffer.partition(END)
        if mark:
            self.thinking = False
            self._buffer = rest
        else:
            certain = len(thoughts) if last else len(thoughts) - partial_mark_length(thoughts, (END,))
            self._buffer = thoughts[certain:]
            thoughts = thoughts[:certain]
        visible = thoughts.rstrip()
        if not (mark or last):           # the final white space may be inside the thoughts
            self._buffer = thoughts[len(visible):] + self._buffer
        if not self._has_content:
            visible = visible.lstrip()
        self._has_content = bool(visible) or self._has_content
        if mark:
            self._has_content = False
        return visible

    def _take_text(self) -> str:
        text = self._buffer if self._has_content else self._buffer.lstrip()
        self._buffer = ""
        if text and not self._has_content:
            self._has_content = True
            self._text_place = self._pushed - len(text)
        return text
