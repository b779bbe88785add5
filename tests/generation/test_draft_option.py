"""Tests of the option draft= of generate.py, chat.py and serve.py."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from models import following, small_model
from programs import Run, compose, one_sentence

from kernels import native
from rwkv.chat.turn_templates import chat_template
from rwkv.config import Sampling
from rwkv.generation.conversation import Chat
from rwkv.generation.draft import NGram
from rwkv.generation.row import Row
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.thorough
BYTES = ByteTokenizer()
ARGUMENTS = ("checkpoint=model.pth", "tokenizer=byte", "kernel=reference", "prompt=a", "max_new_tokens=60", "temperature=0")
CIRCLE = [*b"abcdefghijklmna"]
in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes model.pth, a smaller model that generates the same text, a different model, and files that cannot be drafts."""
    following(256, CIRCLE, n_embd=64).save_pretrained(tmp_path / "model.pth", format="pth")
    following(256, CIRCLE, n_embd=16).save_pretrained(tmp_path / "small.pth", format="pth")
    small_model(vocab_size=256, generation="rwkv7").save_pretrained(tmp_path / "other.pth", format="pth")
    small_model(vocab_size=256, n_embd=100).save_pretrained(tmp_path / "wide.pth", format="pth")
    small_model(vocab_size=256, n_embd=12).save_pretrained(tmp_path / "narrow.pth", format="pth")
    small_model(vocab_size=50).save_pretrained(tmp_path / "fifty.pth", format="pth")
    characters = "".join(map(chr, range(300, 555)))
    small_model(vocab_size=256).save_pretrained(tmp_path / "characters.ckpt", CharTokenizer(characters))
    (tmp_path / "cut.pth").write_bytes((tmp_path / "small.pth").read_bytes()[:2000])
    (tmp_path / "text.pth").write_text("no weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("program", ["generate", "chat", "serve"])
def test_programs_accept_a_draft(program: str) -> None:
    config = compose(program, "draft=ngram", "draft_tokens=5")
    assert (config.draft, config.draft_tokens) == ("ngram", 5)
    assert (compose(program).draft, compose(program).draft_tokens) == (None, 8)


@in_c
@pytest.mark.usefixtures("files")
def test_the_text_is_the_same_and_a_line_says_what_was_accepted(run: Run) -> None:
    _, expected, _ = run("generate", *ARGUMENTS)
    assert expected.count("abcdefghijklmn") == 4
    for draft, proposes in (("ngram", True), ("small.pth", True), ("other.pth", True), ("model.pth", False)):
        status, output, error = run("generate", *ARGUMENTS, f"draft={draft}", "draft_tokens=4")
        assert (status, output) == (0, expected)
        assert ("proposed token" in error) == proposes
        assert ("ignored" in error) != proposes
        if draft in ("ngram", "small.pth"):
            accepted, proposed = error.split(" accepted")[0].split(", ")[-1].split(" of ")
            assert int(accepted) == int(proposed.split()[0]) > 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("arguments", "words"), [
    (("draft=absent.pth",), ("draft=absent.pth", "no checkpoint")),
    (("draft=cut.pth",), ("draft=cut.pth",)),
    (("draft=text.pth",), ("draft=text.pth",)),
    (("draft=fifty.pth",), ("draft=fifty.pth", "256", "50")),
    (("draft=characters.ckpt",), ("draft=characters.ckpt", "tokenizer")),
    (("draft=",), ("draft is empty",)),
    (("draft=ngram", "draft_tokens=0"), ("draft_tokens", "at least 1")),
    (("draft=ngram", "draft_tokens=33"), ("draft_tokens", "at most 32")),
    (("draft_tokens=4",), ("draft_tokens requires draft=",))], ids=str)
def test_a_file_that_is_not_a_draft_is_reported_in_one_sentence(run: Run, arguments: tuple[str, ...], words: tuple[str, ...],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the model's weights are loaded."""
    from rwkv.pretrained import RWKV

    monkeypatch.setattr(RWKV, "from_checkpoint", None)
    one_sentence(run("generate", *ARGUMENTS, *arguments), *words)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("checkpoint", "draft"), [("wide.pth", "ngram"), ("wide.pth", "small.pth"),
                                                   ("model.pth", "narrow.pth")])
def test_a_draft_is_ignored_with_a_line_if_pytorch_computes_the_steps(run: Run, checkpoint: str, draft: str) -> None:
    """The C library has no step for widths that are not multiples of 8."""
    arguments = (f"checkpoint={checkpoint}", *ARGUMENTS[1:])
    status, output, error = run("generate", *arguments, f"draft={draft}")
    assert (status, output) == (0, run("generate", *arguments)[1])
    line = next(line for line in error.splitlines() if line.startswith("draft: "))
    assert "ignored" in line
    assert "multiple of 8" in error
    if checkpoint == "wide.pth":
        assert "accepted" not in error


def chat_with(draft: Any) -> Chat:
    model = small_model(generation="rwkv7", vocab_size=256).eval()
    sampling = Sampling(temperature=0.5, banned=(0, *range(128, 256)), logit_bias=dict.fromkeys(b"abc", 4.0))
    return Chat(model, BYTES, chat_template("world"), sampling, 40, draft=draft)


@in_c
def test_answers_of_a_chat_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer is cut, and the penalties are of the whole conversation, all of which the n-grams see."""
    histories = []
    original = NGram.propose

    def record_history(self: NGram, row: Row, n: int) -> list[int]:
        histories.append(bytes(row.known_ids))
        return original(self, row, n)

    monkeypatch.setattr(NGram, "propose", record_history)
    plain, drafted = chat_with(None), chat_with(NGram())
    for turn, text in enumerate(("abcabcabc", "bca", "and then?")):
        for chat in (plain, drafted):
            chat.sampling = dataclasses.replace(chat.sampling, repetition_penalty=1.0 if turn else 1.2)
        assert "".join(drafted.say(text)) == "".join(plain.say(text))
    assert drafted.messages == plain.messages
    assert drafted.stats.proposed >= drafted.stats.accepted > 0
    assert histories[-1].decode() == drafted.template.render(drafted.messages[:-1])
    answer = drafted.say("abc")
    partial_answer = next(answer) + next(answer)
    answer.close()
    assert drafted.messages[-1]["content"] == partial_answer.strip()


@in_c
@pytest.mark.programs
def test_a_server_counts_what_was_accepted(files: Path) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    from serving_runs import serving

    body = {"prompt": "a", "max_tokens": 60, "temperature": 0}
    texts = []
    for options in ((), ("draft=small.pth",)):
        with serving(files, "checkpoint=model.pth", "tokenizer=byte", *options) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            texts.append(answer["choices"][0]["text"])
            accepted = server.metric("timemix_accepted_tokens_total")
            assert accepted <= server.metric("timemix_proposed_tokens_total")
            assert ("draft " in server.log) == bool(options)
            assert (accepted > 0) == bool(options)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 60
