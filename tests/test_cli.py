"""The command line: every configuration composes, free text stays as it was typed, and a user's mistake is one sentence."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import small_model

import generate
import train
from rwkv import cli
from rwkv.config import EvaluateConfig, GenerateConfig, TrainConfig
from rwkv.run import as_plain
from rwkv.tokenizer import CharTokenizer
from rwkv.tools import evaluate

PROGRAMS = {"train": (train.main, TrainConfig), "generate": (generate.main, GenerateConfig),
            "evaluate": (evaluate.main, EvaluateConfig)}
CHOICES = sorted(path.relative_to(cli.CONFIGS) for path in cli.CONFIGS.glob("*/*.yaml"))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """run("train", "kernel=conv1d", ...) -> exit status, standard output, standard error, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(program: str, *arguments: str) -> tuple[int, str, str]:
        main, schema = PROGRAMS[program]
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        status = 0
        try:
            cli.run(main, schema, program)
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call


def compose(program: str, *arguments: str) -> Any:
    schema = PROGRAMS[program][1]
    line = cli.split(list(arguments), schema)
    cli.ConfigStore.instance().store(name=f"{program}_schema", node=schema)
    cli.check(line, schema, program)
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        return cli.build(hydra.compose(program, line.overrides), line.verbatim)


# Composition


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_yaml_composes_to_the_schema(choice: Path) -> None:
    config = compose("train", f"{choice.parent}={choice.stem}")
    assert isinstance(config, TrainConfig)
    if choice.parent.name in ("kernel", "data", "logger"):
        assert getattr(config, choice.parent.name).name == choice.stem


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    """A default is written down once, and what a YAML file repeats is the same; stdlib alone has its own split and sample."""
    defaults = as_plain(TrainConfig())
    defaults["data"] |= {"val_fraction": 0.05, "sample_prompt": "    def __init__(self"}
    assert as_plain(compose("train")) == defaults
    assert compose("generate") == GenerateConfig()
    assert compose("evaluate") == EvaluateConfig()


def test_the_published_recipe_is_the_experiment() -> None:
    config = compose("train", "experiment=shakespeare_char", "data.path=FILE", "optim.lr=1e-3")
    assert (config.model.n_layer, config.model.n_embd, config.model.ctx_len, config.data.batch_size) == (4, 128, 64, 12)
    assert (config.data.name, config.data.tokenizer, config.data.path) == ("text", "char", "FILE")
    assert (config.trainer.max_steps, config.optim.lr) == (2000, 1e-3)


def test_a_single_option_wins_over_an_experiment_and_debug() -> None:
    config = compose("train", "debug=fast", "model.n_layer=5", "trainer.max_steps=7")
    assert (config.model.n_layer, config.model.n_embd, config.trainer.max_steps) == (5, 32, 7)


# Free text

HARD = ("", "a,b", "a=b", "'", '"', "it's", "${seed}", "${x}", "$(ls) `ls`", "[1, 2", "{a: b}", "line\nline\n", " space ", "\\",
        "\\,", "@", "#", "--help", "+a=1", "~a", "1e3", "true", "你好 🙂", "\t", "a: b", "???", "%",
        "choice(a,b)", "prompt=")


def as_one_example_each(test: Callable[..., None]) -> Callable[..., None]:
    for text in HARD:
        test = example(text)(test)
    return test


@settings(max_examples=300, deadline=None)
@as_one_example_each
@given(st.text().filter(lambda text: text != "null"))
def test_free_text_is_taken_as_it_is(text: str) -> None:
    line = cli.split([f"prompt={text}", "seed=3", f"checkpoint={text}", "top_p=0.5", "-m"], GenerateConfig)
    assert (line.overrides, line.flags) == (["seed=3", "top_p=0.5"], ["-m"])
    assert line.keys == ["seed", "top_p", "prompt", "checkpoint"]
    config = cli.build(cli.OmegaConf.structured(GenerateConfig), line.verbatim)
    assert config.prompt == config.checkpoint == text


@pytest.mark.parametrize("key", ["data.path", "out_dir", "data.tokenizer", "logger.run_name"])
def test_paths_and_names_are_free_text_too(key: str) -> None:
    config = compose("train", f"{key}=a,b=${{c}} 'd'")
    *parents, last = key.split(".")
    assert getattr(getattr(config, parents[0]) if parents else config, last) == "a,b=${c} 'd'"


@pytest.mark.parametrize("key", cli.VERBATIM)
def test_every_verbatim_key_is_an_option(key: str) -> None:
    assert any(key in cli._options(schema) for _, schema in PROGRAMS.values())


def test_null_is_none() -> None:
    assert compose("generate", "prompt=null").prompt is None


# What is wrong is said in one sentence


def one_sentence(result: tuple[int, str, str], *said: str) -> None:
    status, output, error = result
    assert (status, output) == (2, "")
    assert error.startswith("error: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in said:
        assert part in error


@pytest.mark.parametrize(("argument", "said"), [
    ("kernel=nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("kernel.name=nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("kernel=fft", "fft cannot be used inside WKV: its error is relative to the largest e^k of a row"),
    ("kernel=conv1d,nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("model=huge", "unknown model 'huge'; there are: small, tiny"),
    ("model=null", "unknown model 'null'; there are: small, tiny"),
    ("experiment=nope", "unknown experiment 'nope'; there are: shakespeare_char"),
    ("model.n_layer=two", "model.n_layer: Value 'two'"),
    ("model.n_layer=1.5", "model.n_layer: Value '1.5'"),
    ("optim.lr=abc", "optim.lr: Value 'abc'"),
    ("optim.lr=null", "optim.lr"),
    ("optim.betas=0.9", "optim.betas"),
    ("optim.betas=[0.9]", "optim.betas are two numbers"),
    ("optim.betas=[0.9,1.5]", "optim.betas are two numbers"),
    ("model.n_layer=0", "model.n_layer is at least 1; got 0"),
    ("trainer.precision=16", "trainer.precision is one of 32-true, bf16-mixed; got '16'"),
    ("optim.lr=1e-5", "optim.min_lr above 0 and at most optim.lr"),
    ("data.val_fraction=2", "data.val_fraction lies above 0 and below 1"),
    ("seed=-1", "seed is at least 0"),
    ("optim.lrr=1", "unknown option optim.lrr; did you mean optim.lr?"),
    ("n_layer=1", "unknown option n_layer; did you mean model.n_layer?"),
    ("nonsense=1", "unknown option nonsense; --help lists them all"),
    ("+model.nonsense=1", "unknown option model.nonsense"),
    ("++nonsense=1", "unknown option nonsense"),
    ("kernel", "cannot read 'kernel': options are written key=value"),
    ("trainer.max_steps=(3", "cannot read the options"),
    ("trainer.max_steps=1,2x", "trainer.max_steps: Value '2x'"),
    ("optim.lr=${nothing}", "nothing"),
    ("trainer=gpu", "trainer=gpu needs a CUDA device"),
])
def test_a_wrong_option_is_one_sentence(run: Run, tmp_path: Path, argument: str, said: str) -> None:
    if argument == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    one_sentence(run("train", argument), said)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


@pytest.mark.parametrize(("name", "content", "said"), [
    ("absent.txt", None, "cannot read data.path=absent.txt: No such file"),
    ("empty.txt", b"", "data.path=empty.txt is empty"),
    ("latin.txt", "é".encode("latin1") * 999, "data.path=latin.txt is not UTF-8: its byte 0 is 0xe9"),
    ("short.txt", b"just a few words", "the training text is shorter than one context"),
])
def test_a_wrong_data_file_is_one_sentence(run: Run, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    one_sentence(run("train", "data=text", f"data.path={name}", "data.cache_dir=cache", "data.tokenizer=byte"), said)
    assert not Path("runs").exists()


def test_text_without_a_file_says_what_is_missing(run: Run) -> None:
    one_sentence(run("train", "data=text"), "data=text needs data.path=FILE")


def test_a_directory_that_exists_is_not_overwritten(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine", "thesis.txt").write_text("years of work")
    one_sentence(run("train", "out_dir=mine"), "out_dir mine exists already", "resume=auto")


@pytest.mark.parametrize("argument", ["resume=nowhere", "resume=nowhere.ckpt"])
def test_nothing_to_resume_is_one_sentence(run: Run, argument: str) -> None:
    one_sentence(run("train", argument), "nothing to resume from")


def test_a_foreign_file_to_resume_from_is_one_sentence(run: Run) -> None:
    Path("foreign.ckpt").write_text("hello")
    one_sentence(run("train", "resume=foreign.ckpt"), "foreign.ckpt cannot be read as a checkpoint")
    small_model().save_pretrained("weights.pth")
    one_sentence(run("train", "resume=weights.pth"), "weights.pth")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = CharTokenizer("abc ü,\n")
    small_model("conv1d", tokenizer.vocab_size).save_pretrained(tmp_path / "model.ckpt", tokenizer)
    return tmp_path / "model.ckpt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(("arguments", "said"), [
    ((), "no checkpoint at runs/latest"),
    (("checkpoint=absent.ckpt",), "no checkpoint at absent.ckpt"),
    (("checkpoint=.",), "no checkpoint in ."),
    (("checkpoint=model.ckpt", "kernel=nonsense"), "unknown kernel 'nonsense'"),
    (("checkpoint=model.ckpt", "prompt=zebra!"), "'!', 'e', 'r', 'z': not among the 7 characters"),
    (("checkpoint=model.ckpt", "tokenizer=absent.json"), "cannot read the tokenizer file absent.json"),
    (("checkpoint=model.ckpt", "temperature=-1"), "temperature is at least 0"),
    (("checkpoint=model.ckpt", "top_p=0"), "top_p lies above 0 and at most 1"),
    (("checkpoint=model.ckpt", "top_p=high"), "top_p: Value 'high'"),
    (("checkpoint=model.ckpt", "max_tokens=3"), "did you mean max_new_tokens?"),
    (("checkpoint=model.ckpt", "dtype=int8"), "dtype is one of float32, bfloat16"),
])
def test_a_wrong_generation_is_one_sentence(run: Run, checkpoint: Path, arguments: tuple[str, ...], said: str) -> None:
    one_sentence(run("generate", *arguments), said)


def test_a_damaged_checkpoint_is_one_sentence(run: Run, checkpoint: Path) -> None:
    truncate(checkpoint)
    one_sentence(run("generate", "checkpoint=model.ckpt"), "model.ckpt cannot be read as a checkpoint: it is truncated")
    small_model(vocab_size=256).save_pretrained("bare.pth")
    one_sentence(run("generate", "checkpoint=bare.pth"), "bare.pth carries no tokenizer: name its file with tokenizer=")


def test_a_bug_keeps_its_stack_trace() -> None:
    """Only what this program says on purpose is a sentence."""
    with pytest.raises(ValueError, match="Expecting value"):
        cli.with_sentences(lambda: print(json.loads("x")))
    with pytest.raises(ZeroDivisionError):
        cli.with_sentences(lambda: print(1 // 0))


# What is right


@pytest.mark.parametrize("prompt", ["abc\n", "", "a b, c"])
def test_standard_output_is_the_prompt_and_what_follows_it(run: Run, checkpoint: Path, prompt: str) -> None:
    status, output, error = run("generate", "checkpoint=model.ckpt", f"prompt={prompt}", "max_new_tokens=20", "kernel=conv1d")
    assert (status, error) == (0, "")
    assert output.startswith(prompt)
    assert set(output) <= set("abc ü,\n")
    again = run("generate", "checkpoint=model.ckpt", f"prompt={prompt}", "max_new_tokens=20", "kernel=reference")
    assert again[1] == output


def test_a_prompt_from_standard_input(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("cab\nü"))
    assert run("generate", "checkpoint=model.ckpt", "prompt=-", "max_new_tokens=0") == (0, "cab\nü\n", "")


def test_help_is_there(run: Run) -> None:
    status, output, _ = run("train", "--help")
    assert status == 0
    assert "kernel: auto, conv1d, formula" in output


def test_the_end_of_the_reader_is_not_an_error(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python generate.py | head`"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed, monkeypatch.context() as patch:  # noqa: PTH123 (a descriptor)
        patch.setattr(sys, "stdout", closed)
        status, _, error = run("generate", "checkpoint=model.ckpt", "prompt=a", "kernel=conv1d")
    assert (status, error) == (0, "")
