"""Stopping criteria: a token limit, stop tokens, and stop strings, which match across pieces of text."""

from collections.abc import Sequence
from dataclasses import dataclass

from rwkv.chat.markers import begun_at_end
from rwkv.config import strings, whole_number, whole_numbers
from rwkv.errors import UserError


@dataclass(frozen=True)
class StoppingCriteria:
    """When a sequence ends: after max_new_tokens tokens, before a stop string or stop token, or at an end-of-text token.

    If a stop string begins with the name of a special token, that token is a stop token too: as a generated token it has no
    text, so the string could not match. Raises UserError for a value that is out of range or of the wrong type.
    """

    max_new_tokens: int = 200
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "stop_tokens", whole_numbers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop", strings("stop", self.stop))
        if "" in self.stop:
            raise UserError("stop must hold no empty string, which would end every sequence immediately")


class StopStrings:
    """Matches stop strings in streamed text; the result does not depend on how the text is split.

    The first complete stop string ends the text; of two that end at the same character, the longer one does.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._pending = ""               # the end of the text so far, held back because a stop string may begin there
        self.matched: str | None = None  # the stop string that has ended the text
        self.rest = ""                   # the stop string in `matched`, and the text after it

    def push(self, piece: str) -> str:
        """Appends `piece`; returns the text that can be shown now, without a stop string or the beginning of one."""
        assert self.matched is None, "the text has ended"
        text = self._pending + piece
        matches = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            _, start, self.matched = min(matches)
            self._pending = ""
            self.rest = text[start:]
            return text[:start]
        shown = len(text) - begun_at_end(text, self._stops)
        self._pending = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back. To be called at the end of a text that no stop string has ended."""
        pending = self._pending
        self._pending = ""
        return pending
