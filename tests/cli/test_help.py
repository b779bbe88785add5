"""Tests that --help is complete and fits a terminal."""

import importlib
import re

import pytest
from programs import PROGRAMS, Run

from rwkv import cli
from rwkv.cli.help import WIDTH
from rwkv.config import options
from rwkv.tools import __main__ as tools

CHOICES = [(path.parent.name, path.stem) for path in sorted(cli.CONFIGS.glob("*/*.yaml"))]


def help_of(program: str, *arguments: str) -> str:
    main, schema = PROGRAMS[program]
    about = importlib.import_module(main.__module__).__doc__
    return cli.help_page(cli.split(list(arguments), schema), schema, program, about or "")


def test_help_shows_the_values_of_this_command_line(run: Run) -> None:
    status, output, _ = run("train", "model=small", "data.path=a,b", "--help")
    assert status == 0
    assert re.search(r"^  model\.n_embd .* \[384\]$", output, re.MULTILINE)
    assert "[a,b]" in output


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fits_a_terminal(program: str) -> None:
    assert max(map(len, help_of(program).splitlines())) <= WIDTH


@pytest.mark.parametrize("module", ["rwkv.tools.completion", "rwkv.tools.convert", "rwkv.tools.doctor", "rwkv.tools.list",
                                    "rwkv.tools.pull", "rwkv.tools.report", "rwkv.tools.smoke", "kernels.__main__"])
def test_the_help_of_a_tool_fits_a_terminal(module: str, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """Indented lines are examples, which must not be broken, and the usage of single options."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(" ")) <= 80


def test_the_command_timemix_has_a_version_and_quotes_an_unknown_command(monkeypatch: pytest.MonkeyPatch,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["timemix", "--version"])
    tools.main()
    assert re.fullmatch(r"timemix \S.*\n", capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["timemix", "--versoin"])
    with pytest.raises(SystemExit, match="2"):
        tools.main()
    assert "'--versoin'" in capsys.readouterr().err


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_explains_every_option(program: str) -> None:
    page = help_of(program)
    words = " ".join(page.split())
    for option, item in options(PROGRAMS[program][1]).items():
        assert re.search(rf"^  {re.escape(option)}\b", page, re.MULTILINE), option
        assert f"{option} {item.metadata['help']}" in words


def test_help_describes_every_choice() -> None:
    page = help_of("train") + help_of("generate")
    assert not [f"{group}={name}" for group, name in CHOICES if not re.search(rf"^  {group}={name}  +\S", page, re.MULTILINE)]
    assert all(re.search(rf"\b{name}\b", page) for name in cli.KERNELS)
