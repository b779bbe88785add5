"""The programs as a user starts them, within this process: `run("generate", "prompt=a")`."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from rwkv import cli
from rwkv.config import ChatConfig, EvaluateConfig, GenerateConfig, ServeConfig, TrainConfig
from rwkv.programs import chat, generate, serve, train
from rwkv.tools import evaluate

PROGRAMS = {"train": (train.train, TrainConfig), "generate": (generate.generate, GenerateConfig),
            "evaluate": (evaluate.main, EvaluateConfig), "chat": (chat.chat, ChatConfig), "serve": (serve.serve, ServeConfig)}
Run = Callable[..., tuple[int, str, str]]


def composed(program: str, *arguments: str) -> Any:
    """The configuration that a program has with these arguments."""
    schema = PROGRAMS[program][1]
    line = cli.split(list(arguments), schema)
    cli.check(line, schema)
    return cli.compose(line, schema, program)


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("train", "kernel=conv1d", ...) -> exit status, standard output, standard error."""
    def call(program: str, *arguments: str) -> tuple[int, str, str]:
        main, schema = PROGRAMS[program]
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        status = 0
        try:
            cli.run(main, schema, program, None)
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call


def one_sentence(result: tuple[int, str, str], *said: str) -> None:
    """A user's mistake: exit status 2, nothing on standard output, and one line that says all of `said`.

    Before it, a program may have said what it loads.
    """
    status, output, error = result
    assert (status, output) == (2, "")
    error = "".join(line for line in error.splitlines(keepends=True) if not line.startswith("loading "))
    assert error.startswith("error: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in said:
        assert part in error
