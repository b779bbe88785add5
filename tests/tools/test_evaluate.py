"""Tests evaluation: scores match the definition in passes of any size, and wrong inputs are refused in one sentence."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from losing import dropping, with_unknown
from models import small_model
from programs import Run, one_sentence
from tokenizer_files import KINDS

from rwkv import evaluation
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError
from rwkv.io import utf8
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer
from rwkv.tools._scored_texts import read_answers, read_last_words

ROOT = Path(__file__).parent.parent.parent
TEXT = "def main(self):\n    return 'naïve café', \"你好, 世界\"  # 😀\n" * 3
SPACED = CharTokenizer("ab ")
EVALUATED = ("checkpoint=model.ckpt", "kernel=conv1d")


@pytest.fixture(scope="module")
def model() -> RWKV:
    return small_model("conv1d", 320)


@pytest.fixture(scope="module")
def words_model() -> RWKV:
    return small_model("conv1d", SPACED.vocab_size, seed=3)


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path) -> None:
    """Writes a checkpoint and a text for `run`, which starts programs in tmp_path."""
    small_model("conv1d", SPACED.vocab_size).save_pretrained(tmp_path / "model.ckpt", SPACED)
    small_model("conv1d", 256).save_pretrained(tmp_path / "bytes.ckpt", ByteTokenizer())
    (tmp_path / "text.txt").write_text("ab ba aabb " * 9)


def test_the_last_word_continues_its_text(tmp_path: Path) -> None:
    """The ids are those of the whole text, so no second space precedes the word."""
    (tmp_path / "words.jsonl").write_text('{"text": "bad fed cab"}\n')
    for text in KINDS.values():
        tokenizer = JsonTokenizer(text)
        word, = read_last_words(tokenizer, tmp_path / "words.jsonl", [])
        assert word.ids == tokenizer.encode("bad fed cab")


def nats(model: RWKV, before: list[int], ids: list[int]) -> list[float]:
    """Returns the negative log probability of each of `ids` after `before`, from one pass and a float64 softmax."""
    logits, _ = model(torch.tensor([before + ids]))
    logs = torch.log_softmax(logits[0].double(), -1)
    return [-logs[len(before) - 1 + place, token].item() for place, token in enumerate(ids)]


# A text


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_len", [1, 7, 10 ** 6])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), JsonTokenizer.train([TEXT], 320)], ids=["byte", "bpe"])
def test_a_text_is_predicted_token_by_token_whatever_the_passes(model: RWKV, tokenizer: Tokenizer, chunk_len: int,
                                                                tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 13 bytes split some characters in two."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(utf8, "BLOCK", 13)
    monkeypatch.setattr(evaluation, "MAX_LOGITS", 1000)
    expected = nats(model, [0], tokenizer.encode(TEXT))
    scores = list(evaluation.score_text(model, tokenizer, path, [0], chunk_len))
    assert sum(tokens for tokens, _ in scores) == evaluation.count_tokens(tokenizer, path)[0] == len(expected)
    assert max(tokens for tokens, _ in scores) <= chunk_len
    assert sum(more for _, more in scores) == pytest.approx(sum(expected), rel=1e-5)


def test_json_that_is_evaluated_as_plain_text_is_announced(run: Run) -> None:
    Path("conversations.json").write_text('[\n {"messages": []}]')
    for data, announced in (("conversations.json", True), ("text.txt", False)):
        status, _, error = run("evaluate", "checkpoint=bytes.ckpt", "kernel=conv1d", f"data.path={data}")
        assert (status, f"WARNING: {data} is JSON" in error) == (0, announced)


def test_the_context_before_a_text_is_not_predicted(model: RWKV, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc")
    (score,) = evaluation.score_text(model, ByteTokenizer(), path, [10, 11], 5)
    assert score == (3, pytest.approx(sum(nats(model, [10, 11], list(b"abc"))), rel=1e-5))


def test_the_result_is_one_line_of_json(run: Run) -> None:
    status, output, error = run("evaluate", *EVALUATED, "data.path=text.txt", "out=a,b=c.json", "chunk_len=10")
    result = json.loads(output.splitlines()[-1])
    assert (status, json.loads(Path("a,b=c.json").read_text())) == (0, result)
    assert "loss " in error
    assert result["loss"] == pytest.approx(result["bits_per_byte"] * math.log(2), rel=1e-6), "a character is a byte here"
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert {key: result[key] for key in ("task", "tokens", "bytes", "tokenizer_hash", "kernel")} == {
        "task": "text", "tokens": 99, "bytes": 99, "tokenizer_hash": SPACED.hash, "kernel": "conv1d"}
    again = json.loads(run("evaluate", *EVALUATED, "data.path=text.txt", "kernel=reference")[1])
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_loses_the_file_but_not_the_result(run: Run) -> None:
    status, output, error = run("evaluate", *EVALUATED, "data.path=text.txt", "out=/dev/full")
    assert status == 2
    assert json.loads(output)["tokens"] == 99
    assert "error: " in error
    assert "out=/dev/full" in error
    assert "Traceback" not in error


def test_bits_per_byte_count_bytes_and_not_tokens(model: RWKV) -> None:
    score = evaluation.TextScore(tokens=10, bytes=40, nats=20 * math.log(2)).as_dict()
    assert (score["bits_per_byte"], score["loss"]) == (pytest.approx(0.5), pytest.approx(2 * math.log(2)))


def test_a_perplexity_beyond_every_float_is_null(run: Run) -> None:
    assert evaluation.TextScore(1, 1, 1e6).as_dict()["perplexity"] is None
    assert evaluation.Score(texts=1, nats=1e6).word_metrics()["perplexity"] is None


def test_a_model_that_has_diverged_is_reported(run: Run) -> None:
    broken = small_model("conv1d", SPACED.vocab_size)
    with torch.no_grad():
        broken.head.weight.fill_(3e38)
    broken.save_pretrained("model.ckpt", SPACED)
    status, output, error = run("evaluate", *EVALUATED, "data.path=text.txt")
    assert (status, output) == (2, "")
    assert "not finite" in error


# Last words

TEXTS = [f"{context} {word}" for context in ("a", "b b", "ab ba " * 9, "aaa bbb ab", "ba") for word in ("a", "b", "ab")]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts) + "\n")
    return path


def score_one(model: RWKV, text: str) -> tuple[float, bool]:
    """Returns the nats of the last word, and True if greedy decoding writes this word, token by token."""
    context, _, word = text.rpartition(" ")
    before, right = [0, *SPACED.encode(context)], True
    ids = SPACED.encode(f" {word}")
    total = sum(nats(model, before, ids))
    for token in ids:
        logits, _ = model(torch.tensor([before]))
        right = right and logits[0, -1].argmax().item() == token
        before = [*before, token]
    return total, right


@pytest.mark.thorough
@pytest.mark.parametrize(("batch_size", "chunk_len"), [(1, 1000), (4, 1000), (100, 1000), (4, 1), (100, 7)])
def test_last_words_are_scored_in_batches_as_alone(words_model: RWKV, batch_size: int, chunk_len: int, tmp_path: Path) -> None:
    expected = [score_one(words_model, text) for text in TEXTS]
    words = read_last_words(SPACED, write_texts(tmp_path / "texts.jsonl", TEXTS), [0])
    scores = list(evaluation.score_texts(words_model, words, batch_size, chunk_len))
    assert sum(score.texts for score in scores) == len(TEXTS)
    assert max(score.texts for score in scores) == min(batch_size, len(TEXTS))
    assert sum(score.right for score in scores) == sum(right for _, right in expected)
    assert sum(score.nats for score in scores) == pytest.approx(sum(total for total, _ in expected), rel=1e-5)


def test_a_word_that_the_model_would_generate_is_correct(words_model: RWKV) -> None:
    context = [0, *SPACED.encode("ab")]
    likely = []
    for _ in range(3):
        likely.append(int(words_model(torch.tensor([context + likely]))[0][0, -1].argmax()))
    other = [*likely[:-1], (likely[-1] + 1) % SPACED.vocab_size]
    words = [evaluation.EvaluatedSequence.with_ending(context, ids) for ids in (likely[:1], likely, other)]
    assert [score.right for score in evaluation.score_texts(words_model, words, 1, 100)] == [1, 1, 0]


def test_last_words_from_the_command_line(run: Run, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", [*TEXTS, "a b  \n"])
    status, output, error = run("evaluate", *EVALUATED, "data.path=texts.jsonl")
    result = json.loads(output)
    assert status == 0
    assert (result["task"], result["words"]) == ("last_word", len(TEXTS) + 1)
    assert 0 <= result["accuracy"] <= 1 < result["perplexity"]
    assert "accuracy " in error
    write_texts(tmp_path / "texts.jsonl", [*TEXTS, "a b"])
    stripped = json.loads(run("evaluate", *EVALUATED, "data.path=texts.jsonl")[1])
    assert stripped["perplexity"] == pytest.approx(result["perplexity"]), "spaces at the end must not count"
    shifted = json.loads(run("evaluate", *EVALUATED, "data.path=texts.jsonl", "start=ab a")[1])
    assert shifted["perplexity"] != pytest.approx(result["perplexity"])


# A tokenizer that loses text


@pytest.mark.parametrize(("tokenizer", "unknown"), [(dropping("ab \n"), 0), (with_unknown("ab \n"), 10)],
                         ids=["dropping", "unknown"])
def test_bits_per_byte_of_a_text_that_the_tokenizer_lost_are_withheld(run: Run, tokenizer: Tokenizer, unknown: int) -> None:
    small_model("conv1d", tokenizer.vocab_size).save_pretrained("model.ckpt", tokenizer)
    Path("text.txt").write_text("ab ba aabb é\n" * 10, encoding="utf-8")
    status, output, error = run("evaluate", *EVALUATED, "data.path=text.txt")
    result = json.loads(output)
    assert (status, result["bits_per_byte"], result["lost_bytes"], result["unknown_tokens"]) == (0, None, 20, unknown)
    assert (result["bytes"], result["tokens"]) == (140, 120 + unknown)
    assert "WARNING" in error
    Path("text.txt").write_text("ab ba aabb \n" * 100 + "é", encoding="utf-8")
    status, output, error = run("evaluate", *EVALUATED, "data.path=text.txt")
    result = json.loads(output)
    assert (status, result["lost_bytes"]) == (0, 2)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * result["tokens"] / math.log(2) / 1202)
    assert "WARNING" in error


def test_a_text_that_the_tokenizer_loses_is_not_called_an_empty_file(run: Run) -> None:
    small_model("conv1d", 320).save_pretrained("model.ckpt", dropping("x"))
    Path("text.txt").write_text("ab ba", encoding="utf-8")
    one_sentence(run("evaluate", *EVALUATED, "data.path=text.txt"), "100 %")


def test_a_last_word_that_the_tokenizer_loses_is_not_correct(run: Run, tmp_path: Path) -> None:
    """Characters that the tokenizer drops have no ids to predict, but the word must not count as right."""
    small_model("conv1d", 320).save_pretrained("model.ckpt", dropping("ab"))
    write_texts(tmp_path / "texts.jsonl", ["ab éé", "a ûû"])
    status, output, error = run("evaluate", *EVALUATED, "data.path=texts.jsonl")
    result = json.loads(output)
    assert (status, result["accuracy"], result["perplexity"], result["lost_bytes"]) == (0, 0, None, 8)
    assert "WARNING" in error


@pytest.mark.programs
def test_answers_that_are_lost_are_counted(run: Run) -> None:
    tokenizer = dropping(set("User: Assistant\nab"))
    small_model(generation="rwkv7", vocab_size=tokenizer.vocab_size).save_pretrained("talker.safetensors", tokenizer)
    Path("conversations.jsonl").write_text(json.dumps({"prompt": "é", "completion": "abéé"}))
    status, output, _ = run("evaluate", "checkpoint=talker.safetensors", "data.path=conversations.jsonl", "device=cpu",
                            "data.template=world")
    assert (status, json.loads(output)["lost_bytes"]) == (0, 4)


# Errors of one sentence

GOOD = b'{"text": "a b"}\n'
WRONG_TEXTS = {
    "empty": (b"", r"x\.txt"),
    "not UTF-8": (b"ab\xffab", r"x\.txt.*byte 2.*0xff"),
    "cut": ("abé".encode()[:-1], r"x\.txt.*byte 2.*0xc3"),
    "foreign": (b"ab zebra", "'e', 'r', 'z'"),
}
WRONG_LINES = {
    "no texts": (b"\n\n", r"x\.jsonl"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", r"x\.jsonl is a Git LFS pointer"),
    "not JSON": (GOOD * 2 + b"{text: a}\n", r"line 3 .*x\.jsonl"),
    "no text": (GOOD + b'\n{"txt": "a b"}', r"line 3 .*x\.jsonl"),
    "a list": (b'["a b"]', "line 1 "),
    "a number": (b'{"text": 3}', "line 1 "),
    "bad bytes": (GOOD + b'{"text": "a \xff"}', "line 2 "),
    "nested": (b"[" * 99999, "line 1 "),
    "one word": (GOOD + b'{"text": "ab"}', "line 2 "),
    "spaces": (b'{"text": "  "}', "line 1 "),
    "foreign": (GOOD + b'{"text": "a z"}', "line 2 .*'z'"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_TEXTS.values(), ids=WRONG_TEXTS)
def test_a_wrong_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        evaluation.count_tokens(SPACED, tmp_path / "x.txt")


@pytest.mark.parametrize(("content", "message"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_last_words(SPACED, tmp_path / "x.jsonl", [0])


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "data.path"),
    (("data.path=absent.txt",), "data.path=absent.txt"),
    (("data.path=.",), "data.path=."),
    (("data.path=text.txt", "out=absent/x.json"), "absent"),
    (("data.path=text.txt", "chunk_len=0"), "chunk_len"),
    (("path=text.txt",), "data.path"),
    (("data=text",), "data.path"),
    (("data.path=text.txt", "tokenizer=byte"), "tokenizer=byte"),
])
def test_a_mistake_is_reported_in_one_sentence(run: Run, arguments: tuple[str, ...], message: str) -> None:
    one_sentence(run("evaluate", *EVALUATED, *arguments), message)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_text_shorter_than_two_tokens_is_predicted_from_the_end_of_text(run: Run, encoding: str) -> None:
    """A byte order mark is not part of the text."""
    Path("x.txt").write_text("a", encoding)
    result = json.loads(run("evaluate", *EVALUATED, "data.path=x.txt")[1])
    assert (result["tokens"], result["bytes"]) == (1, 1)
    assert result["loss"] == pytest.approx(nats(small_model("conv1d", SPACED.vocab_size), [0], SPACED.encode("a"))[0], rel=1e-5)


def restore_sigint() -> None:
    """Restores SIGINT, because a shell starts its background jobs, such as these tests, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.programs
def test_ctrl_c_ends_the_program_without_a_result(tmp_path: Path) -> None:
    small_model("conv1d", 256).save_pretrained(tmp_path / "model.ckpt", ByteTokenizer())
    (tmp_path / "text.txt").write_text("some text " * 100_000)
    command = [sys.executable, "-m", "rwkv.tools.evaluate", f"checkpoint={tmp_path / 'model.ckpt'}", "kernel=conv1d",
               f"data.path={tmp_path / 'text.txt'}", f"out={tmp_path / 'out.json'}", "chunk_len=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=restore_sigint) as process:
        assert process.stderr is not None
        assert process.stderr.read(3), "the progress bar"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert error.endswith("interrupted\n")
    assert "Traceback" not in error
    assert not (tmp_path / "out.json").exists()


def test_answers_are_scored_alone(tmp_path: Path) -> None:
    """Scores of a padded batch in short passes match a pass over each conversation alone."""
    conversations = [("a", "b"), ("a longer question", "and an answer"), ("c", "d")]
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": question, "completion": answer}) for question, answer in conversations))
    model, tokenizer = small_model(generation="rwkv7", vocab_size=256), ByteTokenizer()
    expected, count = 0.0, 0
    for question, answer in conversations:
        prompt, answer_bytes = f"User: {question}\n\nAssistant:".encode(), f" {answer}\n\n\0".encode()
        ids = torch.tensor([[*prompt, *answer_bytes]])
        with torch.no_grad():
            logits = model(ids)[0][0, len(prompt) - 1:-1]
        expected += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt):], reduction="sum").item()
        count += len(answer_bytes)
    scores = list(evaluation.score_texts(model, read_answers(tokenizer, path, chat_template("world")), 2, 5))
    assert sum(score.texts for score in scores) == 3
    assert sum(score.tokens for score in scores) == count
    assert sum(score.nats for score in scores) == pytest.approx(expected, rel=1e-5)


@pytest.mark.programs
def test_conversations_are_rendered_with_the_checkpoint_s_template(run: Run) -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    Path("conversations.jsonl").write_text(json.dumps({"messages": conversation}))
    model = small_model(generation="rwkv7", vocab_size=256)
    for name, answer in (("rwkv7-g1k-0.1b.safetensors", " <think>\nc\n</think>\nb\n\n"), ("other.safetensors", " b\n\n")):
        model.save_pretrained(name, ByteTokenizer())
        status, output, error = run("evaluate", f"checkpoint={name}", "data.path=conversations.jsonl", "device=cpu")
        result = json.loads(output)
        assert (status, result["task"], result["tokens"]) == (0, "answers", len(answer) + 1)
        assert error.count("chat template: ") == 1
    Path("conversations.jsonl").write_text('{"prompt": "a"}')
    one_sentence(run("evaluate", "checkpoint=other.safetensors", "data.path=conversations.jsonl", "device=cpu",
                     "data.template=world"), "conversations.jsonl, line 1")
