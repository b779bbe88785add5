"""Tokenizers: any text comes back, decoding id by id shows whole characters only, and wrong inputs get one sentence."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from rwkv.tokenizer import END_OF_TEXT, ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer, build

SAMPLE = "def main(self):\n    return 'naïve café', \"你好, 世界\"  # 😀 👩‍👩‍👧\n" * 20
BPE = build("bpe", [SAMPLE], 320)
REPLACEMENT = "\ufffd"


def byte_fallback() -> JsonTokenizer:
    """As SentencePiece's models come: words start with U+2581, what the vocabulary lacks is spelt in bytes."""
    tokens = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581", *"abcdefghij", "ab", "\u2581c", "é"]
    library = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)},
                                              merges=[("a", "b"), ("\u2581", "c")], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>"])
    return JsonTokenizer(library.to_str())


FALLBACK = byte_fallback()
EVERY = [ByteTokenizer(), CharTokenizer(SAMPLE), BPE, FALLBACK]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*map(decoder.push, ids), decoder.flush()]


@given(st.text())
def test_bpe_brings_back_any_text(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_byte_brings_back_any_text(text: str) -> None:
    assert ByteTokenizer().encode(text) == list(text.encode())
    assert ByteTokenizer().decode(text.encode()) == text


@given(st.text(st.sampled_from(SAMPLE)))
def test_char_brings_back_the_text_of_its_characters(text: str) -> None:
    tokenizer = CharTokenizer(SAMPLE)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text not in tokenizer.encode(text)


def test_char_ids_follow_the_sorted_characters_from_one_on() -> None:
    tokenizer = CharTokenizer("banana")
    assert tokenizer.characters == ["a", "b", "n"]
    assert (tokenizer.vocab_size, tokenizer.encode("nab")) == (4, [3, 1, 2])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, FALLBACK], ids=["byte", "bpe", "fallback"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=f"\0{REPLACEMENT}\u2581")))
def test_id_by_id_no_half_character_is_shown(tokenizer: Tokenizer, text: str) -> None:
    shown = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(shown) == text
    assert not any(REPLACEMENT in piece for piece in shown)


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(ByteTokenizer(), list("é€😀".encode())) == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_an_incomplete_character_is_replaced_at_the_end_or_at_what_cannot_continue_it() -> None:
    assert pieces(ByteTokenizer(), [0xE2, 0x82]) == ["", "", REPLACEMENT]
    assert pieces(ByteTokenizer(), [0xE2, 0x41]) == ["", f"{REPLACEMENT}A", ""]


@pytest.mark.parametrize("tokenizer", [BPE, FALLBACK], ids=["bpe", "fallback"])
@given(text=st.text())
def test_decoding_agrees_with_the_library(tokenizer: JsonTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._library.decode(ids)


@given(st.lists(st.integers(0, BPE.vocab_size - 1)))
def test_any_ids_decode_as_the_library_does(ids: list[int]) -> None:
    assert BPE.decode(ids) == BPE._library.decode(ids)


@given(st.lists(st.integers(1, 255)))
def test_any_bytes_decode_as_python_does(ids: list[int]) -> None:
    assert ByteTokenizer().decode(ids) == bytes(ids).decode("utf-8", "replace")


@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1)))
def test_any_ids_decode_without_a_crash(ids: list[int]) -> None:
    assert isinstance(FALLBACK.decode(ids), str)


def test_what_was_shown_does_not_change_what_follows() -> None:
    whole, half = FALLBACK.encode("中")[-3:], FALLBACK.encode("中")[-3]
    assert pieces(FALLBACK, [*whole, half]) == ["", "", "中", "", REPLACEMENT]


def test_a_decoder_holds_back_a_bounded_number_of_ids() -> None:
    half = FALLBACK.encode("€")[-3]
    decoder = FALLBACK.decoder()
    assert any(decoder.push(half) for _ in range(10))


@pytest.mark.parametrize("tokenizer", EVERY, ids=["byte", "char", "bpe", "fallback"])
def test_end_of_text_is_silent(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text == 0
    assert tokenizer.decode([0, *tokenizer.encode("ace"), 0]) == "ace"


def test_special_tokens_in_a_text_are_text() -> None:
    ids = BPE.encode(f"a{END_OF_TEXT}b")
    assert BPE.end_of_text not in ids
    assert BPE.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_batch_is_encoded_as_each_text_alone() -> None:
    texts = ["", "a", SAMPLE, f"x{END_OF_TEXT}"]
    assert BPE.encode_batch(texts) == [BPE.encode(text) for text in texts]


@pytest.mark.parametrize("tokenizer", EVERY, ids=["byte", "char", "bpe", "fallback"])
def test_a_description_restores_the_tokenizer(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert (again.hash, again.vocab_size) == (tokenizer.hash, tokenizer.vocab_size)
    assert again.encode(SAMPLE) == tokenizer.encode(SAMPLE)


def test_different_tokenizers_have_different_hashes() -> None:
    assert len({tokenizer.hash for tokenizer in [*EVERY, CharTokenizer("ab"), build("bpe", [SAMPLE], 300)]}) == len(EVERY) + 2


def test_training_is_deterministic() -> None:
    assert build("bpe", [SAMPLE], 320).hash == BPE.hash


def test_bpe_keeps_within_its_vocabulary_and_compresses() -> None:
    assert BPE.vocab_size <= 320
    assert max(BPE.encode(SAMPLE)) < BPE.vocab_size
    assert len(BPE.encode(SAMPLE)) < len(SAMPLE.encode()) / 2


def test_a_file_is_read_whatever_its_layout_and_its_truncation_ignored(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(BPE.definition)
    library.enable_truncation(3)
    library.enable_padding(length=9999)
    path = tmp_path / "tokenizer.json"
    path.write_text(library.to_str(pretty=True), encoding="utf-8")
    assert build(str(path), []).encode(SAMPLE) == BPE.encode(SAMPLE)


def test_a_file_with_its_end_of_text_elsewhere(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, END_OF_TEXT: 2}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert (tokenizer.end_of_text, tokenizer.decode([2, 1, 2])) == (2, "b")


WRONG = {
    "no separator": ('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "separates documents"),
    "not JSON": ("def main", "not a `tokenizers` JSON file"),
    "other JSON": ('{"a": 1}', "not a `tokenizers` JSON file"),
    "truncated": (BPE.definition[:1000], "not a `tokenizers` JSON file"),
    "empty": ("", "not a `tokenizers` JSON file"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_gets_a_sentence_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"tokenizer.json .*{message}"):
        build(str(path), [])


def test_a_missing_or_binary_file_and_an_unknown_kind_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*missing\.json: No such file"):
        build(str(tmp_path / "missing.json"), [])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        build(str(tmp_path / "binary.json"), [])
    with pytest.raises(ValueError, match="byte, char, bpe or the path"):
        build("bpee", [])
    with pytest.raises(ValueError, match="at least 257"):
        build("bpe", ["a"], 100)


def test_text_that_cannot_be_encoded_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"'z', '€': not among the 2 characters .* or bpe"):
        CharTokenizer("ab").encode("a€z")
    with pytest.raises(ValueError, match="and 16 more"):
        CharTokenizer("ab").encode("cdefghijklmnopqrstuvwxyz0123456789"[:26])
    with pytest.raises(ValueError, match=r"character 1 of the text is U\+0000"):
        ByteTokenizer().encode("a\0")
    for tokenizer in EVERY:
        with pytest.raises(ValueError, match="character 1 of the text is half a surrogate pair"):
            tokenizer.encode_batch(["a\ud800"])


@pytest.mark.parametrize("tokenizer", EVERY, ids=["byte", "char", "bpe", "fallback"])
@pytest.mark.parametrize("beyond", [-1, 0, 10 ** 6])
def test_an_id_outside_the_vocabulary_gets_a_sentence(tokenizer: Tokenizer, beyond: int) -> None:
    wrong = beyond if beyond < 0 else tokenizer.vocab_size + beyond
    with pytest.raises(ValueError, match=f"token id {wrong} is outside"):
        tokenizer.decode([wrong])


@pytest.mark.parametrize("definition", [{}, {"kind": "world"}, {"kind": "char"}, {"kind": "json", "definition": 3}, []])
def test_a_foreign_description_gets_a_sentence(definition: dict) -> None:
    with pytest.raises(ValueError, match="not a tokenizer's description"):
        Tokenizer.from_dict(definition)
