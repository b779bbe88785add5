"""Counts the bytes of a text that a tokenizer loses. No model predicts lost bytes, so bits per byte would omit their cost.

A tokenizer of the `tokenizers` library may drop characters that its vocabulary lacks, or replace them with an unknown token.
Some tokenizers convert letters to lower case, or remove accents, newlines and repeated spaces. A byte is lost if it is not in
the decoded text. The number of lost bytes is the length of the text in UTF-8 minus the length of the longest common subsequence
of the text and the decoded text. Unknown tokens decode to nothing here.

Three things are not counted: text that decoding adds, such as spaces between tokens; one space at the beginning of a text,
which SentencePiece adds and its decoders remove; and changes by a decoder's clean-up, which is disabled here.

The tokenizers byte, char and world lose nothing. Byte-level BPE and byte fallback lose nothing either, but some files require
that the text meets a condition, such as being in NFC. A text is decoded and compared only if loss cannot be ruled out.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tokenizers

from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of
from rwkv.tokenizer.decoders import BYTE_OF
from rwkv.tokenizer.special import unknown_token
from rwkv.tokenizer.tokenizers import JsonTokenizer, Tokenizer

WITHHELD = 0.01                          # fraction of lost bytes above which numbers per byte or word are not reported
WINDOW = 1024                            # number of bytes to align with the decoded text at a time
AHEAD = 1 << 16                          # number of bytes to search for an equal passage after a lost one
ANCHOR = 32                              # number of bytes in such a passage
UTF8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]
CUTS = ("Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts")       # pre-tokenizers that only split a text
Condition = Callable[[str], bool]        # whether the tokenizer loses nothing of this text


@dataclass(frozen=True)
class Lost:
    """The loss of a text: the number of lost bytes, the `of` bytes of the whole text, and the unknown tokens in the ids."""

    bytes: int = 0
    of: int = 0
    unknown: int = 0

    def __add__(self, other: "Lost") -> "Lost":
        return Lost(self.bytes + other.bytes, self.of + other.of, self.unknown + other.unknown)

    @property
    def share(self) -> float:
        return self.bytes / max(self.of, 1)

    @property
    def too_much(self) -> bool:
        """Returns True if so much is lost that numbers per byte or per word are not reported."""
        return self.share > WITHHELD

    def describe(self, text: str) -> str:
        """Returns a sentence about the loss, without a full stop. `text` is a noun such as "the validation text"."""
        unknown = f", with {self.unknown:,} unknown tokens" if self.unknown else ""
        return (f"the tokenizer loses {percent(self.share)} of {text}: {self.bytes:,} of its "
                f"{count_of(self.of, 'byte')}{unknown}")


NOTHING = Lost()


def percent(share: float) -> str:
    """Formats 0.123 as "12.3 %". A fraction above 0 never becomes "0 %"."""
    return f"{100 * share:.3g} %"


class LossCounter:
    """Counts the bytes that a tokenizer loses. Threads may share a LossCounter.

    `never` is true if the tokenizer loses nothing of any text. `uncertain` is true if every text must be decoded to rule out
    loss.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._definition = json.loads(tokenizer.definition) if isinstance(tokenizer, JsonTokenizer) else None
        conditions = [] if self._definition is None else _conditions(self._definition)
        self.uncertain = conditions is None
        self.never = conditions == []
        self._conditions = conditions or []

    def keeps(self, text: str) -> bool:
        """Returns True if the tokenizer's definition implies that nothing of this text is lost."""
        return self.never or (not self.uncertain and all(condition(text) for condition in self._conditions))

    def count(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Lost:
        """Returns the total loss of some texts. `ids` are the tokenizer's ids for each text."""
        lost = Lost(of=sum(len(text.encode()) for text in texts))
        doubtful = [(text, list(tokens)) for text, tokens in zip(texts, ids, strict=True) if not self.keeps(text)]
        if not doubtful:
            return lost
        in_vocabulary = [[token for token in tokens if token != self.unknown_token] for _, tokens in doubtful]
        decoded = self._library.decode_batch(in_vocabulary, skip_special_tokens=False)
        missing = 0
        for (text, _), result in zip(doubtful, decoded, strict=True):
            space = " " * (text.startswith(" ") and not result.startswith(" "))  # this space is not lost, as explained above
            missing += missing_bytes(text.encode(), (space + result).encode())
        return lost + Lost(missing, 0, sum(len(tokens) for _, tokens in doubtful) - sum(map(len, in_vocabulary)))

    @cached_property
    def unknown_token(self) -> int | None:
        """Returns the id of the token that replaces characters outside the vocabulary, or None."""
        name = self._definition and unknown_token(self._definition)
        return self._library.token_to_id(name) if name else None

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        assert self._definition is not None
        return tokenizers.Tokenizer.from_str(json.dumps(self._definition | {"decoder": _plain_decoder(self._definition)}))


def _conditions(definition: JsonObject) -> list[Condition] | None:
    """Returns conditions which together imply that a text can be restored from its ids, or None if none are known.

    If the vocabulary contains all bytes, the input of the tokenizer model can be restored from the ids. In addition, the input
    of each earlier step must be restorable from the output of the step.
    """
    model = definition["model"]
    added = definition.get("added_tokens") or []
    steps = [*_flat_steps(definition.get("normalizer")), *_flat_steps(definition.get("pre_tokenizer"))]
    types = {step["type"] for step in steps}
    ordinary = [token for token in added if not token["special"]]        # a special token never matches in a text
    strips_spaces = any(token["lstrip"] or token["rstrip"] for token in ordinary)
    if strips_spaces or (ordinary and "Metaspace" in types) or not _has_all_bytes(model, "ByteLevel" in types):
        return None
    conditions: list[Condition] = []
    for step in steps:
        step_conditions = _step_conditions(step)
        if step_conditions is None:
            return None
        conditions += step_conditions
    return conditions


def _flat_steps(step: JsonObject | None) -> Iterator[JsonObject]:
    if step and step["type"] == "Sequence":
        for inner in step.get("normalizers") or step.get("pretokenizers") or []:
            yield from _flat_steps(inner)
    elif step:
        yield step


def _has_all_bytes(model: JsonObject, byte_level: bool) -> bool:
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocabulary = model["vocab"]
    tokens = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    if byte_level:
        alphabet = {value: character for character, value in BYTE_OF.items()}
        return model.get("type") == "BPE" and all(alphabet[value] in tokens for value in UTF8_BYTES)
    return bool(model.get("byte_fallback")) and all(f"<0x{value:02X}>" in tokens for value in UTF8_BYTES)


def _step_conditions(step: JsonObject) -> list[Condition] | None:
    """Returns conditions on a text which imply that the step is reversible, or None if no such conditions are known."""
    match step:
        case {"type": "ByteLevel" | "Prepend"}:
            return []
        case {"type": kind} if kind in CUTS:
            return None if step.get("behavior") == "Removed" else []
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
            return [partial(unicodedata.is_normalized, form)]
        case ({"type": "Replace", "pattern": {"String": " "}, "content": str(space)}
              | {"type": "Metaspace", "replacement": str(space)}):
            return [lambda text: space not in text]
    return None


def _plain_decoder(definition: JsonObject) -> Any:
    """Returns the file's decoder without clean-up or, if there is none, a decoder that reverses the pre-tokenizer, or None."""
    decoder = definition.get("decoder")
    if decoder is None:
        steps = _flat_steps(definition.get("pre_tokenizer"))
        return next((step for step in steps if step["type"] in ("ByteLevel", "Metaspace")), None)
    return _without_cleanup(decoder)


def _without_cleanup(decoder: JsonObject) -> JsonObject:
    inner = {"decoders": [_without_cleanup(each) for each in decoder["decoders"]]} if "decoders" in decoder else {}
    return decoder | inner | ({"cleanup": False} if "cleanup" in decoder else {})


def missing_bytes(before: bytes, after: bytes) -> int:
    """Returns len(before) minus the length of the longest common subsequence of `before` and `after`.

    The search goes window by window. After a long lost passage, the result may be too large, because the next window may be
    compared with a wrong part of `after`.
    """
    missing = at = place = searched = 0
    while at < len(before):
        window = before[at:at + WINDOW]
        is_last = at + len(window) == len(before)
        matched = len(window)
        length = len(window)
        if not after.startswith(window, place):
            matched, length = _align(window, after[place:place + 4 * WINDOW], is_last)
        if 4 * matched < len(window) and not is_last and at >= searched:
            searched = at + AHEAD
            anchor = _next_in_common(before, at, after, place)
            if anchor is not None:
                missing += _missing_between(before[at:anchor[0]], after[place:anchor[1]])
                at = anchor[0] + ANCHOR
                place = anchor[1] + ANCHOR
                searched = at
                continue
        missing += len(window) - matched
        at += len(window)
        place += length
    return missing


def _next_in_common(before: bytes, at: int, after: bytes, place: int) -> tuple[int, int] | None:
    """Finds the next passage of ANCHOR bytes that `before` and `after` have in common, and returns its two positions.

    Searches AHEAD bytes from `at` in `before` and from `place` in `after`. Returns None if there is no such passage.
    """
    anchor = None
    nearest = 2 * AHEAD
    for candidate in range(at, min(at + AHEAD, len(before) - ANCHOR), ANCHOR):
        if candidate - at >= nearest:
            break
        match_place = after.find(before[candidate:candidate + ANCHOR], place, place + AHEAD)
        distance = candidate - at + match_place - place
        if match_place >= 0 and distance < nearest:
            nearest = distance
            anchor = candidate, match_place
    return anchor


def _missing_between(before: bytes, after: bytes) -> int:
    """Does the work of missing_bytes for texts with little in common, by comparing windows at the same relative position."""
    missing = 0
    for start in range(0, len(before), WINDOW):
        window = before[start:start + WINDOW]
        first, last = (place * len(after) // len(before) for place in (start, start + len(window)))
        missing += len(window) - _align(window, after[first:last], is_last=True)[0]
    return missing


def _align(window: bytes, after: bytes, is_last: bool) -> tuple[int, int]:
    """Finds the part after[:length] that matches `window` best.

    Returns the length of the longest common subsequence of `window` and after[:length], and `length`. The best length has the
    highest score: 4 for each matched byte, minus 1 for each space in after[:length], because decoders add spaces, minus 2 for
    each other byte in after[:length]. For the last window, bytes of `after` cost nothing. Bit i of `row` is 0 if byte i of the
    window increases the length in common with the bytes of `after` so far. Source: Hyyrö 2004, Bit-parallel LCS-length
    computation revisited.
    """
    positions: dict[int, int] = {}
    for number, byte in enumerate(window):
        positions[byte] = positions.get(byte, 0) | 1 << number
    row = everything = (1 << len(window)) - 1
    best_score = matched = length = cost = 0
    for number, byte in enumerate(after, start=1):
        if not is_last:
            cost += 1 if byte == ord(" ") else 2
        if 4 * len(window) - cost <= best_score:
            break
        if byte in positions:
            matches = row & positions[byte]
            row = ((row + matches) | (row - matches)) & everything
            common = len(window) - row.bit_count()
            if 4 * common - cost > best_score:
                best_score = 4 * common - cost
                matched = common
                length = number
    return matched, length
