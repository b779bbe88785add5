"""Tests the tokens that end a text in each kind of tokenizer file, special tokens, which nobody can type, and continuations."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import BERT, CHATML, KINDS, LETTERS, LLAMA, TEXT, chatml, sentencepiece_bpe, wordlevel
from tokenizers import models

from rwkv.errors import UserError
from rwkv.tokenizer import special
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer

TOKENIZERS: dict[str, Tokenizer] = {name: JsonTokenizer(text) for name, text in KINDS.items()}
EVERY = TOKENIZERS | {"byte": ByteTokenizer(), "char": CharTokenizer(TEXT)}
each_kind = pytest.mark.parametrize("kind", TOKENIZERS)
NAMES = [*LLAMA, *BERT, *CHATML, "<|end_of_text|>", "<|eot_id|>", "<pad>"]
TYPED = st.lists(st.sampled_from([*NAMES, *LETTERS, " ", "\n", "<", ">", "</", "s>"]), max_size=12).map("".join)


@each_kind
@given(text=TYPED)
@settings(max_examples=25)
def test_no_text_encodes_to_a_special_token(kind: str, text: str) -> None:
    """The unknown token is the exception, where the vocabulary lacks something."""
    tokenizer = TOKENIZERS[kind]
    parsed = json.loads(KINDS[kind])
    forbidden = {*tokenizer.special.values(), *tokenizer.ends} - {tokenizer.special.get(special.unknown_token(parsed) or "")}
    for ids in (tokenizer.encode(text), *tokenizer.encode_batch([text]), *tokenizer.encode_stream([text])):
        assert forbidden.isdisjoint(ids)


@given(TYPED)
def test_a_special_tokens_name_is_spelt_where_the_letters_are_there(text: str) -> None:
    for kind in ("sentencepiece BPE", "byte-level BPE", "ignore_merges"):
        assert TOKENIZERS[kind].decode(TOKENIZERS[kind].encode(text)) == text
    spelt = TOKENIZERS["unigram"].encode("a</s>b<unk>")
    assert TOKENIZERS["unigram"].special["<unk>"] not in spelt
    assert TOKENIZERS["unigram"].decode(spelt) == "a</s>b<unk>"


@pytest.mark.parametrize("kind", EVERY)
@given(data=st.data())
@settings(max_examples=30)
def test_a_text_continues_after_its_ids(kind: str, data: st.DataObject) -> None:
    """The ids are random, and the second part begins anywhere. The names of the tokens are the pieces of the text."""
    tokenizer = EVERY[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    before, after = ids[:cut], ids[cut:]
    assert tokenizer.decode_start(before) + tokenizer.decode(after, before) == tokenizer.decode(ids)
    names = [tokenizer.names([token], ids[:place])[0] for place, token in enumerate(ids)]
    if not any("\ufffd" in name for name in names):
        assert "".join(names) == tokenizer.decode(ids)


def test_a_first_word_keeps_its_space() -> None:
    for kind, tokenizer in TOKENIZERS.items():
        before, whole = (tokenizer.encode(text) for text in ("bad", "bad cab"))
        assert whole[:len(before)] == before
        assert tokenizer.decode(whole[len(before):], before) == " cab", kind
        assert tokenizer.names(whole[len(before):], before)[0].startswith(" "), kind


# What ends a text


ENDS = [(LLAMA, True, "</s>"), (["<pad>", "</s>", "<unk>"], True, "</s>"), (BERT, True, "[SEP]"),
        (["[UNK]", "[CLS]", "[SEP]", "[PAD]"], True, "[SEP]"), (CHATML, True, "<|endoftext|>"),
        (["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], False, "<|end_of_text|>"),
        (["<bos>", "<eos>", "<pad>"], False, "<eos>"), (["<doc>", "<pad>"], True, "<doc>")]


@pytest.mark.parametrize(("specials", "first", "end"), ENDS)
def test_a_file_says_what_ends_a_text(specials: list[str], first: bool, end: str) -> None:
    tokenizer = JsonTokenizer(chatml(specials, first))
    assert tokenizer.ends == (tokenizer.special[end],)
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert (again.ends, again.hash) == (tokenizer.ends, tokenizer.hash)
    assert (tokenizer.end_line() is None) == (end == "<|endoftext|>")


@pytest.mark.parametrize(("specials", "first"), [(["<unk>"], True), (["[PAD]"], True), (["[MASK]"], True), (["<x>"], False),
                                                 (["</s>", "<eos>"], False)])
def test_a_file_without_an_end_of_text_requires_the_option(tmp_path: Path, specials: list[str], first: bool) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(chatml(specials, first))
    with pytest.raises(UserError, match=r"data\.end_of_text"):
        Tokenizer.named(str(path), "data.tokenizer")
    tokenizer = Tokenizer.named(str(path), end_of_text=specials[-1])
    assert tokenizer.ends == (tokenizer.special[specials[-1]],)
    for name, wrong in ((str(path), "<y>"), ("byte", "a")):              # the tokenizer byte has no special tokens
        with pytest.raises(UserError):
            Tokenizer.named(name, end_of_text=wrong)


def test_a_token_that_is_not_special_can_end_a_text_and_is_never_encoded() -> None:
    tokenizer = JsonTokenizer(wordlevel(), end_of_text="bad")
    assert (tokenizer.end_of_text in tokenizer.encode("cab bad cab"), tokenizer.decode([tokenizer.end_of_text])) == (False, "")


def test_a_definition_of_an_older_version_means_what_it_meant() -> None:
    """Token 0, whatever its name, separated the documents that the model has learnt. The hash does not depend on the name."""
    older = Tokenizer.from_dict({"kind": "json", "definition": sentencepiece_bpe()})
    newer = JsonTokenizer(sentencepiece_bpe())
    assert (older.ends, newer.ends) == ((0,), (2,))
    assert older.hash == newer.hash
    assert older.data_key != newer.data_key
    assert "end_of_text" not in older.to_dict()


def test_a_file_that_a_checkpoint_knows_ends_texts_as_the_checkpoint_says(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(sentencepiece_bpe())
    for like, end in ((None, 2), ({"kind": "json", "definition": sentencepiece_bpe()}, 0),
                      ({"kind": "json", "definition": sentencepiece_bpe(), "end_of_text": [1]}, 1),
                      ({"kind": "json", "definition": chatml()}, 2), ({"kind": "byte"}, 2)):
        assert Tokenizer.named(str(path), like=like).end_of_text == end


@pytest.mark.parametrize("ends", [[], [10 ** 6], [-1], ["</s>"], [None]])
def test_a_damaged_definition_is_reported_in_one_sentence(ends: list[Any]) -> None:
    with pytest.raises(UserError):
        Tokenizer.from_dict({"kind": "json", "definition": sentencepiece_bpe(), "end_of_text": ends})


def test_unknown_words_are_shown_and_end_nothing() -> None:
    tokenizer = JsonTokenizer(wordlevel())
    ids = tokenizer.encode("cab zebra cab")
    assert (0 in ids, 0 in tokenizer.ends, tokenizer.decode(ids)) == (True, False, "cab [UNK] cab")


def test_files_of_the_first_versions_of_the_library() -> None:
    """In these files, merges are strings, and the model has no type."""
    parsed = json.loads(chatml(["<|endoftext|>", "ab"]))
    parsed["model"]["merges"] = [" ".join(merge) for merge in parsed["model"]["merges"]]
    del parsed["model"]["type"]
    tokenizer = JsonTokenizer(json.dumps(parsed))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_added_tokens_after_special_ones_keep_their_ids() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[SEP]": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.add_special_tokens(["[SEP]", "[NEW]"])
    library.add_tokens(["<b>"])
    tokenizer = JsonTokenizer(library.to_str())
    assert (tokenizer.encode("<b>"), tokenizer.encode("[NEW]"), tokenizer.vocab_size) == ([4], [2], 5)


@pytest.mark.parametrize("change", [
    lambda added, free: added[2].update(id=free),
    lambda added, free: added.append({**added[1], "content": "<|a|>", "id": free + 7}),
    lambda added, free: added.extend({**added[1], "content": name, "id": free + place}
                                     for name, place in (("<|a|>", 1), ("<|b|>", 0))),
    lambda added, free: added.append({**added[1], "content": "<|a|>"}), lambda added, free: added.append(dict(added[1]))])
def test_a_special_token_has_the_id_that_the_library_gives_it(change: Any) -> None:
    """The library ignores an id in added_tokens that contradicts the vocabulary, repeats another id or leaves a gap."""
    parsed = json.loads(chatml())
    change(parsed["added_tokens"], 1 + max(parsed["model"]["vocab"].values()))
    library = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    tokenizer = JsonTokenizer(json.dumps(parsed))
    assert tokenizer.special == {name: library.token_to_id(name) for name in tokenizer.special}
    for name, index in tokenizer.special.items():
        assert tokenizer.encode(tokenizer.private[name]) == [index]
    assert tokenizer.decode([*tokenizer.special.values(), *tokenizer.encode("bad")]) == "bad"
