"""Tests that benchmarks/speculation.py measures real passes and generated texts."""

import json
from pathlib import Path

import pytest
from models import following, small_model

from benchmarks import speculation
from kernels import native
from rwkv.errors import UserError
from rwkv.generation.draft import NGram
from rwkv.generation.row import Row
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "BUDGET_S", 0.01)
    monkeypatch.setattr(speculation, "PROMPT", 20)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str, str]:
    """Returns the paths of a text, of a model that continues the text, and of a different model."""
    circle = "abcdefghijklmn"
    (tmp_path / "text.txt").write_text(circle * 20)
    following(256, [*f"{circle}a".encode()], n_embd=64).save_pretrained(tmp_path / "model.ckpt", ByteTokenizer())
    small_model(vocab_size=256).save_pretrained(tmp_path / "draft.ckpt", ByteTokenizer())
    return str(tmp_path / "text.txt"), str(tmp_path / "model.ckpt"), str(tmp_path / "draft.ckpt")


def test_passes_of_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    speculation.main(["--shapes", "6,64,50", "--dtypes", "bfloat16,int8"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "int8"]
    assert all(f"{n} tokens, ms" in row for row in rows for n in (1, 4, 5, 8))


def test_passes_with_and_without_a_draft(pair: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text, model, draft = pair
    accepted = {}
    for name in ("ngram", draft):
        speculation.main(["--tokens", "30", "--draft", text, model, name, "--dtypes", "int8", "--prompts", "2"])
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        assert [row["temperature"] for row in rows] == [0, 1]
        accepted[name] = rows[0]["accepted"], rows[0]["tokens per pass"]
    assert accepted["ngram"][0] == 1
    assert accepted["ngram"][1] > 1
    assert accepted[draft][0] < 0.5


def test_a_draft_that_changes_a_text_is_an_error(pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self: NGram, row: Row, n: int) -> list[int]:
        row.sample.text += "changed"
        return []

    monkeypatch.setattr(NGram, "propose", propose)
    with pytest.raises(UserError, match="changes the text"):
        speculation.main(["--tokens", "30", "--draft", *pair[:2], "ngram", "--dtypes", "int8", "--prompts", "1"])
