"""Tests that copies of a document are in one split, whatever the format of the documents, and are counted."""

import dataclasses
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from binidx_files import write
from hypothesis import assume, given
from hypothesis import strategies as st

from rwkv.config import DataConfig
from rwkv.data.documents.copies import Splitter, fingerprint, place_in_order, repeated_share
from rwkv.data.documents.source import Document, in_validation
from rwkv.data.prepare import Corpus, prepare
from rwkv.tokenizer.tokenizers import ByteTokenizer

TEXTS = [f"Document {number} has {number * number % 97} words and {'more ' * (number % 5)}ends." for number in range(60)]
THRICE = [text for _ in range(3) for text in random.Random(7).sample(TEXTS, len(TEXTS))]
Writer = Callable[[Path, list[str]], DataConfig]


def config_of(folder: Path, name: str, path: Path | str, **options: object) -> DataConfig:
    config = DataConfig(name=name, path=str(path), tokenizer="byte", cache_dir=str(folder / "cache"))
    return dataclasses.replace(config, **options)


def as_lines(folder: Path, texts: list[str]) -> DataConfig:
    (folder / "t.jsonl").write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return config_of(folder, "jsonl", folder / "t.jsonl")


def as_compressed_list(folder: Path, texts: list[str]) -> DataConfig:
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps([{"text": text} for text in texts]).encode()))
    return config_of(folder, "jsonl", folder / "t.jsonl.gz")


def as_files(folder: Path, texts: list[str]) -> DataConfig:
    for number, text in enumerate(texts):
        (folder / "shelf" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (folder / "shelf" / f"{number}.txt").write_text(text)
    return config_of(folder, "text", folder / "shelf")


def as_separated_text(folder: Path, texts: list[str]) -> DataConfig:
    (folder / "t.txt").write_text("\n<|endoftext|>\n".join(texts))
    return config_of(folder, "text", folder / "t.txt", separator="<|endoftext|>")


def as_binidx(folder: Path, texts: list[str]) -> DataConfig:
    write(folder / "t", [[*text.encode(), 0] for text in texts])
    return config_of(folder, "binidx", folder / "t")


def as_conversations(folder: Path, texts: list[str]) -> DataConfig:
    (folder / "t.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": "Go on"}, {"role": "assistant", "content": text}]}) + "\n" for text in texts))
    return config_of(folder, "chat", folder / "t.jsonl")


KINDS: list[Writer] = [as_lines, as_compressed_list, as_files, as_separated_text, as_binidx, as_conversations]


def documents(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Returns the texts of the documents in (training, validation)."""
    splits = (np.split(split[:], split.starts[1:]) for split in (corpus.train, corpus.val))
    train, val = (["".join(map(chr, ids.tolist())).strip("\0") for ids in split] for split in splits)
    return train, val


@pytest.mark.parametrize("written", KINDS)
def test_no_document_is_in_both_splits(tmp_path: Path, written: Writer) -> None:
    corpus = prepare(written(tmp_path, THRICE), 16)
    train, val = documents(corpus)
    assert not {*train} & {*val}
    assert len(train) + len(val) == len(THRICE)
    assert corpus.copies == 2 * len(TEXTS)
    assert 0.05 < corpus.val_share < 0.2
    again = prepare(written(tmp_path, THRICE), 16)
    assert (documents(again), again.copies) == ((train, val), corpus.copies)


@pytest.mark.parametrize("written", KINDS)
def test_documents_that_differ_are_divided_as_before(tmp_path: Path, written: Writer) -> None:
    corpus = prepare(written(tmp_path, TEXTS), 16)
    assert corpus.copies == 0
    train, val = documents(corpus)
    assert len(train) + len(val) == len(TEXTS)
    assert 0.05 < corpus.val_share < 0.2


@pytest.mark.parametrize("written", KINDS)
def test_training_on_nothing_but_equal_documents(tmp_path: Path, written: Writer) -> None:
    """The plan warns of equal documents (tests/training/plan/test_plan.py), except where a document is divided."""
    corpus = prepare(written(tmp_path, [TEXTS[4]] * 20), 2)
    assert min(len(corpus.train), len(corpus.val)) > 2


@pytest.mark.parametrize("written", [as_lines, as_files, as_separated_text, as_conversations])
def test_documents_that_differ_only_in_white_space_are_copies(tmp_path: Path, written: Writer) -> None:
    corpus = prepare(written(tmp_path, [*TEXTS, *(text.replace(" ", "  ") + "\r\n\n" for text in TEXTS)]), 16)
    train, val = ({" ".join(text.split()) for text in split} for split in documents(corpus))
    assert not train & val
    assert corpus.copies == len(TEXTS)


def test_pairs_that_share_an_answer_are_in_one_split(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
    swapped = [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs[::2]]
    others = [{**pair, "rejected": "another"} for pair in pairs]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in [*pairs, *others, *swapped]))
    corpus = prepare(config_of(tmp_path, "chat", tmp_path / "t.jsonl"), 64, ByteTokenizer(), pairs=True)
    train, val = documents(corpus)
    assert not {*train} & {*val}
    assert len(train) + len(val) == 2 * 100
    assert corpus.copies == 60


def test_a_text_that_repeats_itself_is_noticed() -> None:
    lines = [f"line {n} of a text that is long enough to be compared\n" for n in range(100)]

    def share(train: list[str], val: list[str]) -> float:
        return repeated_share(iter([Document(train, False, ""), Document(val, True, "")]))

    assert share(["".join(lines)], ["}\n", "".join(lines[:20])]) == 1.0
    assert share([text[:30] for text in lines], lines[:20]) < 1.0
    assert share(lines[:50], lines[25:75]) == pytest.approx(0.5, abs=0.01)
    assert share(lines[:50], lines[50:]) == 0.0
    assert share([], ["}\n"]) == 0.0


@given(texts=st.lists(st.integers(0, 9), min_size=1, max_size=60), fraction=st.floats(0.01, 0.99))
def test_each_text_has_one_split(texts: list[int], fraction: float) -> None:
    splitter = Splitter(fraction)
    placed = [splitter.place(text) for text in texts]
    first = dict(zip(reversed(texts), reversed(placed), strict=True))
    plain = dict(zip(first, in_validation(fraction), strict=False))
    for number, (text, place) in enumerate(zip(texts, placed, strict=True)):
        assert place.val == first[text].val
        assert place.copy == (text in texts[:number])
    assert [first[text].val for text in dict.fromkeys(texts)] == [val for _, val in zip(
        dict.fromkeys(texts), in_validation(fraction), strict=False)]
    assert splitter.distinct == len(plain)


@given(texts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=2, max_size=30), fraction=st.floats(0.01, 0.99))
def test_files_in_order_reach_the_fraction_with_their_copies(texts: list[tuple[int, int]], fraction: float) -> None:
    sizes = dict(texts)
    names = [text for text, _ in texts]
    assume(len(sizes) > 1)
    placed = place_in_order(names, [sizes[name] for name in names], fraction)
    val = {name for name, place in zip(names, placed, strict=True) if place.val}
    assert val
    assert val < {*names}
    assert all(place.val == (name in val) for name, place in zip(names, placed, strict=True))
    reached = sum(sizes[name] for name in names if name in val)
    assert reached >= fraction * sum(sizes[name] for name in names) or len(val) == len(sizes) - 1


def test_a_fingerprint_does_not_depend_on_chunks_or_white_space() -> None:
    text = "a lamp — lit\nat nine"
    assert fingerprint([text]) == fingerprint(text) == fingerprint(["a  lamp—lit", " at\tnine\r\n"])
    assert fingerprint([text]) != fingerprint([text + "!"])
    assert fingerprint(["half \ud800"]) != fingerprint(["half"])
