"""Tests the count of the bytes that a tokenizer loses.

Texts are decoded and compared, unless the tokenizer's definition implies that nothing is lost.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from losing import dropping, with_unknown
from test_tokenizer import BPE, FALLBACK, NEOX, SAMPLE
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rwkv.tokenizer import lost_bytes
from rwkv.tokenizer.lost_bytes import WITHHELD, LossCounter, Lost, missing_bytes
from rwkv.tokenizer.tokenizers import END_OF_TEXT, ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer

ASCII = [chr(code) for code in (10, *range(32, 127))]
ENGLISH = "The quick brown fox, however, jumps over the lazy dog.\n\n    It sleeps (and it snores): all day long.\n"


def lost_of(tokenizer: Tokenizer, text: str) -> Lost:
    return LossCounter(tokenizer).count([text], [tokenizer.encode(text)])


def with_change(tokenizer: JsonTokenizer, change: Callable[[Any], None]) -> JsonTokenizer:
    """Returns the tokenizer after a change of its library's object."""
    library = tokenizers.Tokenizer.from_str(tokenizer.definition)
    change(library)
    return JsonTokenizer(library.to_str())


def with_normalizer(normalizer: Any) -> JsonTokenizer:
    return with_change(BPE, lambda library: setattr(library, "normalizer", normalizer))


def with_pre_tokenizer(*steps: Any) -> JsonTokenizer:
    return with_change(BPE, lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])))


def wordpiece(*words: str) -> JsonTokenizer:
    """Returns a tokenizer like BERT's file: lower case, words between spaces and punctuation, and a decoder that cleans up."""
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, "[UNK]", *words])}
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([END_OF_TEXT, "[UNK]"])
    return JsonTokenizer(library.to_str())


def metaspace(has_decoder: bool = True) -> JsonTokenizer:
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, "<unk>", "\u2581", *ASCII])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    if has_decoder:
        library.decoder = decoders.Metaspace()
    library.add_special_tokens([END_OF_TEXT, "<unk>"])
    return JsonTokenizer(library.to_str())


def unigram(byte_fallback: bool) -> JsonTokenizer:
    pieces = ["<unk>", END_OF_TEXT, *(f"<0x{value:02X}>" for value in range(256)), *ASCII, "\u2581"]
    library = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    library.add_special_tokens([END_OF_TEXT, "<unk>"])
    return JsonTokenizer(library.to_str())


# Counting


@pytest.mark.parametrize(("tokenizer", "text", "expected", "unknown"), [
    (dropping(ASCII), "naïve — 你好\n", len("ï—你好".encode()), 0),
    (dropping(ASCII), "plain\n", 0, 0),
    (dropping(""), "naïve", len("naïve".encode()), 0),
    (with_unknown(ASCII), "naïve — 你好\n", len("ï—你好".encode()), 4),
    (with_unknown(ASCII, special=False), "naïve — 你好\n", len("ï—你好".encode()), 4),
    (with_unknown("abcKNU[]"), "[UNK]", 0, 0),
    (wordpiece("the", "dog", "do", "not", ".", "naive", "##s"), "The dogs", len("T"), 0),
    (wordpiece("the", "dog", "do", "not", ".", "naive"), "do not.\nthe dog .", len("\n"), 0),
    (wordpiece("the", "dog", "do", "not", ".", "naive"), "naïve the  dog cat", len("ï  cat".encode()), 1),
    (metaspace(), " the  dog", 0, 0),
    (metaspace(), "the dog é", 2, 1),
    (metaspace(has_decoder=False), "the dog", 0, 0),
    (unigram(byte_fallback=False), "dog é dog", 2, 1),
    (unigram(byte_fallback=True), "dog é dog", 0, 0),
    (with_normalizer(normalizers.Lowercase()), "Dog ÀB", 3, 0),
    (with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "é", 2, 0),
    (with_normalizer(normalizers.Strip()), "  dog\n", 2, 0),
    (with_pre_tokenizer(pre_tokenizers.WhitespaceSplit()), "a dog\n", 2, 0),
    (with_pre_tokenizer(pre_tokenizers.Split("o", "removed")), "a dog", 1, 0),
], ids=lambda value: None)
def test_lost_bytes_are_those_that_the_decoded_text_lacks(tokenizer: JsonTokenizer, text: str, expected: int,
                                                          unknown: int) -> None:
    assert lost_of(tokenizer, text) == Lost(expected, len(text.encode()), unknown)


def test_a_byte_that_the_alphabet_lacks_is_lost() -> None:
    definition = json.loads(BPE.definition)
    del definition["model"]["vocab"]["q"]
    definition["model"]["merges"] = [pair for pair in definition["model"]["merges"] if "q" not in "".join(pair)]
    definition["model"]["vocab"] = {token: number for number, token in enumerate(
        token for token in definition["model"]["vocab"] if "q" not in token)}
    assert lost_of(JsonTokenizer(json.dumps(definition)), "a queue\n") == Lost(1, 8, 0)


def test_a_token_that_strips_adjacent_spaces_loses_them() -> None:
    tokenizer = with_change(BPE, lambda library: library.add_tokens([AddedToken("dog", lstrip=True)]))
    assert lost_of(tokenizer, "a   dog").bytes == 3


@given(st.lists(st.sampled_from(["the ", "dog", "Ä", "é", "\n", "  ", "(x)", "你好", "NAÏVE "]), max_size=60).map("".join),
       st.sets(st.sampled_from("theodgx()\n äÄé你NAÏVE")), st.sampled_from([8, 64, lost_bytes.WINDOW]))
def test_omitted_characters_are_counted_whatever_the_windows(text: str, omitted: set[str], window: int) -> None:
    """The number is exact if the text fits into one window.

    For a longer text, the ambiguous ends of some windows may be counted, too.
    """
    rest = "".join(character for character in text if character not in omitted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_bytes, "WINDOW", window)
        missing = missing_bytes(text.encode(), rest.encode())
    exact = len(text.encode()) - len(rest.encode())
    assert missing == exact if len(text.encode()) <= window else exact <= missing


LINES = Path(lost_bytes.__file__).read_text(encoding="utf-8").splitlines(keepends=True)[:100]
LONG = "".join(LINES)
PASSAGES = {
    "no capitals": "".join(letter for letter in LONG if not letter.isupper()),
    "spaces between all": " ".join(LONG),
    "no lines": " ".join(LONG.split()),
    "a passage gone": "".join(LINES[:30] + LINES[50:]),
    "a passage in capitals": "".join([*LINES[:30], *(line.upper() for line in LINES[30:50]), *LINES[50:]]),
    "more": f"naïve {LONG}",
    "nothing": "",
}


@pytest.mark.thorough
@pytest.mark.parametrize("back", PASSAGES.values(), ids=PASSAGES)
def test_a_long_text_is_counted_to_two_percent(back: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_bytes, "WINDOW", 256)
    before, after = LONG.encode(), back.encode()
    exact = len(before) - common(before, after)
    assert exact <= missing_bytes(before, after) <= exact + 0.02 * len(before)


def common(first: bytes, second: bytes) -> int:
    """Returns the length of the longest common subsequence, by the textbook's dynamic programme on whole texts."""
    before = np.frombuffer(first, np.uint8)
    row = np.zeros(len(before) + 1, np.int32)
    for byte in second:
        row[1:] = np.maximum.accumulate(np.maximum(row[:-1] + (before == byte), row[1:]))
    return int(row[-1])


# Known from the definition


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(SAMPLE), BPE], ids=["byte", "char", "bpe"])
def test_a_tokenizer_with_all_bytes_loses_nothing_of_any_text(tokenizer: Tokenizer) -> None:
    assert LossCounter(tokenizer).never


ISOLATED = pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}"), "isolated")
KEEPING = {
    "nfc": NEOX, "fallback": FALLBACK, "unigram": unigram(byte_fallback=True), "cut": with_pre_tokenizer(ISOLATED),
    "digits": with_pre_tokenizer(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()),
    "nfkc": with_normalizer(normalizers.NFKC()),
}


@pytest.mark.parametrize("tokenizer", KEEPING.values(), ids=KEEPING)
@given(text=st.one_of(st.text(), st.text("ab c\u2581é\u0301 ﬁ1234\u00a0\n.")))
def test_a_text_that_a_tokenizer_keeps_is_decoded_back(tokenizer: JsonTokenizer, text: str) -> None:
    """One space at the beginning may be lost: SentencePiece adds one."""
    counter = LossCounter(tokenizer)
    assert counter.keeps("plain text, 123\n")
    assert not counter.uncertain
    ids = tokenizer.encode(text)
    back = tokenizer.decode(ids)
    same = back in (text, f" {text}", text.removeprefix(" "))
    if counter.keeps(text):
        assert same
        assert counter.count([text], [ids]).bytes == 0
    elif not same:
        assert counter.count([text], [ids]).bytes > 0 or len(back) > len(text)


@pytest.mark.parametrize("tokenizer", [
    dropping(ASCII), with_unknown(ASCII), wordpiece("dog"), metaspace(), unigram(byte_fallback=False),
    with_normalizer(normalizers.Lowercase()), with_pre_tokenizer(pre_tokenizers.Whitespace()),
    with_pre_tokenizer(pre_tokenizers.Split(" ", "removed")),
    with_change(BPE, lambda library: library.add_tokens([AddedToken("dog", rstrip=True)])),
    with_change(unigram(byte_fallback=True), lambda library: library.add_tokens(["dog"])),
], ids=lambda value: None)
def test_a_tokenizer_that_may_lose_text_is_never_trusted(tokenizer: JsonTokenizer) -> None:
    counter = LossCounter(tokenizer)
    assert counter.uncertain
    assert not counter.never
    assert not counter.keeps("a dog")


# Messages


def test_numbers_are_withheld_only_above_a_share() -> None:
    assert not Lost(0, 0).too_much
    assert not Lost(10, int(10 / WITHHELD)).too_much
    assert Lost(11, int(10 / WITHHELD)).too_much
    assert Lost(1, 100, 2) + Lost(2, 300, 3) == Lost(3, 400, 5)
    assert "0.0001 %" in Lost(1, 1_000_000).describe("the text")
