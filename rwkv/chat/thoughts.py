r"""Thoughts before an answer: <think> ... </think>, then the answer.

A prompt ends in one of three ways, by the models' author (RWKV7-G1x-templates.txt in BlinkDL/RWKV-LM, RWKV-v7):

    false   nothing             the model answers at once
    true    <think              without ">", because the model writes the token ">" or ">\n" itself
    fake    <think></think      an empty thought: as fast as none, and the author calls its results nice
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from rwkv.chat.messages import Message
from rwkv.io.pieces import begun_at_end

Think = bool | Literal["fake"]

START, END = "<think>", "</think>"
BEGUN: dict[Think, str] = {False: "", True: "<think", "fake": "<think></think"}
HINTS = {"low": " (think a bit)", "medium": " (think)", "high": " (think a lot)"}         # the author's, after a user's text
_AT_END = re.compile(r"<think>?(\s*</think>?)?\s*\Z")


def think_of(option: str) -> Think:
    """The value of the option think=, one of config.THINK."""
    return "fake" if option == "fake" else option == "true"


def begun_by(prompt: str) -> str:
    """The beginning of thoughts, or a whole empty thought, at the end of a prompt; "" where there is none."""
    found = _AT_END.search(prompt)
    return found[0] if found else ""


def end_of(start: str) -> str:
    """The text that ends the thoughts begun by `start`, as begun_by gives it."""
    bracket = "" if start.rstrip().endswith(">") else ">"
    return f"{bracket}\n" if "</think" in start else f"{bracket}\n{END}\n"


def with_hint(messages: Sequence[Message], effort: str | None) -> list[Message]:
    """The messages with the hint for `effort` after the user's last text, unless it ends with a hint. None adds nothing."""
    changed = list(messages)
    last = next((i for i in reversed(range(len(changed))) if changed[i]["role"] == "user"), None)
    if effort is None or last is None:
        return changed
    text = changed[last]["content"].rstrip()
    if not text.endswith(tuple(hint.strip() for hint in HINTS.values())):
        changed[last] = {**changed[last], "content": text + HINTS[effort]}
    return changed


def answer_message(start: str, written: str) -> dict[str, Any]:
    """The assistant's message with its thoughts in reasoning_content. start: the answer's beginning in the prompt."""
    thoughts, content = ThoughtParser(start).push(written, last=True)
    return {"role": "assistant", **({"reasoning_content": thoughts} if thoughts else {}), "content": content.rstrip()}


class ThoughtParser:
    """Takes an answer in pieces and separates its thoughts from the text after them. The cuts make no difference.

    Thoughts begin with <think> at the answer's beginning, and end with </think> or with the answer. White space around them is
    dropped. start: the beginning of the answer that stands in the prompt, as begun_by returns it. thinks: as in ChatTemplate;
    if it is False, the whole answer is text, without white space before it.

    Places count from the first character pushed. thinking: thoughts have begun and not ended. text_place: where the text after
    the thoughts begins; until it has begun, the number of characters pushed. decided: the place before which it is known what
    is thoughts and what is text.
    """

    def __init__(self, start: str = "", thinks: bool = True) -> None:
        begins = start.startswith(BEGUN[True])
        ends = "</think" in start
        self.thinking = begins and not ends
        self._looking = thinks and not begins       # for <think>, before anything else
        self._skips = ">" if begins and not start.rstrip().endswith(">") else ""        # the rest of the prompt's last mark
        self._held = ""                  # not yet known whether it is thoughts or text
        self._shows = False              # more than white space of the present part (thoughts or text) has come
        self._pushed = 0
        self._text_place: int | None = None

    @property
    def text_place(self) -> int:
        return self._pushed if self._text_place is None else self._text_place

    @property
    def decided(self) -> int:
        return self._pushed - len(self._held) * (not self.thinking)

    def push(self, piece: str, last: bool = False) -> tuple[str, str]:
        """The thoughts and the text that can be shown now. last: the answer ends."""
        self._held += piece
        self._pushed += len(piece)
        if self._skips and self._held:
            self._held = self._held.removeprefix(self._skips)
            self._skips = ""
        if self._looking and not self._found_beginning(last):
            return "", ""
        thoughts = self._take_thoughts(last) if self.thinking else ""
        return thoughts, "" if self.thinking else self._take_text()

    def _found_beginning(self, last: bool) -> bool:
        """Finds out whether the answer begins with thoughts. Returns False where that is not known yet."""
        seen = self._held.lstrip()
        if seen.startswith(START):
            self._held = seen.removeprefix(START)
            self.thinking = True
        elif START.startswith(seen) and not last:
            return False
        self._looking = False
        return True

    def _take_thoughts(self, last: bool) -> str:
        found, mark, rest = self._held.partition(END)
        if mark:
            self.thinking = False
            self._held = rest
        else:
            certain = len(found) if last else len(found) - begun_at_end(found, (END,))
            self._held = found[certain:]
            found = found[:certain]
        kept = found.rstrip()
        if not (mark or last):           # this white space may stand within the thoughts
            self._held = found[len(kept):] + self._held
        if not self._shows:
            kept = kept.lstrip()
        self._shows = bool(kept) or self._shows
        if mark:
            self._shows = False
        return kept

    def _take_text(self) -> str:
        text = self._held if self._shows else self._held.lstrip()
        self._held = ""
        if text and not self._shows:
            self._shows = True
            self._text_place = self._pushed - len(text)
        return text
