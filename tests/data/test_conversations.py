"""Tests of conversations: their formats, the exact parts that are trained on, and packing with little padding and no leaks."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from losing import dropping
from models import each_generation, small_model
from tokenizer_files import chatml

from rwkv.config import DataConfig, OptimConfig, TrainerConfig
from rwkv.data.conversations import ConversationRows, Packed, RowSampler, Whole, annotated_conversations, packed_rows
from rwkv.data.loaders import DataModule
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.tbptt_segments import DocumentChunks, SegmentDataset, SegmentSampler
from rwkv.data.windows import StepLayout
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

CONVERSATIONS = [("Say ä.", "Ä!"), ("One?", "1"), ("And now a longer question?", "A longer answer."),
                 ("Bye", "Goodbye, and thank you.")]


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def corpus(folder: Path, lines: list[Any], **options: Any) -> Corpus:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "conversations.jsonl").write_text(text, encoding="utf-8")
    return read(folder / "conversations.jsonl", folder, **options)


def read(path: Path, folder: Path, **options: Any) -> Corpus:
    options = {"tokenizer": "byte", "val_fraction": 0.2, "cache_dir": str(folder / "cache"), **options}
    return prepare(DataConfig(name="chat", path=str(path), **options), 64)


@pytest.fixture
def chat_corpus(tmp_path: Path) -> Corpus:
    return corpus(tmp_path, [{"messages": messages(*turns)} for turns in CONVERSATIONS])


def test_exactly_the_letters_of_answers_are_trained_on(chat_corpus: Corpus) -> None:
    """The first conversation is for validation, and each token is a byte."""
    assert chat_corpus.conversations is not None
    train, val = chat_corpus.conversations
    for split, chosen in ((train, CONVERSATIONS[1:]), (val, CONVERSATIONS[:1])):
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
        assert split.learnt_bytes == sum(flags) - len(chosen)        # end_of_text has no bytes
    assert next(annotated_conversations(train, chat_corpus.tokenizer)) == "User: One?\n\nAssistant:[[ 1\n\n<end of text>]]"


@pytest.mark.parametrize("line", [
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]},
    {"prompt": "One?", "completion": "1"},
    {"prompt": messages("One?", "1")[:1], "completion": messages("One?", "1")[1:]},
    {"messages": None, "conversations": [{"from": "Human", "value": "One?"}, {"from": "Assistant", "value": "1"}]},
    {"conversations": messages("One?", "1"), "tools": "[]", "system": None},
    {"messages": [{"role": "human", "content": "One?"}, {"role": "model", "content": "1", "weight": 1}], "tools": None},
    {"messages": json.dumps(messages("One?", "1")), "weight": 1}, {"items": messages("One?", "1"), "tools": ""},
    {"conversation": [{"from": "user", "value": "One?", "role": None}, {"from": "bot", "value": "1", "content": None}]},
    {"instruction": "One?", "input": "", "output": "1"}, {"question": "One?", "answer": "1"},
    {"system_prompt": "", "question": "One?", "response": "1"},
    {"query": "One?", "response": "1", "history": []}, {"prompt": "One?", "response": "1", "messages": []},
])
def test_all_formats_give_the_same_conversation(tmp_path: Path, line: Any) -> None:
    actual = corpus(tmp_path, [{"messages": messages(*CONVERSATIONS[0])}, line])
    assert actual.conversations is not None
    assert texts_of(actual) == ["User: One?\n\nAssistant:[[ 1\n\n<end of text>]]"]


def texts_of(data: Corpus) -> list[str]:
    assert data.conversations is not None
    return list(annotated_conversations(data.conversations[0], data.tokenizer))


@pytest.mark.parametrize(("line", "text"), [
    ({"instruction": "Add.", "input": "1 1", "output": "2"}, "User: Add.\n1 1\n\nAssistant:[[ 2\n\n"),
    ({"instruction": "Add.", "context": "1 1", "response": "2"}, "User: Add.\n1 1\n\nAssistant:[[ 2\n\n"),
    ({"query": "b", "response": "no", "history": [["a", "yes"]], "system": "s"},
     "System: s\n\nUser: a\n\nAssistant:[[ yes\n\n]]User: b\n\nAssistant:[[ no\n\n"),
    ({"system": "s", "messages": messages("a", "yes")}, "System: s\n\nUser: a\n\nAssistant:[[ yes\n\n"),
    ({"prompt": [*messages("a", "yes"), *messages("b", "")[:1]], "completion": "no"},
     "User: a\n\nAssistant: yes\n\nUser: b\n\nAssistant:[[ no\n\n"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "BAD", "weight": 0},
                        {"from": "human", "value": "b"}, {"from": "gpt", "value": "no", "weight": 1}]},
     "User: a\n\nAssistant: BAD\n\nUser: b\n\nAssistant:[[ no\n\n"),
    ({"messages": [*messages("a", "yes"), *({**message, "loss": False} for message in messages("b", "BAD"))]},
     "User: a\n\nAssistant:[[ yes\n\n]]User: b\n\nAssistant: BAD\n\n<end of text>"),
])
def test_the_trained_parts_of_other_formats(tmp_path: Path, line: Any, text: str) -> None:
    actual = corpus(tmp_path, [{"messages": messages(*CONVERSATIONS[0])}, line])
    assert texts_of(actual) == [text if text.endswith("<end of text>") else f"{text}<end of text>]]"]


@pytest.mark.parametrize("form", ["OpenAI's", "OpenAI's in strings", "OpenAI's older one", "ShareGPT's"])
def test_calls_are_learnt_and_tools_and_results_are_not(tmp_path: Path, form: str) -> None:
    """All formats give the same text, the one that the server shows to a model."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}
    call = {"name": "f", "arguments": {"x": "ä"}}
    as_text = {**call, "arguments": json.dumps(call["arguments"])}
    tools, tool_call = [{"type": "function", "function": function}], {"id": "1", "type": "function", "function": as_text}
    user, answer = messages("a", "yes")
    result, turn = {"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "assistant", "content": None}
    line: dict[str, Any] = {
        "OpenAI's": {"messages": [user, {**turn, "tool_calls": [tool_call]}, result, answer], "tools": tools},
        "OpenAI's in strings": {"messages": [user, {**turn, "tool_calls": json.dumps([tool_call])}, result, answer],
                                "tools": json.dumps(tools)},
        "OpenAI's older one": {"messages": [user, {**turn, "function_call": as_text}, {**result, "role": "function"}, answer],
                               "functions": [function]},
        "ShareGPT's": {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(call)},
                                         {"from": "observation", "value": "3"}, {"from": "gpt", "value": "yes"}],
                       "tools": json.dumps([function])}}[form]
    actual = corpus(tmp_path, [{"messages": messages(*CONVERSATIONS[0])}, line], template="g1")
    assert texts_of(actual) == ['System: Tools:\n[\n{"name":"f","arguments":{"x":{}}}\n]\nReturn only a JSON function call.\n\n'
                                'User: a\n\nAssistant:[[ ```json\n{"name":"f","arguments":{"x":"ä"}}\n```\n\n]]'
                                "User: Function output:\n3\n\nAssistant:[[ yes\n\n<end of text>]]"]


def test_tools_that_a_template_cannot_show_are_named_with_their_line(tmp_path: Path) -> None:
    conversation = {"messages": messages("a", "yes")}
    for template, tool, words in (("world", {"name": "f"}, "tools.*g1"), ("g1", {"x": 1}, r"tools\[0\] must be .* a name")):
        with pytest.raises(UserError, match=f"line 2: {words}"):
            corpus(tmp_path, [conversation, {**conversation, "tools": [tool]}], template=template)


def test_an_end_of_text_that_the_template_names_ends_the_conversation_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(chatml())
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")
    lines = [{"messages": messages("a", "b")}, {"messages": messages("c", "d")}]
    actual = corpus(tmp_path, lines, tokenizer=str(tmp_path / "tokenizer.json"), template=str(tmp_path / "t.jinja"),
                    end_of_text="<|im_end|>")
    assert actual.conversations is not None
    assert [*annotated_conversations(actual.conversations[0], actual.tokenizer)] == ["c<end of text>[[d<end of text>]]"]


@pytest.mark.parametrize(("template", "text"), [
    ("{% for m in messages %}{% if m.role == 'user' %}{{ '[Q]' + m.content + '[/Q]' }}{% else %}{{ m.content + eos_token }}"
     "{% endif %}{% endfor %}", "[Q]a[/Q][[yes<end of text>]][Q]b[/Q][[no<end of text>]]"),
    ("{% for m in messages %}{{ '@' + m.role + m.content + '@end' }}{% endfor %}{{ '@assistant' }}",
     "@usera@end@assistant[[yes@end]]@userb@end@assistant[[no@end<end of text>]]"),
    ("{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
     "<user>a<end of text><assistant>[[yes<end of text>]]<user>b<end of text><assistant>[[no<end of text>]]"),
])
def test_eos_token_is_the_end_of_text(tmp_path: Path, template: str, text: str) -> None:
    """The ids have one end of text after each answer, and no second one at the end.

    A char tokenizer is made from the text without end-of-text.
    """
    (tmp_path / "t.jinja").write_text(template)
    conversation = {"messages": [*messages("a", "yes"), *messages("b", "no")]}
    actual = corpus(tmp_path, [conversation] * 3, template=str(tmp_path / "t.jinja"), tokenizer="char")
    assert texts_of(actual) == [text, text]
    assert actual.conversations is not None
    assert actual.conversations[1].bytes == len(text.replace("<end of text>", "").replace("[[", "").replace("]]", ""))


def test_a_conversation_without_an_answer_to_learn_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = [{"messages": messages(*turns)} for turns in CONVERSATIONS]
    expected = corpus(tmp_path, lines)
    bad = {**lines[0], "weight": 0}
    question, answer = messages("?", "BAD")
    rejected = {"prompt": "a", "completion": "BAD", "label": False}
    without = [{"messages": [question]}, {"conversations": []}, {"messages": None}, {"conversations": "[]", "system": "s"},
               {"prompt": "a", "completion": None}, {"prompt": [question], "completion": None, "chosen": None}]
    actual = corpus(tmp_path, [bad, rejected, *lines[:2], {"messages": [question, {**answer, "weight": 0}]}, *without,
                               *lines[2:]])
    assert (texts_of(actual), actual.val[:].tolist()) == (texts_of(expected), expected.val[:].tolist())
    assert actual.conversations is not None
    assert actual.conversations[0].left_out == 3 + len(without)
    assert f"{3 + len(without)} others omitted" in actual.describe()
    with pytest.raises(UserError):
        corpus(tmp_path, [bad, lines[0], bad])
    with pytest.raises(UserError):
        corpus(tmp_path, without)


@pytest.mark.parametrize(("name", "content"), [
    ("t.json", lambda entries: json.dumps(entries).encode()),
    ("t.jsonl", lambda entries: ("\n [" + ",\n".join(map(json.dumps, entries)) + "]\n").encode()),
    ("t.json", lambda entries: b"\xef\xbb\xbf" + json.dumps(entries, indent=1).encode()),
    ("t.json.gz", lambda entries: gzip.compress(json.dumps(entries).encode())),
    ("t.json.zst", lambda entries: pytest.importorskip("zstandard").compress(json.dumps(entries).encode())),
    ("t.json", lambda entries: "\n".join(map(json.dumps, entries)).encode()),
    ("t.jsonl", lambda entries: b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, entries)).encode()),
], ids=["list", "list in .jsonl", "indented list with a byte order mark", "list in gz", "list in zst", "lines in .json",
        "lines with crlf"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_json_list_is_read_like_lines(tmp_path: Path, name: str, content: Any, folder: bool) -> None:
    lines = [{"messages": messages(*turns)} for turns in CONVERSATIONS]
    expected = corpus(tmp_path, lines)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content(lines))
    path = tmp_path / "data" if folder else tmp_path / "data" / name
    actual = read(path, tmp_path)
    assert texts_of(actual) == texts_of(expected)
    assert actual.val[:].tolist() == expected.val[:].tolist()


def test_a_folder_with_json_lines_is_read_without_its_json_files(tmp_path: Path) -> None:
    """The .json files may describe the data. The line about the data says that they are ignored."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    (tmp_path / "data" / "t.jsonl").write_text("\n".join(json.dumps({"messages": messages(*turns)}) for turns in CONVERSATIONS))
    actual = read(tmp_path / "data", tmp_path)
    assert len(texts_of(actual)) == len(CONVERSATIONS) - 1
    assert "1 .json files are ignored" in actual.describe()


@pytest.mark.parametrize(("content", "words"), [
    (b'[{"messages": 3}]', "entry 1: messages must be a list"), (b"[]", "has 0 conversations")])
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "t.json", tmp_path)


@pytest.mark.parametrize(("line", "words"), [
    ("{", "line 2 is not JSON"), ({"body": "a"}, 'line 2: a conversation must have the fields "messages", "con'),
    ({"text": "User: a\n\nAssistant: b"}, "line 2: a conversation must .* data=jsonl"),
    ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]\.content must be a string"),
    ({"conversations": [{"from": "he", "value": "a"}]}, r"line 2: conversations\[0\]\.from must be one of"),
    ({"prompt": "a", "completion": "\0"}, "line 2: .*U\\+0000"),
    ({"messages": [*messages("a", "b")[:1], {"role": "assistant", "content": "b", "weight": 0.5}]},
     r"line 2: messages\[1\]\.weight must be 0 or 1"),
    ({"messages": messages("a", "b"), "weight": 0.5}, "line 2: weight must be 0 or 1"),
    ({"messages": messages("a", "b"), "tools": "f(x)"}, "line 2: tools must be a list of objects"),
    ({"messages": [*messages("a", "b")[:1], {"role": "assistant", "content": None}]}, r"line 2: messages\[1\]\.content"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}], "system": "s"},
     r"line 2: conversations\[1\]\.value"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f()"}]},
     r"line 2: conversations\[1\]\.value must be a tool call"),
    ({"conversation": [{"human": "a", "assistant": "b"}]},
     r'line 2: conversation\[0\] must have the field "role" or "from"; got human'),
    ({"prompt": "a", "chosen": "b"}, "line 2: .*got prompt, chosen"),
    ({"question": "a", "context": "c", "answer": "b"}, 'line 2: the fields "question" and "answer" conflict with "context"'),
    ({"prompt": "a", "completion": 4}, "line 2: completion must be a string"),
    ({"prompt": "a", "completion": "b", "history": 4}, "line 2: history must be a list of pairs"),
    ({"prompt": "a", "completion": None, "chosen": "b", "rejected": "c"}, "line 2: a pair .* requires tune.objective=dpo"),
])
def test_a_bad_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"conversations.jsonl, {words}"):
        corpus(tmp_path, [{"messages": messages(*CONVERSATIONS[0])}, line, {"messages": messages(*CONVERSATIONS[1])}])


def test_special_tokens_that_the_template_writes_are_tokens(tmp_path: Path) -> None:
    """What a user types is text, even if it is the name of a special token. The preview shows both by name."""
    template, file = tmp_path / "chatml.jinja", tmp_path / "tokenizer.json"
    template.write_text("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
                        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    file.write_text(chatml())
    conversations = [{"messages": messages("a <|im_end|> b", "c <|im_start|>")}] * 2
    actual = corpus(tmp_path, conversations, template=str(template), tokenizer=str(file))
    start, end = (actual.tokenizer.special[name] for name in ("<|im_start|>", "<|im_end|>"))
    ids, learnt = actual.train[:].tolist(), actual.conversations[0].learnt[:].tolist() if actual.conversations else []
    assert [token for token in ids if token in (start, end)] == [start, end, start, end]
    assert [learnt[place] for place, token in enumerate(ids) if token in (start, end)] == [0, 0, 0, 1]
    assert actual.sizes.train_bytes == len("<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"
                                           "c <|im_start|><|im_end|>\n")
    annotated, = annotated_conversations(actual.conversations[0], actual.tokenizer) if actual.conversations else ()
    assert annotated.startswith("<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n[[c <|im_start|><|im_end|>")


def test_the_cache_is_used_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    lines = [{"messages": messages(*turns)} for turns in CONVERSATIONS]
    first = corpus(tmp_path, lines).train[:].tolist()
    ids, = (tmp_path / "cache").glob("chat-*/train.ids")
    written_at = ids.stat().st_mtime_ns
    assert corpus(tmp_path, lines).train[:].tolist() == first
    assert ids.stat().st_mtime_ns == written_at
    ids.write_bytes(b"")
    assert corpus(tmp_path, lines).train[:].tolist() == first


def test_a_cache_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*data\.cache_dir must be a writable folder"):
        corpus(tmp_path, [{"messages": messages(*turns)} for turns in CONVERSATIONS],
               cache_dir=str(tmp_path / "file" / "cache"))


def test_what_the_tokenizer_loses_is_counted_and_bits_of_lost_answers_are_withheld(tmp_path: Path) -> None:
    text = "".join(f"User: {question} Assistant: {answer}\n" for question, answer in CONVERSATIONS)
    letters = sorted(set(text) - set("äÄ"))
    (tmp_path / "letters.json").write_text(dropping(letters).definition)
    lines = [{"messages": messages(*turns)} for turns in CONVERSATIONS]
    actual = corpus(tmp_path, lines, tokenizer=str(tmp_path / "letters.json"))
    assert actual.conversations is not None
    both = [actual.conversations[split].lost.bytes for split in (0, 1)]
    answers = [actual.conversations[split].learnt_lost.bytes for split in (0, 1)]
    assert (sum(both), sum(answers)) == (4, 2)
    assert [actual.conversations[split].lost.of for split in (0, 1)] == [actual.sizes.train_bytes, actual.sizes.val_bytes]
    assert (actual.val_bytes_per_token is None) == (answers[1] > 0)
    assert actual.describe_lost()
    assert corpus(tmp_path, lines, tokenizer=str(tmp_path / "letters.json")).sizes == actual.sizes, "from the cache"


def test_rows_have_every_text_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 500).tolist()
    rows = packed_rows(lengths, 128)
    assert sorted(text for row in rows for text in row) == list(range(500))
    assert all(sum(min(lengths[text], 128) for text in row) <= 128 for row in rows)
    assert len(rows) * 128 <= 1.02 * sum(min(length, 128) for length in lengths)


def rows_of(chat_corpus: Corpus, ctx_len: int = 64) -> ConversationRows:
    assert chat_corpus.conversations is not None
    return ConversationRows(*chat_corpus.conversations[0][:2], ctx_len)


def test_a_batch_has_the_answers_as_targets(chat_corpus: Corpus) -> None:
    rows = rows_of(chat_corpus)
    batch = rows.__getitems__([0, 1])
    for x, y in zip(batch.x, batch.y, strict=True):
        counts = y != IGNORED
        assert torch.equal(y[:-1][counts[:-1]], x[1:][counts[:-1]] * (x[1:][counts[:-1]] != ord("U")))      # 0 ends a text
    assert int((batch.y != IGNORED).sum()) == rows.counts[:2].sum()
    assert rows.__getitems__([len(rows)]).x.equal(rows.__getitems__([0]).x)


def test_a_long_conversation_is_cut(chat_corpus: Corpus) -> None:
    rows = rows_of(chat_corpus, 30)
    assert rows.cut == 2
    assert "2 of these conversations are longer than model.ctx_len=30 and are truncated" in rows.describe()


def learner(generation: str) -> LanguageModel:
    model = small_model(generation=generation, vocab_size=256)
    return LanguageModel(model, OptimConfig(l2_wrap=0.0), 10, 1.0)


@each_generation
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_packed_rows_equal_one_conversation_a_row(chat_corpus: Corpus, generation: str, checkpointed: bool) -> None:
    """Losses and gradients agree within 1e-6."""
    task, batch = learner(generation), rows_of(chat_corpus, 100).__getitems__([0, 1])
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
            n_targets = int((y[begin:end] != IGNORED).sum())
            alone = alone + task.loss(x[None, begin:end], y[None, begin:end]) * n_targets / count
    alone.backward()
    assert packed.item() == pytest.approx(alone.item(), abs=1e-6)
    for name, parameter in task.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@each_generation
def test_packed_conversations_do_not_affect_each_other(chat_corpus: Corpus, generation: str) -> None:
    """Other words of the same length in one conversation change no bit of the next."""
    task, batch = learner(generation), rows_of(chat_corpus, 100).__getitems__([0, 1])
    row = int((batch.starts.sum(1) > 2).nonzero()[0])
    second = int(batch.starts[row].nonzero()[1])
    before = task.model.forward_features(batch.x, batch.starts)[row]
    batch.x[row, :second] = torch.randint(1, 256, (second,))
    after = task.model.forward_features(batch.x, batch.starts)[row]
    assert torch.equal(after[second:], before[second:])
    assert not torch.equal(after[:second], before[:second])


def test_batch_weights_give_the_mean_over_a_step(chat_corpus: Corpus) -> None:
    """Two processes with two accumulated batches of one row: the weighted means are the mean over all targets."""
    rows = rows_of(chat_corpus, 40)
    counts = rows.counts[np.arange(4) % len(rows)] if len(rows) < 4 else rows.counts
    samplers = [iter(RowSampler(counts, 1, 4, seed=0, rank=rank, world=2, parts=2)) for rank in range(2)]
    for _ in range(2):
        step = [next(sampler) for _ in range(2) for sampler in samplers]
        total = sum(counts[number % len(counts)] for each in step for number in each.numbers)
        for each in step:
            own = sum(counts[number % len(counts)] for number in each.numbers)
            assert each.weight / 4 == pytest.approx(own / total)


def test_tbptt_reads_conversations_whole(chat_corpus: Corpus) -> None:
    """Each conversation begins a segment, and only its answers are targets."""
    learnt = chat_corpus.learnt
    chunks = DocumentChunks(chat_corpus.train, 0, 8, streams=3, learnt=learnt)
    plan = next(iter(SegmentSampler(chunks, 16, StepLayout(3), 1, seed=0)))
    read = SegmentDataset(chat_corpus.train, 8, learnt).__getitems__(plan)
    assert learnt is not None
    assert int((read.y != IGNORED).sum()) == sum(segment.counted for row in plan.rows for segment in row)
    answers = bytes(read.y[read.y > 0].tolist()).decode()
    for _, answer in CONVERSATIONS[1:]:
        assert f" {answer}\n\n" in answers
    assert "User" not in answers


@each_generation
def test_with_tbptt_validation_reads_conversations_whole(tmp_path: Path, generation: str) -> None:
    """The validation loss is that of each conversation as one sequence, even where no answer begins within ctx_len."""
    cases = ((50, "yes"), (40, "no"), (60, "often"))
    chat_corpus = corpus(tmp_path, [{"messages": messages("a" * n, answer)} for n, answer in cases], val_fraction=0.5)
    assert chat_corpus.conversations is not None
    with pytest.raises(UserError):
        DataModule(chat_corpus, DataConfig(batch_size=2), 16, 0).val_dataloader()
    task = learner(generation)
    nats, count, alone = 0.0, 0, 0.0
    for batch in DataModule(chat_corpus, DataConfig(batch_size=2), 16, 0, tbptt=2).val_dataloader():
        assert isinstance(batch, Whole)
        own = int((batch.y != IGNORED).sum())
        nats, count = nats + task.conversation_loss(batch).item() * own, count + own
        for x, y in zip(batch.x, batch.y, strict=True):
            alone += task.loss(x[None], y[None]).item() * int((y != IGNORED).sum())
    assert count == int(chat_corpus.conversations[1].learnt[:].sum())
    assert nats == pytest.approx(alone, rel=1e-5)


def test_short_conversations_are_validated_in_rows_with_tbptt_too(chat_corpus: Corpus) -> None:
    rows, with_tbptt = (DataModule(chat_corpus, DataConfig(batch_size=1), 100, 0, K).val_dataloader().dataset.__getitems__([0])
                        for K in (0, 2))
    assert isinstance(with_tbptt, Packed)
    assert torch.equal(rows.y, with_tbptt.y)


def test_tbptt_never_divides_a_conversation(chat_corpus: Corpus) -> None:
    """Tests any number of streams."""
    assert len(DocumentChunks(chat_corpus.train, 0, 8, streams=10, learnt=chat_corpus.learnt)) == len(CONVERSATIONS) - 1


def test_the_tokens_of_a_batch_of_tbptt_are_all_but_the_padding(chat_corpus: Corpus) -> None:
    """The throughput counts the tokens of prompts, too, although they are not learnt."""
    chunks = DocumentChunks(chat_corpus.train, 0, 8, streams=1, learnt=chat_corpus.learnt)
    plan = next(iter(SegmentSampler(chunks, int(chunks.segments.sum()), StepLayout(1), 1, seed=0)))
    batch = SegmentDataset(chat_corpus.train, 8, chat_corpus.learnt).__getitems__(plan)
    assert batch.x.numel() > len(chat_corpus.train) == batch.tokens
