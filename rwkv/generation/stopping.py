"""When a text ends: a limit of tokens, stop tokens, and stop strings, which are found however the text is cut into pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from rwkv.config import strings, whole_number, whole_numbers
from rwkv.errors import UserError
from rwkv.io.pieces import begun_at_end


@dataclass(frozen=True)
class StoppingCriteria:
    """A text ends after max_new_tokens, before the first stop string or stop token, or at an end-of-text token.

    If a stop string begins with the name of a special token, that token is a stop token too: it has no text in which the string
    could be found. Raises UserError for a value out of range or of another type.
    """

    max_new_tokens: int = 200
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "stop_tokens", whole_numbers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop", strings("stop", self.stop))
        if "" in self.stop:
            raise UserError("stop holds an empty string, which would end every text at once: leave it out")


class StopStrings:
    """Finds stop strings in a text that comes in pieces. The result does not depend on how the text is cut.

    The stop string that is complete first ends the text; if two are complete at the same character, the longer one does.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""                  # the end of the text so far, with which a stop string may begin
        self.found: str | None = None    # the stop string that has ended the text
        self.rest = ""                   # that stop string, and the text that came after it

    def push(self, piece: str) -> str:
        """Appends `piece`; returns the text that can be shown now, without a stop string or the beginning of one."""
        assert self.found is None, "the text has ended"
        text = self._held + piece
        matches = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            self.rest = text[start:]
            return text[:start]
        shown = len(text) - begun_at_end(text, self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, at the end of a text that no stop string ended."""
        held = self._held
        self._held = ""
        return held
