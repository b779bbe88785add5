"""Runs the programs as a user starts them, but in the current process: `run("generate", "prompt=a")`."""

import sys
from collections.abc import Callable
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from rwkv import cli
from rwkv.cli import configs
from rwkv.cli.composition import RECIPE
from rwkv.config import ChatConfig, EvaluateConfig, GenerateConfig, ServeConfig, TrainConfig
from rwkv.programs import chat, generate, serve, train
from rwkv.tools import evaluate
from rwkv.training.kernel_check import check

PROGRAMS = {"train": (train.train, TrainConfig), "generate": (generate.generate, GenerateConfig),
            "evaluate": (evaluate.main, EvaluateConfig), "chat": (chat.chat, ChatConfig), "serve": (serve.serve, ServeConfig)}
Run = Callable[..., tuple[int, str, str]]
_checked: dict[tuple[Any, ...], str | None] = {}
_composed: dict[tuple[str, ...], Any] = {}
hydra_compose = hydra.compose


def compose(program: str, *arguments: str) -> Any:
    """Returns the configuration of a program with these arguments."""
    schema = PROGRAMS[program][1]
    line = cli.split(list(arguments), schema)
    cli.check(line, schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "compose", compose_once)
        return cli.compose(line, schema, program)


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns run("train", "kernel=conv1d", ...), which returns the exit status, standard output and standard error."""
    return lambda program, *arguments: (status_of(monkeypatch, program, *arguments), *capsys.readouterr())


def status_of(patch: pytest.MonkeyPatch, program: str, *arguments: str) -> int:
    """Runs the program in the current process and returns its exit status."""
    main, schema = PROGRAMS[program]
    patch.setattr(hydra, "compose", compose_once)
    if program == "train":
        patch.setattr("rwkv.training.kernel_check.check", check_once)
        patch.setattr("rwkv.training.plan.duration.TIMED_STEPS", 0)      # times only the warm-up step, to save a sixth of a run
    patch.setattr(sys, "argv", [f"{program}.py", *arguments])
    try:
        cli.run(main, schema, program, None)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def check_once(wkv: Any, *case: Any) -> str | None:
    """Calls kernel_check.check, which takes up to half a second, once for each kernel and case in this process."""
    key = wkv.name, *case
    if key not in _checked:
        _checked[key] = check(wkv, *case)
    return _checked[key]


def compose_once(config_name: str, overrides: list[str], **options: Any) -> Any:
    """Calls hydra.compose, which takes 60 ms, once for the same overrides and files of options in this process."""
    files = [str(ConfigStore.instance().load(f"{group}/{RECIPE}.yaml").node)
             for group, _, name in (override.partition("=") for override in overrides) if name == RECIPE]
    key = str(configs.CONFIGS), config_name, *overrides, *files, str(options)
    if key not in _composed:
        _composed[key] = hydra_compose(config_name, overrides, **options)
    return _composed[key]


def one_sentence(result: tuple[int, str, str], *words: str) -> None:
    """Checks the report of a user's mistake: exit status 2, no standard output, and one error line that has all `words`.

    Lines about what the program loads may precede the error line.
    """
    status, output, error = result
    assert (status, output) == (2, "")
    error = "".join(line for line in error.splitlines(keepends=True) if not line.startswith("loading "))
    assert error.startswith("error: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in words:
        assert part in error
