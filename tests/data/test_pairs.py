"""Tests of pairs of answers: their formats, what is learnt of them, their rows, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_arrays import token_array_of

from rwkv.chat.turn_templates import chat_template
from rwkv.config import DataConfig
from rwkv.data.conversations import Rows, annotated_conversations
from rwkv.data.loaders import validation_rows
from rwkv.data.pairs import PairRows, Pairs, rows_of
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.sources.chat import parts_of_pair
from rwkv.data.validation import limit_validation
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED
from rwkv.tokenizer.tokenizers import ByteTokenizer

QUESTION = {"role": "user", "content": "ask"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
SYSTEM = {"role": "system", "content": "be brief"}
FIRST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, QUESTION]


def join_parts(parts: list[tuple[str, bool]]) -> tuple[str, str]:
    """Returns the whole text, and the text that is trained on."""
    return "".join(text for text, _ in parts), "".join(text for text, learnt in parts if learnt)


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": "good", "rejected": "bad"},
    {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [QUESTION], "chosen": "good", "rejected": [BAD]},
    {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"prompt": "ask", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"question": "ask", "chosen": "good", "rejected": "bad", "score": 3, "system": ""},
    {"instruction": "ask", "input": "", "chosen": "good", "rejected": "bad"},
    {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
    {"prompt": "ask", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD], "messages": [QUESTION, GOOD]},
    {"conversations": [{"from": "human", "value": "ask"}], "chosen": {"from": "gpt", "value": "good"},
     "rejected": {"from": "gpt", "value": "bad"}},
])
def test_every_format_gives_the_same_pair(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    chosen, rejected = parts_of_pair(entry, "here", template)
    for parts, answer in ((chosen, GOOD), (rejected, BAD)):
        assert join_parts(parts) == join_parts(template.parts([QUESTION, answer]))


@pytest.mark.parametrize("entry", [
    {"prompt": FIRST, "chosen": [GOOD], "rejected": [BAD]}, {"chosen": [*FIRST, GOOD], "rejected": [*FIRST, BAD]},
    {"prompt": "ask", "history": [["hi", "hello"]], "chosen": "good", "rejected": "bad"},
])
def test_answers_that_both_texts_begin_with_are_not_learnt(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    for parts, answer in zip(parts_of_pair(entry, "here", template), (GOOD, BAD), strict=True):
        text, learnt = join_parts(parts)
        assert text == join_parts(template.parts([*FIRST, answer]))[0]
        assert learnt == join_parts(template.parts([QUESTION, answer]))[1]


def test_what_follows_the_first_difference_is_learnt() -> None:
    """An answer may have several turns. Two equal conversations differ in nothing, but each has an answer that is learnt."""
    later = [GOOD, {"role": "user", "content": "more"}, GOOD]
    chosen, rejected = parts_of_pair({"prompt": "ask", "chosen": later, "rejected": "bad"}, "here", chat_template("world"))
    assert join_parts(chosen)[1].count("good") == 2
    assert "bad" in join_parts(rejected)[1]
    same = parts_of_pair({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]}, "here", chat_template("world"))
    assert all("good" in join_parts(parts)[1] for parts in same)


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD], "system": "be brief"},
    {"prompt": "ask", "chosen": "good", "rejected": "bad", "system": "be brief"},
    {"prompt": [SYSTEM, QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
    {"prompt": "ask", "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
])
def test_the_system_message_is_part_of_the_prompt(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    for parts, answer in zip(parts_of_pair(entry, "here", template), (GOOD, BAD), strict=True):
        assert join_parts(parts) == join_parts(template.parts([SYSTEM, QUESTION, answer]))


@pytest.mark.parametrize("text", ["1", "[1, 2]", '{"a": 1}', "null"])
def test_an_answer_that_is_json_stays_a_text(text: str) -> None:
    chosen, _ = parts_of_pair({"prompt": "ask", "chosen": text, "rejected": "bad"}, "here", chat_template("world"))
    assert text in join_parts(chosen)[1]


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": "good"}, {"prompt": "ask", "completion": "good"}, {"chosen": "good", "rejected": "bad"},
    {"chosen": "good", "rejected": "bad", "system": "be brief"}, {"prompt": "ask", "chosen": 3, "rejected": "bad"},
    {"prompt": "other", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    {"chosen": [QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]}, {"chosen": [QUESTION], "rejected": [QUESTION]},
    {"prompt": "ask", "chosen": [GOOD, QUESTION], "rejected": [BAD]}, {"prompt": "ask", "chosen": [], "rejected": [BAD]},
])
def test_an_entry_that_is_not_a_pair_is_refused_with_its_place(entry: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        parts_of_pair(entry, "here", chat_template("world"))
    assert "here: " in str(error.value)


def corpus(folder: Path, entries: list[dict[str, Any]], **options: Any) -> Corpus:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, entries)))
    config = DataConfig(name="chat", path=str(folder / "pairs.jsonl"), cache_dir=str(folder / "cache"), **options)
    return prepare(config, 64, ByteTokenizer(), pairs=True)


ENTRIES: list[dict[str, Any]] = [{"prompt": f"{n}?", "chosen": f"{n}" * (1 + n % 3), "rejected": "no"} for n in range(12)]


def test_both_texts_of_a_pair_are_in_one_split(tmp_path: Path) -> None:
    excluded = {"prompt": "?", "chosen": [GOOD | {"weight": 0}], "rejected": "no"}
    without = [ENTRIES[0] | {"weight": 0}, ENTRIES[0] | {"rejected": None}]
    prepared = corpus(tmp_path, [*ENTRIES[:3], excluded, *ENTRIES[3:], *without], val_fraction=0.25)
    assert prepared.conversations is not None
    train, val = prepared.conversations
    assert (len(train.tokens.starts), len(val.tokens.starts)) == (18, 6)
    assert train.left_out == 3
    for split in prepared.conversations:
        texts = [*annotated_conversations(split, ByteTokenizer())]
        questions = [text.partition("[[")[0] for text in texts]
        assert questions[::2] == questions[1::2]
        assert all("no" in text.partition("[[")[2] for text in texts[1::2])
        assert not any("no" in text for text in texts[::2])
    assert prepared.val_bytes_per_token is None


def test_pairs_and_conversations_of_one_file_are_cached_apart(tmp_path: Path) -> None:
    entries = [entry | {"completion": "yes"} for entry in ENTRIES]
    pairs = corpus(tmp_path, entries)
    chat_corpus = prepare(DataConfig(name="chat", path=str(tmp_path / "pairs.jsonl"), cache_dir=str(tmp_path / "cache")), 64,
                          ByteTokenizer())
    assert pairs.conversations is not None
    assert chat_corpus.conversations is not None
    assert len(pairs.conversations[0].tokens.starts) == 2 * len(chat_corpus.conversations[0].tokens.starts)
    assert not chat_corpus.conversations[0].paired


@pytest.mark.parametrize("val_tokens", [1, 60, 10_000])
def test_a_part_of_the_held_out_pairs_consists_of_whole_pairs(tmp_path: Path, val_tokens: int) -> None:
    whole = corpus(tmp_path, ENTRIES, val_fraction=0.5)
    part = limit_validation(whole, val_tokens, 64)
    assert part.conversations is not None
    assert part.conversations[1].paired
    assert len(part.conversations[1].tokens.starts) % 2 == 0
    assert len(rows_of(part.conversations[1], 64)) > 0


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(3, 20), st.integers(3, 20)), min_size=1, max_size=12), T=st.integers(8, 48))
def test_rows_have_every_whole_pair_once(tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]],
                                         T: int) -> None:
    """Each pair that fits is in one row, the chosen answer before the rejected one. The other pairs are counted."""
    folder = tmp_path_factory.mktemp("pairs")
    texts = [np.arange(100 * number, 100 * number + length, dtype=np.uint16)
             for number, length in enumerate(length for pair in lengths for length in pair)]
    (folder / "learnt").mkdir()
    tokens = token_array_of(folder, *texts)
    flags = token_array_of(folder / "learnt", *(np.ones(len(text), np.uint8) for text in texts))
    fitting = [number for number, (one, other) in enumerate(lengths) if one + other - 2 <= T]
    if not fitting:
        with pytest.raises(UserError):
            PairRows(tokens, flags, T)
        return
    rows = PairRows(tokens, flags, T)
    assert rows.left_out == len(lengths) - len(fitting)
    assert int(rows.counts.sum()) == len(fitting)
    read = rows.__getitems__(Rows([*range(len(rows))], 0.5))
    assert isinstance(read, Pairs)
    assert read.weight == 0.5
    assert sorted(read.numbers.tolist()) == fitting
    for place, number in enumerate(read.numbers.tolist()):
        for side in range(2):
            at = (read.answers == 2 * place + side) & (read.y != IGNORED)
            text = texts[2 * number + side]
            assert read.x[at].tolist() == text[:-1].tolist()
            assert read.y[at].tolist() == text[1:].tolist()
            assert read.starts[at].tolist() == [True] + [False] * (len(text) - 2)
            assert len({*at.nonzero()[:, 0].tolist()}) == 1
    again = rows.__getitems__([len(rows)])                               # an index beyond the rows is of the next epoch
    assert torch.equal(again.x, rows.__getitems__([0]).x)


def test_pairs_that_are_too_long_are_reported(tmp_path: Path) -> None:
    prepared = corpus(tmp_path, [*ENTRIES, {"prompt": "long", "chosen": "x" * 200, "rejected": "no"}])
    assert prepared.conversations is not None
    assert "1 pair longer than model.ctx_len=80" in rows_of(prepared.conversations[0], 80).describe()
    assert "omitted" not in rows_of(prepared.conversations[0], 500).describe()


def test_a_validation_split_in_which_no_pair_fits_is_named(tmp_path: Path) -> None:
    """The first entry is always for validation."""
    prepared = corpus(tmp_path, [{"prompt": "long", "chosen": "x" * 200, "rejected": "no"}, *ENTRIES], val_fraction=0.01)
    assert prepared.conversations is not None
    assert len(rows_of(prepared.conversations[0], 80)) > 0
    with pytest.raises(UserError, match=r"^the validation split has 1 pair: no pair of answers fits .*data\.val_fraction"):
        validation_rows(prepared.conversations[1], 80, 0)


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    """The answers are equal as the model reads them, because the template strips the second answer's space."""
    equal = [{"prompt": "same", "chosen": "no", "rejected": answer} for answer in ("no", " no ")]
    alike = {"prompt": "same", "chosen": "on", "rejected": "no"}         # these answers have equal lengths
    prepared = corpus(tmp_path, [*ENTRIES, *equal, alike])
    rows = [rows_of(split, 80) for split in prepared.conversations or ()]
    assert sum(int(each.counts.sum()) for each in rows) == len(ENTRIES) + 1
    assert "2 pairs with equal answers omitted" in rows[0].describe()
    read = rows[0].__getitems__([*range(len(rows[0]))])
    assert isinstance(read, Pairs)
    assert len(read.numbers) == int(rows[0].counts.sum())


def test_pairs_that_all_have_equal_answers_are_refused(tmp_path: Path) -> None:
    prepared = corpus(tmp_path, [entry | {"rejected": entry["chosen"]} for entry in ENTRIES])
    assert prepared.conversations is not None
    with pytest.raises(UserError, match="the chosen and rejected answers of a pair must differ"):
        rows_of(prepared.conversations[0], 80)
