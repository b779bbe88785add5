"""Log-probabilities of the text that is shown: without white space before a chat's answer, calls of tools and stop strings."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from rwkv.tokenizer.decoders import Decoder

Entry = dict[str, Any]                   # of Sample.logprobs
UNKNOWN = "\ufffd"                       # in the text of a token that is no whole character
Span = tuple[int, int]                   # the places of characters in what the model wrote, from the first to after the last


class ShownTokens:
    """Takes the tokens that a model wrote, and where the text is that is shown; gives the tokens' entries, cut to that text.

    So the tokens add up to the text. Tokens that are parts of one character are kept or left out together.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._parts: list[Entry] = []    # tokens of which no character is complete yet
        self._groups: deque[tuple[list[Entry], str]] = deque()       # tokens, and the text that is complete with the last
        self._shown: list[Span] = []
        self._place = 0                  # of the first group

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._parts.append(entry)
            self._close_group(self._decoder.push(entry["token"]))

    def show(self, spans: Sequence[Span]) -> None:
        self._shown += spans

    def take(self, decided: int) -> list[Entry]:
        """The entries of tokens before the place `decided`: of the text before it, it is known what is shown."""
        found: list[Entry] = []
        while self._groups and self._place + len(self._groups[0][1]) <= decided:
            entries, text = self._groups.popleft()
            found += _cut(entries, text, self._shown_of(text))
            self._place += len(text)
        self._shown = [span for span in self._shown if span[1] > self._place]
        return found

    def take_rest(self) -> list[Entry]:
        """The other entries, at the end."""
        text = self._decoder.flush()
        if self._parts:
            self._groups.append((self._parts, text))
        return self.take(self._place + sum(len(text) for _, text in self._groups))

    def _close_group(self, text: str) -> None:
        if text:
            self._groups.append((self._parts, text))
            self._parts = []

    def _shown_of(self, text: str) -> str:
        return "".join(text[max(start - self._place, 0):max(end - self._place, 0)] for start, end in self._shown)


def _cut(entries: list[Entry], text: str, shown: str) -> list[Entry]:
    """The entries of a group's tokens, for what is shown of its text: the last one has it, earlier ones what they broke."""
    if shown == text:
        return entries
    *earlier, last = entries
    broken = text.removesuffix(last["text"])     # characters that earlier tokens began and the last one did not go on with
    if not broken or broken.strip(UNKNOWN) or UNKNOWN in last["text"] or not shown.startswith(broken):
        earlier = []
        broken = ""
    rest = shown.removeprefix(broken)
    if not rest:
        return earlier
    top = [{**other, "text": rest} if other["token"] == last["token"] else other for other in last.get("top", ())]
    return [*earlier, {**last, "text": rest, "top": top}]
