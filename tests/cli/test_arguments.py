"""Tests that free text and paths are taken verbatim."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from models import small_model
from omegaconf import OmegaConf
from programs import PROGRAMS, Run, compose

from kernels import arguments as program_arguments
from rwkv import cli
from rwkv.config import GenerateConfig, TrainConfig, free_text_kind, options
from rwkv.tools import convert

HARD = ("", "a,b", "a=b", "'", '"', "it's", "${seed}", "${x}", "$(ls) `ls`", "[1, 2", "{a: b}", "line\nline\n", " space ", "\\",
        "\\,", "@", "#", "--help", "+a=1", "~a", "1e3", "true", "你好 🙂", "\t", "a: b", "???", "%",
        "choice(a,b)", "prompt=", "null")


def add_hard_examples(test: Callable[..., None]) -> Callable[..., None]:
    for text in HARD:
        test = example(text)(test)
    return test


@add_hard_examples
@given(st.text())
def test_free_text_is_taken_as_it_is(text: str) -> None:
    line = cli.split([f"prompt={text}", "seed=3", f"stop={text}", "top_p=0.5", "-m"], GenerateConfig)
    assert (line.overrides, line.flags) == (["seed=3", "top_p=0.5"], ["-m"])
    assert line.keys == ["seed", "top_p", "prompt", "stop"]
    config = cli.build(OmegaConf.structured(GenerateConfig), line.verbatim)
    assert (config.prompt, config.stop) == (text, [text])


TEXTS = [(program, key) for program, (_, schema) in PROGRAMS.items() for key, item in options(schema).items()
         if free_text_kind(item)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_text_without_choices_is_free(program: str) -> None:
    texts = {key for key, item in options(PROGRAMS[program][1]).items() if str in (item.type, *get_args(item.type))}
    grammar = {key for key, item in options(PROGRAMS[program][1]).items() if item.metadata["one_of"]}
    grammar |= {"kernel.name", "logger.name", "tune.modules", "sampling"}
    assert texts - grammar == {key for name, key in TEXTS if name == program}


@pytest.mark.parametrize("text", ["007", "🙂 'a\"b', c={d} $x", " a,b "])
def test_every_free_text_of_every_program_is_taken_as_it_is(text: str) -> None:
    for program, (_, schema) in PROGRAMS.items():
        keys = [key for name, key in TEXTS if name == program]
        line = cli.split([f"{key}={text}" for key in keys], schema)
        assert (line.overrides, list(line.verbatim)) == ([], keys)
    config = compose("train", f"data.field={text}", f"data.split={text}", f"+logger.project={text}", "data=hf")
    assert (config.data.field, config.data.split, config.logger.project) == (text,) * 3
    swept = cli.jobs(cli.split([f"data.field={text}", "seed=0,1"], TrainConfig), TrainConfig, "train")
    assert [job.config.data.field for job in swept] == [text, text]


def test_a_path_may_begin_at_the_home_folder() -> None:
    config = compose("train", "data.path=~/books", "data.cache_dir=a/~/b", "data.sample_prompt=~/books", "out_dir=~/runs")
    assert (config.data.path, config.out_dir) == (str(Path.home() / "books"), str(Path.home() / "runs"))
    assert (config.data.cache_dir, config.data.sample_prompt) == ("a/~/b", "~/books")


def test_null_is_a_text_but_neither_a_path_nor_a_name() -> None:
    config = compose("train", "out_dir=null", "logger.run_name=null", "data.sample_prompt=null")
    assert (config.out_dir, config.logger.run_name, config.data.sample_prompt) == (None, None, "null")
    assert compose("generate", "prompt=null").prompt == "null"
    assert compose("evaluate", "start=null").start == "null"


@pytest.mark.parametrize(("argument", "hinted"), [
    (r"stop=\n", True), (r"stop=User:\n\n", True), ("stop=\n", False), ("stop=User:", False), (r"prompt=C:\name", True),
    (r"checkpoint=C:\new", False)])
def test_a_backslash_and_an_n_are_not_a_newline(run: Run, argument: str, hinted: bool) -> None:
    _, _, error = run("generate", "checkpoint=missing.pth", argument)
    assert ("line break" in error) == hinted


@pytest.mark.parametrize("text", ["~/x", "~"])
def test_a_path_begins_at_home_in_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """The programs expand ~ behind an equals sign, where a shell does not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    expected = tmp_path / "x" if text == "~/x" else tmp_path
    assert compose("generate", f"checkpoint={text}").checkpoint == str(expected)
    assert program_arguments.existing(text) == expected
    options = convert._parser().parse_args(["in", "out", f"--tokenizer={text}"])
    assert options.tokenizer == str(expected)
    assert program_arguments.from_home("~x/y") == "~x/y"
    assert program_arguments.from_home("a~/y") == "a~/y"


@pytest.mark.parametrize("arguments", [["", "out.pth"], ["model.pth", ""], ["model.pth", "out.pth", "--tokenizer="]])
def test_an_empty_argument_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      arguments: list[str]) -> None:
    """A shell variable may not be set, and an empty path would be the current directory."""
    monkeypatch.chdir(tmp_path)
    small_model().save_pretrained(tmp_path / "model.pth")
    with pytest.raises(SystemExit) as status:
        convert.main(arguments)
    error = capsys.readouterr().err
    assert (status.value.code, error.count("\n"), "empty" in error) == (2, 1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]


def test_convert_does_not_write_a_folder_called_dash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """The name - means standard output in other programs."""
    monkeypatch.chdir(tmp_path)
    small_model().save_pretrained(tmp_path / "model.pth")
    with pytest.raises(SystemExit):
        convert.main(["model.pth", "-"])
    assert "OUT" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]
