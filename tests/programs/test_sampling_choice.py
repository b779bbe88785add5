"""Tests the source of sampling options that the user did not set, in each program."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import writing
from programs import Run, caller
from serving_runs import serving

from rwkv.chat.names import choose_template
from rwkv.chat.thoughts import Think
from rwkv.chat.turn_templates import chat_template
from rwkv.config import ChatConfig, Sampling
from rwkv.errors import UserError
from rwkv.programs.sampling import ChosenSampling, SamplingChoice, preset

THINK, FAKE, CHAT = (preset(name) for name in ("g1_think", "g1_fake", "chat"))
G1K = "rwkv7-g1k-1.5b-20260930-ctx25600.pth"
WORLD = "RWKV-x070-World-0.4B-v2.9-20250107-ctx4096.pth"
OFFICIAL = "RWKV7-13.3B-20260805"
THINKING_JINJA = ("{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:"
                  "{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}")


def choose_sampling(path: str | Path, think: Think, run: Any = None, template: str | None = None,
                    user_options: Any = None) -> ChosenSampling:
    """Returns the sampling for answers. `user_options` are set in addition to the preset of chat.py."""
    config = ChatConfig(**{"temperature": 1.0, "top_p": 0.3, **(user_options or {})})
    template_object = chat_template(choose_template(template, str(path), run).template)
    return SamplingChoice(config, [*(user_options or {})], Path(path), run, template_object).for_answers(think)


@pytest.mark.parametrize(("path", "think", "expected"), [
    (G1K, True, THINK), (G1K, "fake", FAKE), (G1K, False, CHAT), ("rwkv-g1k-3b-temp-5441.pth", True, THINK),
    (OFFICIAL, "fake", FAKE), (WORLD, False, CHAT)])
def test_the_kind_of_model_and_how_answers_begin_choose_the_preset(path: str, think: Think, expected: Sampling) -> None:
    result = choose_sampling(path, think)
    assert result.sampling == expected
    assert result.why


def test_the_template_and_the_base_of_a_run_tell_the_kind_too() -> None:
    assert choose_sampling("model.pth", True, template="g1").sampling == THINK
    assert choose_sampling("model.pth", "fake", template="flower").sampling == FAKE
    assert choose_sampling("runs/latest/last.ckpt", True, {"init_from": G1K}).sampling == THINK
    assert choose_sampling(G1K, False, template="world").sampling == CHAT


def test_a_template_in_jinja_of_a_g1_model(tmp_path: Path) -> None:
    """The template's prompts decide the preset. Without thoughts, a prompt ends with an empty thought here."""
    folder = tmp_path / OFFICIAL
    folder.mkdir()
    (folder / "chat_template.jinja").write_text(THINKING_JINJA)
    assert choose_sampling(folder, True).sampling == THINK
    assert choose_sampling(folder, False).sampling == FAKE
    other = tmp_path / "RWKV7-Qwen"
    folder.rename(other)
    assert choose_sampling(other, True).sampling == CHAT, "a model of another author must not count as G1"


def test_the_user_s_options_precede_the_file_and_the_file_precedes_the_kind(tmp_path: Path) -> None:
    folder = tmp_path / "RWKV7-G1k-1.5B"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 20}))
    file_options = replace(THINK, temperature=0.7, top_k=20)  # the preset of the model's kind sets the other options
    assert choose_sampling(folder, True).sampling == file_options
    assert "g1_think" in str(choose_sampling(folder, True))
    assert choose_sampling("runs/latest", True, {"init_from": str(folder)}).sampling == file_options
    assert choose_sampling(folder, True, user_options={"top_k": 5}).sampling == replace(file_options, top_k=5)
    assert choose_sampling(folder, "fake").sampling == replace(FAKE, temperature=0.7, top_k=20)
    assert choose_sampling(folder, True, user_options={"sampling": "chat"}) == ChosenSampling(
        CHAT, "chat", source="generation_config.json")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 7}))
    with pytest.raises(UserError) as error:
        choose_sampling(folder, True)
    assert "generation_config.json" in str(error.value)
    assert "top_p" in str(error.value)
    assert choose_sampling(folder, True, user_options={"sampling": "chat"}).sampling == CHAT, "sampling= must avoid the error"


@pytest.mark.parametrize("stated", ['"top_k": Infinity', '"top_k": NaN', '"top_k": 40.7', f'"temperature": {"9" * 400}',
                                   '"temperature": NaN', '"min_p": -1', '"repetition_penalty": Infinity'])
def test_a_file_with_an_invalid_number_is_reported_in_one_sentence(tmp_path: Path, stated: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"do_sample": true, {stated}}}')
    with pytest.raises(UserError) as error:
        choose_sampling(tmp_path, False)
    assert "generation_config.json" in str(error.value)
    assert stated.split('"')[1] in str(error.value)


@pytest.mark.parametrize(("stated", "top_k"), [("20.0", 20), ("-1", 0), ("0", 0), ("9" * 400, int("9" * 400))])
def test_a_file_s_top_k(tmp_path: Path, stated: str, top_k: int) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"do_sample": true, "top_k": {stated}}}')
    assert choose_sampling(tmp_path, False).sampling == Sampling(1.0, top_k, 1.0)


def test_the_files_for_kinds_of_answers_apply_only_to_these_answers(tmp_path: Path) -> None:
    """The files are those of rwkv-rs/rwkv7-g1-st."""
    folder = tmp_path / "rwkv7-g1k-1.5b"
    folder.mkdir()
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.1, "penalty_decay": 0.988}
    for name, content in (("", {"temperature": 0.96, "top_p": 0.76, "top_k": 32, **penalties, "max_new_tokens": 3000}),
                          ("fake_think_", {"temperature": 1.0, "top_p": 0.28, "top_k": 32}),
                          ("tools_", {"temperature": 0.5, "top_p": 0.76, "top_k": 32})):
        text = json.dumps({"do_sample": True, "stop_strings": ["✿", "\nUser:"], **content})
        (folder / f"{name}generation_config.json").write_text(text)
    choice = SamplingChoice(ChatConfig(), [], folder, None, chat_template("g1"))
    assert choice.for_answers(True)[0] == THINK
    assert choice.for_answers(True)[3:6] == (("✿", "\nUser:"), 3000, "generation_config.json")
    assert (choice.for_answers("fake").sampling, choice.for_answers("fake").max_new_tokens) == (FAKE, None)
    assert choice.for_answers(True, tools=True).sampling == replace(THINK, temperature=0.5)
    assert choice.for_answers(True, tools=True).name == "tools_generation_config.json"
    line = str(choice.for_answers(True))
    assert "stop ['✿'," in line
    assert "max_new_tokens 3000" in line
    answers = SamplingChoice(ChatConfig(), ["max_new_tokens", "stop"], folder, None, chat_template("g1")).for_answers(True)
    assert (answers.stop, answers.max_new_tokens) == ((), None)


def test_penalties_alone_leave_the_preset_of_the_program(tmp_path: Path) -> None:
    """The file does not say how to sample, and the kind of the model is unknown."""
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.2}')
    assert choose_sampling(tmp_path, False).sampling == Sampling(1.0, 0, 0.3, repetition_penalty=1.2)


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_an_option_changes_no_other_option(value: float) -> None:
    """The option counts even if it has the value of the program's own preset."""
    result = choose_sampling(G1K, True, user_options={"temperature": value})
    assert result.sampling == Sampling(value, 32, 0.76, presence_penalty=1.0, frequency_penalty=0.1, penalty_decay=0.988)
    assert result.overrides == (f"temperature={value}",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = writing([b":", b" Yes", b"."], [b"k", b">\n", b"Hm", b"</think>", b"No", b"!"])
    model.save_pretrained(f"{G1K}.safetensors", tokenizer)
    return caller(monkeypatch, capsys)


def sampling_lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("sampling: ")]


@pytest.mark.programs
def test_chat_chooses_again_when_think_changes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_input(*typed: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(typed).encode())))

    set_input("/think fake", "/set top_k=3", "/think true", "/set sampling=greedy", "/think false")
    status, _, error = run("chat", f"checkpoint={G1K}.safetensors", "think=true", "min_p=0.1")
    assert status == 0
    lines = sampling_lines(error)
    assert [line.split()[1].rstrip(":") for line in lines] == ["g1_think", "g1_fake", "g1_think", "greedy"]
    assert all("min_p 0.1" in line for line in lines[:3])
    assert "top_k 3," in lines[2]
    assert "G1k" in lines[0]
    set_input("/think")
    _, _, error = run("chat", f"checkpoint={G1K}.safetensors", "sampling=chat")
    assert sampling_lines(error) == [f"sampling: chat: {CHAT}"]


@pytest.mark.programs
def test_generate_uses_the_file_s_options(run: Run) -> None:
    model, tokenizer = writing([b"a", b"b"])
    model.save_pretrained("model", tokenizer, format="huggingface")
    arguments = ("checkpoint=model", "prompt=a", "max_new_tokens=2")
    assert sampling_lines(run("generate", *arguments)[2])[0].startswith("sampling: default (")
    Path("model/generation_config.json").write_text('{"do_sample": true, "temperature": 0.25, "top_k": 2}')
    (line,) = sampling_lines(run("generate", *arguments)[2])
    assert line.startswith("sampling: generation_config.json (")
    assert line.endswith("temperature 0.25, top_k 2, top_p 1")


@pytest.mark.programs
def test_chat_uses_the_file_of_each_kind_of_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = writing([b":", b"a", b"b", b"c", b"d"], [b"k", b"a"])
    model.save_pretrained("model", tokenizer, format="huggingface")
    Path("model/generation_config.json").write_text('{"stop_strings": ["c"]}')
    Path("model/fake_think_generation_config.json").write_text('{"max_new_tokens": 3}')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n/think fake\nx\n/think false\nx\n")))
    status, output, error = run("chat", "checkpoint=model", "template=g1", "temperature=0")
    assert (status, output.splitlines()[0], output.splitlines()[-1]) == (0, "ab", "ab"), error
    assert len(output.splitlines()[1:-1][-1]) == 3
    lines = sampling_lines(error)
    assert [line.partition("; from ")[2] for line in lines] == [
        "generation_config.json: stop ['c']", "fake_think_generation_config.json: max_new_tokens 3",
        "generation_config.json: stop ['c']"]


@pytest.mark.programs
def test_generate_uses_the_file_s_stop_strings_and_limit(run: Run) -> None:
    model, tokenizer = writing([b"a", b"b", b"c", b"d", b"e"])
    model.save_pretrained("model", tokenizer, format="huggingface")
    Path("model/generation_config.json").write_text('{"stop_strings": ["c"], "max_new_tokens": 3}')
    for more, text in (((), "ab"), (("stop=x",), "abcd"), (("stop=x", "max_new_tokens=2"), "abc")):
        status, output, error = run("generate", "checkpoint=model", "prompt=a", "temperature=0", *more)
        assert (status, output) == (0, f"{text}\n"), (more, error)


@pytest.mark.programs
def test_requests_without_options_have_those_of_their_kind(tmp_path: Path) -> None:
    """About 260 tokens are equally likely: with empty thoughts top_k leaves 32 of them, without thoughts top_p leaves 30 %."""
    httpx = pytest.importorskip("httpx")
    model, tokenizer = writing([b"a"])
    model.head.weight.data.zero_()
    path = tmp_path / f"{G1K}.safetensors"
    model.save_pretrained(path, tokenizer)
    with serving(tmp_path, f"checkpoint={path}") as running:
        def ids(**fields: Any) -> int:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "seed": 1, "logprobs": True,
                    "logit_bias": {"0": -100}, **fields}
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
            return len({str(entry["bytes"]) for entry in answer["choices"][0]["logprobs"]["content"]})

        assert ids(chat_template_kwargs={"think": "fake"}) <= 32 < ids() < 90
        assert ids(temperature=2) < 90, "a field replaces the preset's option of that name alone"
        assert ids(top_p=1, chat_template_kwargs={"think": "fake"}) <= 32
        assert ids(top_p=1) > 100
        body = {"prompt": "a", "max_tokens": 200, "seed": 1, "logprobs": 0, "logit_bias": {"0": -100}}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
        assert len({*answer["choices"][0]["logprobs"]["tokens"]}) < 90, "a completion has the preset, too"
        (card,) = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert Sampling(**{name: value for name, value in card["meta"]["defaults"].items() if name != "max_tokens"}) == CHAT
        lines = [line.removeprefix("sampling").strip() for line in running.log.splitlines() if line.startswith("sampling")]
        assert [name in line for name, line in zip(("chat (", "g1_think (", "g1_fake ("), lines, strict=True)] == [True] * 3


@pytest.mark.programs
def test_requests_have_the_stops_and_the_limit_of_their_file(tmp_path: Path) -> None:
    """Requests with tools have another file. A request's own stop and max_tokens override the file."""
    httpx = pytest.importorskip("httpx")
    model, tokenizer = writing([b":", b"a", b"b", b"c", b"d"], [b"<think></think", b"a"], [b"k", b">"])
    folder = tmp_path / "RWKV7-G1k-tiny"
    model.save_pretrained(folder, tokenizer)
    for name, content in (("", {"stop_strings": ["c"], "max_new_tokens": 8}), ("tools_", {"stop_strings": ["b"]})):
        (folder / f"{name}generation_config.json").write_text(json.dumps(content))
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(tmp_path, f"checkpoint={folder}", "template=g1") as running:
        def answer(**fields: Any) -> str:
            body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}
            return str(httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0])

        texts = [answer(**fields) for fields in ({}, {"stop": ["x"], "max_tokens": 20}, {"stop": ["x"], "max_tokens": 2},
                                                 {"tools": [tool]}, {"tools": [tool], "stop": "c"})]
        contents = [text.partition("'content': '")[2].partition("'")[0] for text in texts]
        assert contents == ["ab", "abcd", "ab", "a", "ab"]
        assert "max_new_tokens 8" in running.log
        assert "from tools_generation_config.json: stop ['b']" in running.log
        completion = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "temperature": 0}, timeout=60).json()
        assert completion["choices"][0]["text"] == "b"
