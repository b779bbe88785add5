"""Splits a long text so that encoding its pieces separately gives the same ids as encoding the whole text.

A text is split before a newline that follows a character other than white space. The split is safe if no token spans the two
characters, if no token strips adjacent spaces, and if a newline at the beginning of a text is encoded as elsewhere. These
conditions are checked for each vocabulary. If a condition fails, or LONGEST characters have no such newline, the text is split
after LONGEST characters, and a few ids at the split may differ from those of the whole text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

LONGEST = 1 << 22                        # maximum characters in a piece
LONGEST_RUN = 1024                       # maximum characters in a word when a tokenizer is trained
LONG_SPACE = re.compile(rf"\s{{{LONGEST_RUN}}}")
LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}")
PROBES = ("a\nb", "1\n1", "Z\n\n  x", "a\n a", "y\n\ty")         # test texts, encoded whole and split after the first character
SafeSplit = Callable[[str], int]         # returns the last index at which a text can be split safely; 0 if none


class Encoder(Protocol):
    """The methods of a tokenizer that safe_split uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def strips_spaces(self) -> bool: ...

    def encode(self, text: str) -> Any: ...

    def decoder(self) -> Any: ...


def safe_split(tokenizer: Encoder) -> SafeSplit:
    """Returns a function that finds the last index at which a text can be split safely for this tokenizer."""
    if tokenizer.strips_spaces or not all(_splits_safely(tokenizer, probe) for probe in PROBES):
        return lambda text: 0
    glued = _characters_before_newlines(tokenizer)
    return lambda text: last_line_end(text, glued)


def last_line_end(text: str, glued: frozenset[str] = frozenset()) -> int:
    """Returns the index of the last newline that follows neither white space nor a character in `glued`, or 0."""
    end = text.rfind("\n")
    while end > 0 and (text[end - 1].isspace() or text[end - 1] in glued):
        end = text.rfind("\n", 0, end)
    return max(end, 0)


def pieces(chunks: Iterable[str], split: SafeSplit) -> Iterator[str]:
    """Divides a text that comes in chunks into pieces that end where `split` allows. A piece is about as long as a chunk."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        end = split(rest) or (len(rest) if len(rest) >= LONGEST else 0)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def without_long_runs(text: str) -> Iterator[str]:
    """Cuts a text so that neither words nor runs of white space are longer than LONGEST_RUN characters.

    Training BPE takes time quadratic in the length of a word. DNA, base64 or a minified program may be one word of millions of
    characters.
    """
    if not LONG_SPACE.search(text) and max(map(len, text.split()), default=0) <= LONGEST_RUN:
        yield text
        return
    start = 0
    for run in LONG_RUN.finditer(text):
        yield text[start:run.end()]
        start = run.end()
    if start < len(text):
        yield text[start:]


def _splits_safely(tokenizer: Encoder, probe: str) -> bool:
    """Returns True if splitting `probe` after the first character does not change the ids, or if it cannot be encoded."""
    try:
        whole = tokenizer.encode(probe)
    except ValueError:                   # a char tokenizer may not have all characters of the probe
        return True
    return bool(whole == [*tokenizer.encode(probe[:1]), *tokenizer.encode(probe[1:])])


def _characters_before_newlines(tokenizer: Encoder) -> frozenset[str]:
    characters: set[str] = set()
    decoder = tokenizer.decoder()
    for token in range(tokenizer.vocab_size):
        text = decoder.decode([token])
        characters.update(text[place - 1] for place in range(1, len(text)) if text[place] == "\n")
    return frozenset(characters)
