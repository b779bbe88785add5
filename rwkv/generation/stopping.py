"""Decides when a sequence ends: at a token limit, a stop token, or a stop string, which may be split across pieces of text."""

from collections.abc import Sequence
from dataclasses import dataclass

from rwkv.chat.markers import partial_mark_length
from rwkv.config import strings, whole_number, whole_numbers
from rwkv.errors import UserError


@dataclass(frozen=True)
class StoppingCriteria:
    """Defines when a sequence ends: after max_new_tokens tokens, before a stop string or stop token, or at end-of-text.

    A special token whose name begins a stop string is a stop token too. When generated, a special token has no text, so the
    stop string could not match. Raises UserError for a value that is out of range or of the wrong type.
    """

    max_new_tokens: int = 200
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "stop_tokens", whole_numbers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop", strings("stop", self.stop))
        if "" in self.stop:
            raise UserError("stop must not contain an empty string: an empty string would end every sequence immediately")

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError for a stop token outside the vocabulary, which would never end a sequence."""
        if (last := max(self.stop_tokens, default=0)) >= vocab_size:
            raise UserError(f"stop_tokens must contain only token ids from 0 to {vocab_size - 1}; got {last}")


class StopStrings:
    """Finds the first stop string in streamed text. The result does not depend on how the text is split into pieces.

    The first complete stop string ends the text. If two stop strings end at the same character, the longer one is used.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._pending = ""               # the end of the text so far, held back because a stop string may begin there
        self.matched: str | None = None  # the stop string that has ended the text
        self.rest = ""                   # the stop string in `matched`, and the text after it

    def push(self, piece: str) -> str:
        """Appends `piece`, and returns the text that can be shown now.

        The returned text has no stop string, and does not end with the beginning of a stop string.
        """
        assert self.matched is None, "the text has ended"
        text = self._pending + piece
        matches = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            _, start, self.matched = min(matches)
            self._pending = ""
            self.rest = text[start:]
            return text[:start]
        n_visible = len(text) - partial_mark_length(text, self._stops)
        self._pending = text[n_visible:]
        return text[:n_visible]

    def flush(self) -> str:
        """Returns the text that push() has held back. Call this at the end of a text that no stop string has ended."""
        pending = self._pending
        self._pending = ""
        return pending
