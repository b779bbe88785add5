"""Pairs of answers: their forms, what is learnt of them, their rows, and what is refused."""

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
from rwkv.data.pairs import PairRows, Pairs, rows_of
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.sources.chat import parts_of_pair
from rwkv.data.validation import limit_validation
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED
from rwkv.tokenizer.tokenizers import ByteTokenizer

ASKED = {"role": "user", "content": "ask"}
GOOD, BAD = ({"role": "assistant", "content": said} for said in ("good", "bad"))
SYSTEM = {"role": "system", "content": "be brief"}
FIRST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, ASKED]


def messages(parts: list[tuple[str, bool]]) -> tuple[str, str]:
    """The text, and the part of it that is trained on."""
    return "".join(text for text, _ in parts), "".join(text for text, learnt in parts if learnt)


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": "good", "rejected": "bad"},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [ASKED], "chosen": "good", "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "ask", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"question": "ask", "chosen": "good", "rejected": "bad", "score": 3, "system": ""},
    {"instruction": "ask", "input": "", "chosen": "good", "rejected": "bad"},
    {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},
    {"conversations": [{"from": "human", "value": "ask"}], "chosen": {"from": "gpt", "value": "good"},
     "rejected": {"from": "gpt", "value": "bad"}},
])
def test_every_form_is_the_same_pair(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    chosen, rejected = parts_of_pair(entry, "here", template)
    for parts, answer in ((chosen, GOOD), (rejected, BAD)):
        assert messages(parts) == messages(template.parts([ASKED, answer]))


@pytest.mark.parametrize("entry", [
    {"prompt": FIRST, "chosen": [GOOD], "rejected": [BAD]}, {"chosen": [*FIRST, GOOD], "rejected": [*FIRST, BAD]},
    {"prompt": "ask", "history": [["hi", "hello"]], "chosen": "good", "rejected": "bad"},
])
def test_the_answers_that_both_begin_with_are_not_learnt(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    for parts, answer in zip(parts_of_pair(entry, "here", template), (GOOD, BAD), strict=True):
        text, learnt = messages(parts)
        assert text == messages(template.parts([*FIRST, answer]))[0]
        assert learnt == messages(template.parts([ASKED, answer]))[1]


def test_what_follows_the_first_difference_is_learnt() -> None:
    """An answer in several turns; and two equal conversations differ in nothing but have an answer each."""
    later = [GOOD, {"role": "user", "content": "more"}, GOOD]
    chosen, rejected = parts_of_pair({"prompt": "ask", "chosen": later, "rejected": "bad"}, "here", chat_template("world"))
    assert messages(chosen)[1].count("good") == 2
    assert "bad" in messages(rejected)[1]
    same = parts_of_pair({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "here", chat_template("world"))
    assert all("good" in messages(parts)[1] for parts in same)


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "system": "be brief"},
    {"prompt": "ask", "chosen": "good", "rejected": "bad", "system": "be brief"},
    {"prompt": [SYSTEM, ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]},
    {"prompt": "ask", "chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]},
])
def test_the_system_message_is_part_of_the_prompt(entry: dict[str, Any]) -> None:
    template = chat_template("world")
    for parts, answer in zip(parts_of_pair(entry, "here", template), (GOOD, BAD), strict=True):
        assert messages(parts) == messages(template.parts([SYSTEM, ASKED, answer]))


@pytest.mark.parametrize("said", ["1", "[1, 2]", '{"a": 1}', "null"])
def test_an_answer_that_is_json_stays_a_text(said: str) -> None:
    chosen, _ = parts_of_pair({"prompt": "ask", "chosen": said, "rejected": "bad"}, "here", chat_template("world"))
    assert said in messages(chosen)[1]


@pytest.mark.parametrize("entry", [
    {"prompt": "ask", "chosen": "good"}, {"prompt": "ask", "completion": "good"}, {"chosen": "good", "rejected": "bad"},
    {"chosen": "good", "rejected": "bad", "system": "be brief"}, {"prompt": "ask", "chosen": 3, "rejected": "bad"},
    {"prompt": "other", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}, {"chosen": [ASKED], "rejected": [ASKED]},
    {"prompt": "ask", "chosen": [GOOD, ASKED], "rejected": [BAD]}, {"prompt": "ask", "chosen": [], "rejected": [BAD]},
])
def test_what_is_no_pair_is_refused_with_its_place(entry: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        parts_of_pair(entry, "here", chat_template("world"))
    assert "here: " in str(error.value)


def corpus(folder: Path, entries: list[dict[str, Any]], **options: Any) -> Corpus:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, entries)))
    config = DataConfig(name="chat", path=str(folder / "pairs.jsonl"), cache_dir=str(folder / "cache"), **options)
    return prepare(config, 64, ByteTokenizer(), pairs=True)


ENTRIES: list[dict[str, Any]] = [{"prompt": f"{n}?", "chosen": f"{n}" * (1 + n % 3), "rejected": "no"} for n in range(12)]


def test_both_texts_of_a_pair_are_in_one_split(tmp_path: Path) -> None:
    left_out = {"prompt": "?", "chosen": [GOOD | {"weight": 0}], "rejected": "no"}
    found = corpus(tmp_path, [*ENTRIES[:3], left_out, *ENTRIES[3:], ENTRIES[0] | {"weight": 0}], val_fraction=0.25)
    assert found.conversations is not None
    train, val = found.conversations
    assert (len(train.tokens.starts), len(val.tokens.starts)) == (18, 6)
    assert train.left_out == 4           # texts
    for split in found.conversations:
        texts = [*annotated_conversations(split, ByteTokenizer())]
        questions = [text.partition("[[")[0] for text in texts]
        assert questions[::2] == questions[1::2]
        assert all("no" in text.partition("[[")[2] for text in texts[1::2])
        assert not any("no" in text for text in texts[::2])
    assert found.val_bytes_per_token is None


def test_pairs_and_conversations_of_one_file_are_cached_apart(tmp_path: Path) -> None:
    entries = [entry | {"completion": "yes"} for entry in ENTRIES]
    pairs = corpus(tmp_path, entries)
    talks = prepare(DataConfig(name="chat", path=str(tmp_path / "pairs.jsonl"), cache_dir=str(tmp_path / "cache")), 64,
                    ByteTokenizer())
    assert pairs.conversations is not None
    assert talks.conversations is not None
    assert len(pairs.conversations[0].tokens.starts) == 2 * len(talks.conversations[0].tokens.starts)
    assert not talks.conversations[0].paired


@pytest.mark.parametrize("val_tokens", [1, 60, 10_000])
def test_a_part_of_the_held_out_pairs_is_whole_pairs(tmp_path: Path, val_tokens: int) -> None:
    whole = corpus(tmp_path, ENTRIES, val_fraction=0.5)
    part = limit_validation(whole, val_tokens, 64)
    assert part.conversations is not None
    assert part.conversations[1].paired
    assert len(part.conversations[1].tokens.starts) % 2 == 0
    assert len(rows_of(part.conversations[1], 64)) > 0


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(3, 20), st.integers(3, 20)), min_size=1, max_size=12), T=st.integers(8, 48))
def test_rows_hold_whole_pairs_once(tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], T: int) -> None:
    """Each pair that fits is in one row, chosen and then rejected; the others are counted."""
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
    again = rows.__getitems__([len(rows)])                               # of the next epoch
    assert torch.equal(again.x, rows.__getitems__([0]).x)


def test_pairs_that_are_too_long_are_said(tmp_path: Path) -> None:
    found = corpus(tmp_path, [*ENTRIES, {"prompt": "long", "chosen": "x" * 200, "rejected": "no"}])
    assert found.conversations is not None
    assert "1 pair longer than model.ctx_len=80" in rows_of(found.conversations[0], 80).describe()
    assert "omitted" not in rows_of(found.conversations[0], 500).describe()


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    """Equal as the model reads them: the template strips the second one's space."""
    equal = [{"prompt": "same", "chosen": "no", "rejected": answer} for answer in ("no", " no ")]
    alike = {"prompt": "same", "chosen": "on", "rejected": "no"}         # of equal length
    found = corpus(tmp_path, [*ENTRIES, *equal, alike])
    rows = [rows_of(split, 80) for split in found.conversations or ()]
    assert sum(int(each.counts.sum()) for each in rows) == len(ENTRIES) + 1
    assert "2 pairs with equal answers omitted" in rows[0].describe()
    read = rows[0].__getitems__([*range(len(rows[0]))])
    assert isinstance(read, Pairs)
    assert len(read.numbers) == int(rows[0].counts.sum())


def test_where_all_answers_are_equal_there_is_nothing_to_prefer(tmp_path: Path) -> None:
    found = corpus(tmp_path, [entry | {"rejected": entry["chosen"]} for entry in ENTRIES])
    assert found.conversations is not None
    with pytest.raises(UserError, match="the chosen and rejected answers of a pair must differ"):
        rows_of(found.conversations[0], 80)
