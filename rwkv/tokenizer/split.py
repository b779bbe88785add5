"""Splitting a long text so that the ids of its pieces, one after the other, are those of the whole.

A text is split before a newline that follows a non-space. That is safe if no token spans the two characters and if a newline
at the beginning of a text is encoded as elsewhere; both are checked against the vocabulary. A text without such a place within
LONGEST characters is split there, and so is any long text if the tokenizer looks across lines: the ids at the split may then
differ from those of the whole text.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

LONGEST = 1 << 22                        # characters
PROBES = ("a\nb", "1\n1", "Z\n\n  x", "a\n a", "y\n\ty")
Cut = Callable[[str], int]


class Encoder(Protocol):
    """What `cutter` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Any: ...

    def decoder(self) -> Any: ...


def cutter(tokenizer: Encoder) -> Cut:
    """A function that says where the last cut is that `text` offers; 0 for none."""
    if not all(tokenizer.encode(probe) == [*tokenizer.encode(probe[:1]), *tokenizer.encode(probe[1:])]
               for probe in PROBES if _covers(tokenizer, probe)):
        return lambda text: 0
    glued = _before_newline(tokenizer)
    return lambda text: last_line_end(text, glued)


def last_line_end(text: str, glued: frozenset[str] = frozenset()) -> int:
    """Where the last newline stands that follows neither a space nor a character of `glued`; 0 for none."""
    end = text.rfind("\n")
    while end > 0 and (text[end - 1].isspace() or text[end - 1] in glued):
        end = text.rfind("\n", 0, end)
    return max(end, 0)


def pieces(chunks: Iterable[str], cut: Cut) -> Iterator[str]:
    """The same text in pieces that end at cuts, each about as long as a chunk."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        end = cut(rest) or (len(rest) if len(rest) >= LONGEST else 0)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _before_newline(tokenizer: Encoder) -> frozenset[str]:
    """Characters that stand before a newline in some token."""
    found: set[str] = set()
    decoder = tokenizer.decoder()
    for token in range(tokenizer.vocab_size):
        text = decoder.decode([token])
        found.update(text[place - 1] for place in range(1, len(text)) if text[place] == "\n")
    return frozenset(found)


def _covers(tokenizer: Encoder, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except ValueError:                   # char, made from a text without these characters
        return False
    return True


def splits_at_lines(parsed: dict[str, Any]) -> bool:
    """Whether the file's rules never look across the place between a character and a newline after it.

    So it is with GPT-2's and GPT-NeoX's: words do not contain spaces, and NFC never joins anything to a newline.
    """
    words = parsed.get("pre_tokenizer") or {}
    normal = (parsed.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
    whole = any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in parsed.get("added_tokens", []))
    return (normal and not whole and words.get("type") == "ByteLevel" and not words.get("add_prefix_space")
            and words.get("use_regex", True))
