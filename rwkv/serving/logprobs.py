"""Selects the log-probabilities of the shown text.

The shown text is the generated text without tool calls, stop strings and white space before an answer.
"""

from collections import deque
from collections.abc import Sequence

from rwkv.generation.request import Entry
from rwkv.tokenizer.decoders import Decoder

REPLACEMENT_CHARACTER = "\ufffd"         # the replacement for a broken character in a token's text
Span = tuple[int, int]                   # start and end in the generated text, in characters


class ShownTokens:
    """Receives the log-probability entries of all generated tokens, and returns the entries of the shown tokens.

    The concatenated texts of the returned entries equal the shown text. Tokens that are parts of one character are shown or
    hidden together.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._parts: list[Entry] = []    # entries of tokens whose last character is incomplete
        self._groups: deque[tuple[list[Entry], str]] = deque()       # entries, and the text that their last token completes
        self._shown: list[Span] = []
        self._offset = 0                 # offset of the first group, in characters

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._parts.append(entry)
            if text := self._decoder.push(entry["token"]):
                self._groups.append((self._parts, text))
                self._parts = []

    def show(self, spans: Sequence[Span]) -> None:
        self._shown += spans

    def take(self, decided: int) -> list[Entry]:
        """Returns the entries of the shown tokens before the offset `decided`. Text after this offset is not yet decided."""
        result: list[Entry] = []
        while self._groups and self._offset + len(self._groups[0][1]) <= decided:
            entries, text = self._groups.popleft()
            shown = "".join(text[max(start - self._offset, 0):max(end - self._offset, 0)] for start, end in self._shown)
            result += _shown_entries(entries, text, shown)
            self._offset += len(text)
        self._shown = [span for span in self._shown if span[1] > self._offset]
        return result

    def take_rest(self) -> list[Entry]:
        text = self._decoder.flush()
        if self._parts:
            self._groups.append((self._parts, text))
        return self.take(self._offset + sum(len(text) for _, text in self._groups))


def _shown_entries(entries: list[Entry], text: str, shown: str) -> list[Entry]:
    """Returns the entries to show for a group of tokens if only `shown`, a part of the group's text, is shown.

    The last token's entry gets this part. Broken characters, which earlier tokens began and no token completed, keep their own
    entries.
    """
    if shown == text:
        return entries
    *earlier, last = entries
    broken = text.removesuffix(last["text"])     # the broken characters before the last token's text
    if (not broken or broken.strip(REPLACEMENT_CHARACTER) or REPLACEMENT_CHARACTER in last["text"]
            or not shown.startswith(broken)):
        earlier = []
        broken = ""
    rest = shown.removeprefix(broken)
    if not rest:
        return earlier
    return [*earlier, replace_text(last, rest)]


def replace_text(entry: Entry, text: str) -> Entry:
    """Returns a copy of the entry with a new text for the token, in the entry itself and in its list of likeliest tokens."""
    top = [{**token, "text": text} if token["token"] == entry["token"] else token for token in entry.get("top", ())]
    return {**entry, "text": text, "top": top}
