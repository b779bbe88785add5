"""Conversations: their forms, what is learnt of them letter by letter, packing without padding to spare and without leaks."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from models import each_generation, small_model
from tokenizer_files import chatml

from rwkv.config import DataConfig, OptimConfig, TrainerConfig
from rwkv.data.conversations import ConversationRows, Packed, RowSampler, marked, packed_rows
from rwkv.data.documents import DocumentChunks, SegmentDataset, SegmentSampler, StepLayout
from rwkv.data.loaders import DataModule
from rwkv.data.prepare import Corpus, prepare
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED
from rwkv.training.callbacks.metrics import Metrics
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

TALKS = [("Say ä.", "Ä!"), ("One?", "1"), ("And now a longer question?", "A longer answer."),
         ("Bye", "Goodbye, and thank you.")]


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def corpus(folder: Path, lines: list[Any], **options: Any) -> Corpus:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "talks.jsonl").write_text(text, encoding="utf-8")
    config = DataConfig(name="chat", path=str(folder / "talks.jsonl"), cache_dir=str(folder / "cache"),
                        **{"tokenizer": "byte", "val_fraction": 0.2, **options})
    return prepare(config, 64)


@pytest.fixture
def talks(tmp_path: Path) -> Corpus:
    return corpus(tmp_path, [{"messages": messages(*talk)} for talk in TALKS])


def test_what_is_learnt_is_the_answers_letter_by_letter(talks: Corpus) -> None:
    """The first conversation is for validation; byte tokens are letters."""
    assert talks.conversations is not None
    train, val = talks.conversations
    for split, chosen in ((train, TALKS[1:]), (val, TALKS[:1])):
        expected = "".join(f"User: {question}\n\nAssistant:" + "\1" + f" {answer}\n\n\0" + "\2" for question, answer in chosen)
        ids, flags, learnt = [], [], 0
        for byte in expected.encode():
            if byte in (1, 2):
                learnt = int(byte == 1)
            else:
                ids.append(byte)
                flags.append(learnt)
        assert split.tokens[:].tolist() == ids
        assert split.learnt[:].tolist() == flags
        assert split.learnt_bytes == sum(flags) - len(chosen)        # without end_of_text
    assert next(marked(train, talks.tokenizer)) == "User: One?\n\nAssistant:[[ 1\n\n<end of text>]]"


@pytest.mark.parametrize("line", [
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]},
    {"prompt": "One?", "completion": "1"},
    {"prompt": messages("One?", "1")[:1], "completion": messages("One?", "1")[1:]},
])
def test_all_forms_are_the_same_conversation(tmp_path: Path, line: Any) -> None:
    found = corpus(tmp_path, [{"messages": messages(*TALKS[0])}, line])
    assert found.conversations is not None
    assert next(marked(found.conversations[0], found.tokenizer)) == "User: One?\n\nAssistant:[[ 1\n\n<end of text>]]"


@pytest.mark.parametrize(("line", "said"), [
    ("{", "line 2 is not JSON"), ({"text": "a"}, "line 2: a conversation has messages, conversations, or prompt"),
    ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]\.content is a string"),
    ({"messages": [{"role": "user", "content": "a"}]}, "line 2: the conversation has no answer"),
    ({"conversations": [{"from": "he", "value": "a"}]}, r"line 2: conversations\[0\]\.from is one of"),
    ({"prompt": "a", "completion": "\0"}, "line 2: .*U\\+0000"),
])
def test_a_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"talks.jsonl, {said}"):
        corpus(tmp_path, [{"messages": messages(*TALKS[0])}, line, {"messages": messages(*TALKS[1])}])


def test_special_tokens_that_the_template_writes_are_tokens(tmp_path: Path) -> None:
    """What is typed is text, also where it has the name of one; both are shown by their names."""
    template, file = tmp_path / "chatml.jinja", tmp_path / "tokenizer.json"
    template.write_text("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    file.write_text(chatml())
    talks = [{"messages": messages("a <|im_end|> b", "c <|im_start|>")}] * 2
    found = corpus(tmp_path, talks, template=str(template), tokenizer=str(file))
    start, end = (found.tokenizer.special[name] for name in ("<|im_start|>", "<|im_end|>"))
    ids, learnt = found.train[:].tolist(), found.conversations[0].learnt[:].tolist() if found.conversations else []
    assert [token for token in ids if token in (start, end)] == [start, end, start, end]
    assert [learnt[place] for place, token in enumerate(ids) if token in (start, end)] == [0, 0, 0, 1]
    assert found.sizes.train_bytes == len("<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"
                                          "c <|im_start|><|im_end|>\n")
    shown, = marked(found.conversations[0], found.tokenizer) if found.conversations else ()
    assert shown.startswith("<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n[[c <|im_start|><|im_end|>")


def test_one_conversation_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 1 conversations"):
        corpus(tmp_path, [{"messages": messages(*TALKS[0])}])


def test_the_cache_is_read_again_and_a_damaged_one_made_anew(tmp_path: Path) -> None:
    lines = [{"messages": messages(*talk)} for talk in TALKS]
    first = corpus(tmp_path, lines).train[:].tolist()
    ids, = (tmp_path / "cache").glob("chat-*/train.ids")
    made = ids.stat().st_mtime_ns
    assert corpus(tmp_path, lines).train[:].tolist() == first
    assert ids.stat().st_mtime_ns == made
    ids.write_bytes(b"")
    assert corpus(tmp_path, lines).train[:].tolist() == first


def test_rows_hold_every_text_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 500).tolist()
    rows = packed_rows(lengths, 128)
    assert sorted(text for row in rows for text in row) == list(range(500))
    assert all(sum(min(lengths[text], 128) for text in row) <= 128 for row in rows)
    assert len(rows) * 128 <= 1.02 * sum(min(length, 128) for length in lengths)


def rows_of(talks: Corpus, ctx_len: int = 64) -> ConversationRows:
    assert talks.conversations is not None
    return ConversationRows(*talks.conversations[0][:2], ctx_len)


def test_a_batch_has_the_answers_as_targets(talks: Corpus) -> None:
    rows = rows_of(talks)
    batch = rows.__getitems__([0, 1])
    for x, y in zip(batch.x, batch.y, strict=True):
        counts = y != IGNORED
        assert torch.equal(y[:-1][counts[:-1]], x[1:][counts[:-1]] * (x[1:][counts[:-1]] != ord("U")))      # 0 ends a text
    assert int((batch.y != IGNORED).sum()) == rows.counts[:2].sum()
    assert rows.__getitems__([len(rows)]).x.equal(rows.__getitems__([0]).x)


def test_a_long_conversation_is_cut(talks: Corpus) -> None:
    rows = rows_of(talks, 30)
    assert rows.cut == 2
    assert "2 longer than model.ctx_len=30 are cut" in rows.describe()


def learner(generation: str) -> LanguageModel:
    model = small_model(generation=generation, vocab_size=256)
    return LanguageModel(model, OptimConfig(l2_wrap=0.0), 10, 1.0)


@each_generation
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_packed_rows_equal_one_conversation_a_row(talks: Corpus, generation: str, checkpointed: bool) -> None:
    """Losses to 1e-6, and gradients."""
    task, batch = learner(generation), rows_of(talks, 100).__getitems__([0, 1])
    if checkpointed:
        prepare_blocks(task.model, TrainerConfig(activation_checkpointing=True))
    packed = task.training_step(batch, 0)
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in task.model.named_parameters()
                 if parameter.grad is not None}
    task.zero_grad()
    alone, count = torch.zeros(()), int((batch.y != IGNORED).sum())
    for x, y, starts in zip(*batch[:3], strict=True):
        bounds = [*starts.nonzero()[:, 0].tolist(), len(x)]
        for begin, end in pairwise(bounds):
            counted = int((y[begin:end] != IGNORED).sum())
            alone = alone + task.loss(x[None, begin:end], y[None, begin:end]) * counted / count
    alone.backward()
    assert packed.item() == pytest.approx(alone.item(), abs=1e-6)
    for name, parameter in task.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@each_generation
def test_nothing_leaks_between_conversations_to_the_bit(talks: Corpus, generation: str) -> None:
    """Other words of the same length in the conversation before change no bit of this one."""
    task, batch = learner(generation), rows_of(talks, 100).__getitems__([0, 1])
    row = int((batch.starts.sum(1) > 2).nonzero()[0])
    second = int(batch.starts[row].nonzero()[1])
    before = task.model.forward_features(batch.x, batch.starts)[row]
    batch.x[row, :second] = torch.randint(1, 256, (second,))
    after = task.model.forward_features(batch.x, batch.starts)[row]
    assert torch.equal(after[second:], before[second:])
    assert not torch.equal(after[:second], before[:second])


def test_weights_make_the_mean_over_a_step(talks: Corpus) -> None:
    """Two processes with two accumulated batches of one row: the weighted means are the mean over all targets."""
    rows = rows_of(talks, 40)
    counts = rows.counts[np.arange(4) % len(rows)] if len(rows) < 4 else rows.counts
    samplers = [iter(RowSampler(counts, 1, 4, seed=0, rank=rank, world=2, parts=2)) for rank in range(2)]
    for _ in range(2):
        step = [next(sampler) for _ in range(2) for sampler in samplers]
        total = sum(counts[number % len(counts)] for each in step for number in each.numbers)
        for each in step:
            own = sum(counts[number % len(counts)] for number in each.numbers)
            assert each.weight / 4 == pytest.approx(own / total)


def test_tbptt_reads_conversations_whole(talks: Corpus) -> None:
    """From the beginning of a segment, and with the answers alone as targets."""
    learnt = talks.learnt
    chunks = DocumentChunks(talks.train, 0, 8, streams=3, learnt=learnt)
    plan = next(iter(SegmentSampler(chunks, 16, StepLayout(3), 1, seed=0)))
    read = SegmentDataset(talks.train, 8, learnt).__getitems__(plan)
    assert learnt is not None
    assert int((read.y != IGNORED).sum()) == sum(segment.counted for row in plan.rows for segment in row)
    answers = bytes(read.y[read.y > 0].tolist()).decode()
    for _, answer in TALKS[1:]:
        assert f" {answer}\n\n" in answers
    assert "User" not in answers
    assert isinstance(DataModule(talks, DataConfig(batch_size=1), 100, 0).val_dataloader().dataset.__getitems__([0]), Packed)


def test_the_throughput_of_tbptt_is_that_of_all_tokens(talks: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts too, which are not learnt; without the padding. Here of one epoch that takes two seconds."""
    chunks = DocumentChunks(talks.train, 0, 8, streams=1, learnt=talks.learnt)
    plan = next(iter(SegmentSampler(chunks, int(chunks.segments.sum()), StepLayout(1), 1, seed=0)))
    batch = SegmentDataset(talks.train, 8, talks.learnt).__getitems__(plan)
    assert batch.x.numel() > len(talks.train)
    clock = iter([0.0, 2.0, 2.0])
    monkeypatch.setattr("rwkv.training.callbacks.metrics.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trainer, task = SimpleNamespace(global_step=1, accumulate_grad_batches=1, loggers=[]), learner("rwkv4")
    metrics = Metrics(log_every=1)
    metrics.on_train_start(cast(Any, trainer), task)
    metrics.on_train_batch_end(cast(Any, trainer), task, {"loss": torch.zeros(())}, batch, 0)
    assert metrics.latest["tok_per_sec"] == len(talks.train) / 2
