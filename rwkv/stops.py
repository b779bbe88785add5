"""Stop strings: a text is shown up to the first one, and what may yet become one is held back until it is certain."""

from collections.abc import Sequence

from rwkv.config import strings


class StopStrings:
    """Text in pieces of any size in, text to show out: the same text however it is cut into pieces.

    The stop string that is complete first ends the text; of two that end together, the longer one. Raises ValueError for
    an empty stop string, and for what is not a list of strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = strings("stop", stops)
        if "" in self._stops:
            raise ValueError("stop holds an empty string, which would end every text at once: leave it out")
        self._held = ""
        self.found: str | None = None    # the stop string that ended the text

    def push(self, piece: str) -> str:
        """What can be shown now."""
        assert self.found is None, "the text has ended"
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        return next((n for n in range(min(longest, len(text)), 0, -1)
                     if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
