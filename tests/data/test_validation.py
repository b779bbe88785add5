"""Tests of validation on a part of the split: the first tokens, with their own bytes and their own gzip -9."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv.config import DataConfig
from rwkv.data.conversations import ConversationRows
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.validation import limit_validation
from rwkv.data.windows import Windows

LINE = "größer als — 你好, and then plain text\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("part")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{number} {LINE}" * 20, encoding="utf-8")
    return prepare(DataConfig(name="text", path=str(folder), tokenizer="char", val_fraction=0.5,
                              cache_dir=str(folder / "cache")), 16)


@pytest.fixture(scope="module")
def chat_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("talks")
    conversations = [{"messages": [{"role": "user", "content": "hi " * (90 if number == 0 else 3)},
                                   {"role": "assistant", "content": f"answer ü {number}"}]} for number in range(20)]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in conversations), encoding="utf-8")
    return prepare(DataConfig(name="chat", path=str(folder / "conversations.jsonl"), tokenizer="byte", val_fraction=0.5,
                              template="world", cache_dir=str(folder / "cache")), 64)


@given(st.integers(1, 6000), st.integers(1, 70))
def test_the_part_is_the_beginning_of_the_split(text: Corpus, tokens: int, ctx_len: int) -> None:
    part, whole = limit_validation(text, tokens, ctx_len), text.val[:].tolist()
    expected = whole[:tokens + 1]
    assert part.val[:].tolist() == expected
    assert part.val.starts.tolist() == [start for start in text.val.starts.tolist() if start < len(expected)]
    assert part.sizes.val_tokens == len(expected)
    x, y = Windows(part.val, ctx_len, partial=True).__getitems__(list(range(-(-(len(expected) - 1) // ctx_len))))
    assert (y.flatten() >= 0).sum() == len(expected) - 1
    assert x.flatten()[:len(expected) - 1].tolist() == expected[:-1]
    if tokens + 1 < len(whole):
        content = text.tokenizer.decode(expected).encode()
        assert part.val_bytes_per_token == len(content) / tokens
        assert part.sizes.gzip_bpb == pytest.approx(8 * len(gzip.compress(content, 9)) / len(content), rel=0.3)
    else:
        assert part is text


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_character_cut_by_the_end_counts_its_bytes_before_the_end(tmp_path: Path, tokens: int) -> None:
    """The first id is end_of_text, and each of the others is a byte."""
    (tmp_path / "text.txt").write_text("你好世界" * 40, encoding="utf-8")
    corpus = prepare(DataConfig(name="text", path=str(tmp_path / "text.txt"), tokenizer="byte", val_fraction=0.5,
                                cache_dir=str(tmp_path / "cache")), 16)
    assert limit_validation(corpus, tokens, 16).val_bytes_per_token == 1


@given(st.integers(1, 900), st.sampled_from([8, 64, 512]))
def test_a_part_of_conversations_has_only_whole_ones_with_an_answer(chat_corpus: Corpus, tokens: int, ctx_len: int) -> None:
    """The first conversation's answer begins after 270 bytes, so a row of 64 tokens ends before the answer."""
    part = limit_validation(chat_corpus, tokens, ctx_len)
    assert part.conversations is not None
    assert chat_corpus.conversations is not None
    ids, learnt, *_ = part.conversations[1]
    whole = chat_corpus.conversations[1]
    assert ids[:].tolist() == whole.tokens[:len(ids)].tolist()
    assert len(ids) in [*whole.tokens.starts.tolist(), len(whole.tokens)]
    assert len(ids) >= min(tokens, len(whole.tokens))
    assert part.val_bytes_per_token > 0
    if ctx_len > 8:
        assert ConversationRows(ids, learnt, ctx_len).counts.sum() > 0


def test_without_a_limit_nothing_is_cut(text: Corpus, chat_corpus: Corpus) -> None:
    assert limit_validation(text, None, 16) is text
    assert limit_validation(chat_corpus, 10**9, 16) is chat_corpus


def test_the_cache_is_the_same(text: Corpus, tmp_path: Path) -> None:
    assert limit_validation(text, 10, 16).sha256 == text.sha256
