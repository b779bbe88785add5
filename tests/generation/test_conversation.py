"""Tests of conversations: a turn reads only its new words, and answers as if the whole conversation were read anew."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import each_generation, following, small_model, writing
from programs import Run, one_sentence
from tokenizer_files import chatml, sentencepiece_bpe

from rwkv.chat.encoding import encode
from rwkv.chat.turn_templates import chat_template
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation.conversation import Chat
from rwkv.generation.engine import Engine, generate
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.broken_pipe import abandon
from rwkv.io.signals import Signalled
from rwkv.programs.chat import Terminal, _typed_turns
from rwkv.tokenizer.tokenizers import ByteTokenizer, JsonTokenizer

TURNS = ("Hi", "Who are you?", "And then?")


def new_chat(generation: str = "rwkv7", template: str = "world", temperature: float = 0.0) -> Chat:
    """Returns a chat that answers in ASCII alone, so that its texts can be encoded again."""
    model = small_model(generation=generation, vocab_size=256).eval()
    sampling = Sampling(temperature=temperature, banned=(0, *range(128, 256)))
    return Chat(model, ByteTokenizer(), chat_template(template), sampling, 12)


def answer_of(chat: Chat, text: str) -> tuple[str, list[int], Engine]:
    """Says `text`, and asserts that the answer is that of an engine that reads the whole conversation.

    Returns the answer, the ids of the conversation before the answer, and that engine.
    """
    answer = "".join(chat.say(text))
    ids, = encode(chat.tokenizer, [chat.template.render(chat.messages[:-1])])
    alone = Engine(chat.model, chat.tokenizer)
    alone.add_all([Request(ids, 0, StoppingCriteria(12, chat.template.stop), chat.sampling)])
    assert answer == "".join(piece for _, piece in alone)
    return answer, ids, alone


@each_generation
@pytest.mark.parametrize("template", ["world", "g1"])
def test_answers_equal_those_after_the_whole_conversation(generation: str, template: str) -> None:
    chat = new_chat(generation, template)
    for text in TURNS:
        answer, _, _ = answer_of(chat, text)
        assert chat.messages[-1] == {"role": "assistant", "content": answer.strip()}


def test_end_of_text_follows_the_answers_of_a_template_with_eos_token(tmp_path: Path) -> None:
    (tmp_path / "eos.jinja").write_text("{% for m in messages %}{% if m.role == 'user' %}{{ '[Q]' + m.content + '[/Q]' }}"
                                        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}")
    chat = new_chat(template=str(tmp_path / "eos.jinja"))
    for turn, text in enumerate(TURNS):
        _, ids, _ = answer_of(chat, text)
        assert ids.count(chat.tokenizer.end_of_text) == turn


def test_a_turn_reads_only_its_new_words() -> None:
    """The template writes answers as the model did, so no token is read twice."""
    chat = new_chat()
    chat.model.head.weight.data.zero_()                          # all logits are equal, so the bias decides
    chat.sampling = Sampling(temperature=0, logit_bias={ord("x"): 5.0})
    reads = []
    for text in TURNS:
        list(chat.say(text))
        reads.append(chat.stats.read)
    assert chat.messages[-1]["content"] == "x" * 12
    assert reads[0] == len("User: Hi\n\nAssistant:")
    assert all(read <= len(f"Assistant: {'x' * 12}\n\nUser: {text}\n\nAssistant:")
               for read, text in zip(reads[1:], TURNS[1:], strict=True))


def test_special_tokens_of_the_template(tmp_path: Path) -> None:
    """A special token that the model draws ends the answer, but one that the user types is text.

    The next turn reads only its new words.
    """
    tokenizer = JsonTokenizer(chatml())
    start, end = tokenizer.special["<|im_start|>"], tokenizer.special["<|im_end|>"]
    (tmp_path / "chatml.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    model = following(tokenizer.vocab_size, [*tokenizer.encode("\nab"), end, start], n_embd=64)
    chat = Chat(model, tokenizer, chat_template(str(tmp_path / "chatml.jinja")), Sampling(temperature=0), 12)
    for text in ("hi<|im_end|>", "<|im_start|>"):
        assert "".join(chat.say(text)) == "ab"
        after_answer = [*tokenizer.encode("\n"), start, *tokenizer.encode(f"user\n{text}"), end]
    assert chat.stats.read == 1 + len([*after_answer, *tokenizer.encode("\n"), start, *tokenizer.encode("assistant\n")])
    assert chat.messages[-1]["content"] == "ab"


def test_turns_equal_the_whole_conversation_if_words_include_their_space(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(sentencepiece_bpe())
    (tmp_path / "llama.jinja").write_text("{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else "
                                          "m.content + eos_token }}{% endfor %}")
    model = small_model(vocab_size=tokenizer.vocab_size).eval()
    letters = {tokenizer.encode(letter)[-1] for letter in "adefgh"}
    sampling = Sampling(temperature=0, banned=tuple({*range(tokenizer.vocab_size)} - letters))
    chat = Chat(model, tokenizer, chat_template(str(tmp_path / "llama.jinja")), sampling, 12)
    for text in ("bad", "cab"):
        _, _, alone = answer_of(chat, text)
        assert chat._saved_results[-1][1].last_ids == alone.context().last_ids
    assert chat.stats.read == 1 + len(tokenizer.encode("[cab]"))         # 1 is end_of_text


def test_undo_returns_to_a_saved_state() -> None:
    chat = new_chat()
    list(chat.say(TURNS[0]))
    before = list(chat.messages)
    list(chat.say(TURNS[1]))
    first, read = chat.messages[-1], chat.stats.read
    chat.undo()
    assert chat.messages == before
    chat.seed = 1
    list(chat.say(TURNS[1]))
    assert chat.messages[-1] == first
    assert chat.stats.read == 0 or chat.stats.read <= read


def test_retry_reads_nothing_and_uses_another_seed() -> None:
    chat = new_chat(temperature=1.0)
    list(chat.say(TURNS[0]))
    first = chat.messages[-1]
    list(chat.retry())
    assert chat.stats.read == 0
    assert len(chat.messages) == 2
    assert chat.messages[-1] != first


def test_a_stopped_answer_is_a_turn() -> None:
    chat = new_chat(temperature=1.0)
    pieces = chat.say(TURNS[0])
    first = next(pieces)
    pieces.close()                                               # type: ignore[attr-defined]
    assert chat.messages[-1] == {"role": "assistant", "content": first.strip()}
    chat.kept_bytes = 0                                          # only the newest state is kept
    assert "".join(chat.say(TURNS[1]))
    assert len(chat._saved_results) == 1


def test_ctrl_c_while_a_turn_is_read_undoes_the_turn(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.kept_bytes = 0                                          # then /retry must prefill, too
    terminal = Terminal(chat)
    terminal.turn(TURNS[0])
    before = list(chat.messages)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    chat.model.emb.register_forward_hook(interrupted)
    for text in (TURNS[1], "/retry"):
        terminal.turn(text)
        assert "stopped" in capsys.readouterr().err
        assert chat.messages == before


def test_a_signal_that_is_not_ctrl_c_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends a chat while a turn is read, while an answer is generated, and at the prompt."""
    def terminated(*args: object, **named: object) -> None:
        raise Signalled(signal.SIGTERM)

    chat = new_chat()
    hook = chat.model.emb.register_forward_hook(terminated)
    with pytest.raises(Signalled):
        Terminal(chat).turn(TURNS[0])
    hook.remove()
    assert not chat.messages
    monkeypatch.setattr(Engine, "step", terminated)
    with pytest.raises(Signalled):
        Terminal(chat).turn(TURNS[0])
    prompt_toolkit = pytest.importorskip("prompt_toolkit")
    monkeypatch.setattr(prompt_toolkit, "PromptSession", lambda **options: SimpleNamespace(prompt=terminated))
    with pytest.raises(Signalled):
        next(_typed_turns())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_prompt_is_on_the_terminal_if_answers_go_to_a_file(monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    input_ = pytest.importorskip("prompt_toolkit.input")
    application = pytest.importorskip("prompt_toolkit.application")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")     # this terminal does not answer queries
    reader, writer = os.openpty()
    with open(writer, "w") as terminal, input_.create_pipe_input() as keys:              # noqa: PTH123 (a descriptor)
        monkeypatch.setattr(sys, "stderr", terminal)
        with application.create_app_session(input=keys):
            keys.send_text("Hi\r")
            assert next(_typed_turns()) == "Hi"
        assert capsys.readouterr().out == ""
        assert b"> Hi" in os.read(reader, 4096)
        monkeypatch.setenv("TERM", "dumb")       # as in Emacs, which shows escape codes
        with application.create_app_session(input=keys):
            keys.send_text("Ho\r")
            assert next(_typed_turns()) == "Ho"
        shown = os.read(reader, 4096)
        assert b"> Ho" in shown
        assert b"\x1b" not in shown
    os.close(reader)


def test_a_path_is_not_a_command() -> None:
    chat = new_chat()
    assert Terminal(chat).turn("/etc/hosts has which lines?")
    assert chat.messages[0]["content"] == "/etc/hosts has which lines?"


@pytest.mark.skipif(not hasattr(signal, "SIGTSTP"), reason="Windows suspends no programs")
def test_ctrl_z_suspends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the user continues the same line."""
    input_ = pytest.importorskip("prompt_toolkit.input")
    application = pytest.importorskip("prompt_toolkit.application")
    sent = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    with input_.create_pipe_input() as keys, application.create_app_session(input=keys):
        keys.send_text("Hi\x1a there\r")
        assert next(_typed_turns()) == "Hi there"
    assert sent == [(0, signal.SIGTSTP)]


@pytest.mark.parametrize("change", [Chat.undo, Chat.retry])
def test_nothing_to_undo_or_retry(change: Callable[[Chat], object]) -> None:
    with pytest.raises(UserError):
        change(new_chat())


def test_a_reset_keeps_the_system_message() -> None:
    chat = new_chat()
    chat.reset("Be brief.")
    list(chat.say("Hi"))
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    chat.reset("")
    assert not chat.messages


@pytest.mark.parametrize(("setting", "words"), [
    ("seed=2026-02-30", "got '2026-02-30'"),
    ("sampling=mine", "g1_think"),
    ("logit_bias=a", "logit_bias"),
    ("banned=3", "banned"),
    ("banned=[256]", "banned must contain only token ids from 0 to 255; got 256"), ("logit_bias=256:1", "logit_bias"),
    ("max_new_tokens=0", "max_new_tokens must be at least 1; got 0"),
    ("seed=-1", "seed must be at least 0; got -1"),
    (f"seed={2**63 - 1}", "seed must be at most"),       # the next answer's seed would be too large
    ("temperature=-1", "temperature"),
])
def test_a_wrong_setting_is_refused(capsys: pytest.CaptureFixture[str], setting: str, words: str) -> None:
    chat = new_chat()
    before = chat.sampling, chat.max_new_tokens, chat.seed
    assert not Terminal(chat).turn(f"/set {setting}")
    assert words in capsys.readouterr().err
    assert (chat.sampling, chat.max_new_tokens, chat.seed) == before


def test_an_id_outside_the_vocabulary_is_refused_before_the_first_turn() -> None:
    chat = new_chat()
    with pytest.raises(UserError, match="banned"):
        replace(chat, sampling=Sampling(banned=(256,)))


def test_options_of_sampling_are_set_as_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    terminal = Terminal(chat)
    for setting in ("sampling=g1_think", "temperature=0.5", "no_penalty=0 1", "logit_bias=65:2", "banned=[0,1]", "order=rwkv"):
        assert terminal.turn(f"/set {setting}")
    assert "sampling: g1_think: temperature 0.96, top_k 32, top_p 0.76" in capsys.readouterr().err
    assert chat.sampling == Sampling(0.5, 32, 0.76, presence_penalty=1.0, frequency_penalty=0.1, penalty_decay=0.988,
                                     no_penalty=("0 1",), logit_bias={65: 2.0}, banned=(0, 1), order="rwkv")
    assert terminal.turn("/set sampling=greedy")
    assert chat.sampling == Sampling(temperature=0, top_p=1.0)


def test_penalties_count_the_conversation_however_much_of_it_was_read_before(tmp_path: Path) -> None:
    """repetition_penalty counts the whole conversation; the other penalties count only the current answer.

    The penalties are the same after a conversation was saved and loaded.
    """
    def say_last_turn(chat: Chat) -> str:
        chat.sampling = replace(chat.sampling, repetition_penalty=3.0, presence_penalty=1.0, frequency_penalty=0.5,
                                penalty_decay=0.9, no_penalty=(" ", 10))
        chat.seed = 4
        return "".join(chat.say(TURNS[2]))

    first = new_chat(temperature=0.8)
    for text in TURNS[:2]:
        list(first.say(text))
    assert Terminal(first).turn(f"/save {tmp_path / 'talk.json'}")
    again = new_chat(temperature=0.8)
    assert Terminal(again).turn(f"/load {tmp_path / 'talk.json'}")
    answer = say_last_turn(first)
    assert answer == say_last_turn(again)
    assert first.stats.read < again.stats.read
    whole = first.template.render(first.messages[:-1])
    assert answer == "".join(generate(first.model, first.tokenizer, whole, 12, stop=first.template.stop, seed=4, **{
        item.name: getattr(first.sampling, item.name) for item in fields(Sampling)}))


def test_a_conversation_without_messages_is_saved_and_loaded(tmp_path: Path) -> None:
    assert Terminal(new_chat()).turn(f"/save {tmp_path / 'talk.json'}")
    terminal = Terminal(new_chat())
    list(terminal.chat.say("Hi"))
    assert terminal.turn(f"/load {tmp_path / 'talk.json'}")
    assert terminal.chat.messages == []


def test_half_a_character_in_a_saved_conversation_is_replaced(tmp_path: Path) -> None:
    """Some programs cut a text inside an emoji. Such a text can neither be encoded nor saved."""
    (tmp_path / "talk.json").write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}')
    terminal = Terminal(new_chat())
    assert terminal.turn(f"/load {tmp_path / 'talk.json'}")
    assert terminal.chat.messages == [{"role": "user", "content": "a\ufffd"}]
    assert terminal.turn("/system b\udcff")              # a byte that is not UTF-8, as it is typed
    assert terminal.chat.messages == [{"role": "system", "content": "b\ufffd"}]
    assert terminal.turn(f"/save {tmp_path / 'again.json'}")
    assert terminal.turn("Hi")


def test_a_file_that_cannot_be_written_is_a_user_s_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not Terminal(new_chat()).turn(f"/save {tmp_path}")
    assert capsys.readouterr().err == f"error: cannot write {tmp_path}: {os.strerror(errno.EISDIR)}\n"


def test_a_conversation_replaces_a_conversation_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file may be the checkpoint, which the process has mapped. A failed write leaves the old conversation."""
    terminal = Terminal(new_chat())
    model, saved = tmp_path / "model.pth", tmp_path / "talk.json"
    model.write_bytes(b"PK\3\4 weights")
    assert not terminal.turn(f"/save {model}")
    assert model.read_bytes() == b"PK\3\4 weights"
    list(terminal.chat.say("Hi"))
    for _ in range(2):
        assert terminal.turn(f"/save {saved}")
    before = saved.read_bytes()
    list(terminal.chat.say("And?"))
    monkeypatch.setattr(os, "fsync", lambda handle: os.write(-1, b""))   # fails like a full disk
    assert not terminal.turn(f"/save {saved}")
    assert saved.read_bytes() == before
    assert {*tmp_path.iterdir()} == {model, saved}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_the_conversation() -> None:
    """Unlike a mistake in one turn, a full disk leaves no way to continue with the next turn."""
    with Path("/dev/full").open("w", buffering=1, encoding="utf-8") as full, redirect_stdout(full):
        with pytest.raises(OSError) as error:                    # noqa: PT011
            Terminal(new_chat()).turn("Hi")
        assert error.value.errno == errno.ENOSPC
        abandon(full)


def thinker(template: str, *rows: list[bytes]) -> Chat:
    """Returns a chat whose model writes, after each token of a row, the row's next token.

    A token may occur in a row only once.
    """
    model, tokenizer = writing(*rows)
    return Chat(model, tokenizer, chat_template(template), Sampling(temperature=0), 60)


def test_thoughts_are_separate_in_the_history_and_are_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The template writes thoughts as the model does, so the next turn reads only its new words."""
    chat = thinker("g1", [b":", b" Yes"], [b"k", b">\nHm", b". So</thi", b"nk>", b"\nNo", b"\n\nUser:"])
    terminal = Terminal(chat)
    assert terminal.turn("/think")
    for text in ("Hi", "And?"):
        assert terminal.turn(text)
        assert capsys.readouterr().out == "<think>\nHm. So\n</think>\nNo\n"
        assert chat.messages[-1] == {"role": "assistant", "reasoning_content": "Hm. So", "content": "No"}
    assert terminal.turn("/think false")
    assert terminal.turn("Well?")
    assert capsys.readouterr().out == "Yes\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "Yes"}
    assert len(chat.messages) == 6


@pytest.mark.parametrize("template", ["g1", "flower"])
def test_a_turn_with_thoughts_reads_only_its_new_words(template: str) -> None:
    end = b"\n\nUser:" if template == "g1" else "✿".encode()
    chat = thinker(template, [b"k", b">\nHm.", b"\n</think>\n", b"No", end])
    chat.think = True
    for text in ("Hi", "And?"):
        assert "".join(chat.say(text)) == ">\nHm.\n</think>\nNo"
        read = chat.stats.read
    new = " And?\n\nAssistant: <think" if template == "g1" else "\nUser✿And?✿\nBot✿<think"
    assert read <= 1 + len(chat.tokenizer.encode(new)), "beside the last token, which was only drawn"


def test_thoughts_that_are_cut_or_empty(capsys: pytest.CaptureFixture[str]) -> None:
    chat = thinker("g1", [b":", b" <think></think>", b"\n4"], [b"k", b">\nHm.", b" So", b" on"])
    chat.max_new_tokens = 3
    terminal = Terminal(chat)
    terminal.turn("Hi")
    assert capsys.readouterr() == ("4\n", "")
    assert chat.messages[-1] == {"role": "assistant", "content": "4"}
    terminal.turn("/think true")
    terminal.turn("Hi")
    captured = capsys.readouterr()
    assert captured.out == "<think>\nHm. So on\n"
    assert "max_new_tokens=3" in captured.err
    assert chat.messages[-1] == {"role": "assistant", "reasoning_content": "Hm. So on", "content": ""}


def test_think_has_three_values(capsys: pytest.CaptureFixture[str]) -> None:
    chat = thinker("g1", [b"k", b">", b"\n4"])
    terminal = Terminal(chat)
    assert terminal.turn("/think fake")
    assert terminal.turn("Hi")
    assert (chat.think, capsys.readouterr().out) == ("fake", "4\n")
    assert not terminal.turn("/think maybe")
    assert not terminal.turn("/set think=3")
    assert chat.think == "fake"
    assert not Terminal(new_chat(template="world")).turn("/think fake")


@pytest.mark.programs
def test_turns_from_standard_input(run: Run, set_stdin: Callable[[bytes], None]) -> None:
    small_model(generation="rwkv7", vocab_size=256).save_pretrained("model.safetensors", ByteTokenizer())
    turns = ["Hi", "/stats", "/set temperature=0", "/set temperature=[", "/set top_q=1", "/retry", "/nope", "/save talk.json",
             "/undo", "/load talk.json", "/system Be brief.", "Again"]
    set_stdin("\n".join(turns).encode())
    status, output, error = run("chat", "checkpoint=model.safetensors", "device=cpu", "max_new_tokens=5")
    assert status == 2, "some commands have failed"
    assert output.count("\n") >= 3
    assert "first token after" in error
    assert "error: /set requires NAME=VALUE, where NAME must be one of temperature" in error
    assert "error: the command /nope is unknown" in error
    assert [message["role"] for message in json.loads(Path("talk.json").read_text())["messages"]] == ["user", "assistant"]
    status, output, error = run("chat", "checkpoint=model.safetensors", "think=true", "device=cpu")
    assert (status, output) == (2, "")
    assert error.splitlines()[1:] == ["error: think: the chat template world does not support reasoning. Use g1"]
    one_sentence(run("chat", "checkpoint=model.safetensors", "think=maybe", "device=cpu"), "think", "fake")


@pytest.mark.programs
@pytest.mark.parametrize("think", ["false", "true", "fake"])
def test_a_released_model_needs_no_other_option(run: Run, set_stdin: Callable[[bytes], None], think: str) -> None:
    name = "rwkv7-g1k-1.5b-20260930-ctx25600.safetensors"
    chat = thinker("g1", [b":", b" Yes", b"."], [b"k", b">\n", b"Hm", b"</think>", b"No", b"!"])
    chat.model.save_pretrained(name, chat.tokenizer)
    set_stdin(b"Hi")
    expected_output = {"false": "Yes.\n", "true": "<think>\nHm\n</think>\nNo!\n", "fake": "Hm</think>No!\n"}[think]
    options = [] if think == "false" else [f"think={think}"]
    status, output, error = run("chat", f"checkpoint={name}", "temperature=0", *options)
    assert (status, output) == (0, expected_output)
    line = next(line for line in error.splitlines() if line.startswith("chat template: g1 "))
    assert "G1k" in line
