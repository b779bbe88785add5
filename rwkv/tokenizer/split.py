"""Long texts in pieces whose ids, one after the other, are those of the whole.

A piece ends between a character and a newline after it. That changes nothing where the tokenizer has no token with the two
side by side, as nobody's has for a letter or a digit, and where a newline at the beginning of a text is what it is elsewhere.
Both are looked up in the vocabulary. A text that offers no such place for LONGEST characters is cut there, and so is any long
one with a tokenizer that looks across lines: the ids at the cut may then be others than those of the whole text.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rwkv.tokenizer.tokenizers import Tokenizer

LONGEST = 1 << 22                        # characters
PROBES = ("a\nb", "1\n1", "Z\n\n  x", "a\n a", "y\n\ty")
Cut = Callable[[str], int]


def cutter(tokenizer: Tokenizer) -> Cut:
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


def _before_newline(tokenizer: Tokenizer) -> frozenset[str]:
    """Characters that stand before a newline in some token."""
    found: set[str] = set()
    decoder = tokenizer.decoder()
    for token in range(tokenizer.vocab_size):
        text = decoder.decode([token])
        found.update(text[place - 1] for place in range(1, len(text)) if text[place] == "\n")
    return frozenset(found)


def _covers(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except ValueError:                   # char, made from a text without these characters
        return False
    return True


def _splits_at_lines(parsed: dict[str, Any]) -> bool:
    """Whether the file's rules never look across the place between a character and a newline after it.

    So it is with GPT-2's and GPT-NeoX's: words do not contain spaces, and NFC never joins anything to a newline.
    """
    words = parsed.get("pre_tokenizer") or {}
    normal = (parsed.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
    whole = any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in parsed.get("added_tokens", []))
    return (normal and not whole and words.get("type") == "ByteLevel" and not words.get("add_prefix_space")
            and words.get("use_regex", True))


def _last_line_end(text: str) -> int:
    """Where the last newline is that follows a character which is no space; 0 for none."""
    end = text.rfind("\n")
    while end > 0 and text[end - 1].isspace():
        end = text.rfind("\n", 0, end)
    return max(end, 0)
