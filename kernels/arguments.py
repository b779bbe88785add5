"""Command-line parsing: a parser that reports a usage error as one sentence, and the types of options.

A type raises argparse.ArgumentTypeError; its message follows the option's name.
"""

import argparse
import difflib
import math
import os
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn


class Parser(argparse.ArgumentParser):
    """The arguments of python -m MODULE. A usage error is one line on standard error, without the usage, and exit status 2.

    shown: maps a text to what the user sees; set by a program that runs others under its own names.
    """

    shown: ClassVar[Callable[[str], str]] = str

    def __init__(self, module: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(prog=Parser.shown(f"python -m {module}"), description=Parser.shown(description or ""), epilog=epilog,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name, _, value = unknown[0].lstrip("-").partition("=")
            matches = difflib.get_close_matches(f"--{name.replace('_', '-')}", self._option_string_actions, n=1)
            hint = f"did you mean {' '.join([*matches, value]).rstrip()}?" if matches else "see --help"
            self.error(f"unknown argument {unknown[0]}: {hint}")
        return arguments

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def from_home(text: str) -> str:
    """A path with a leading ~ or ~/ expanded, which shells do at the beginning of a word but not in --out=~/x."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text        # noqa: PTH111 (Path raises)


def path_of(text: str) -> Path:
    return Path(from_home(text))


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return number


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"must be a positive number; got {text!r}")
    return number


def any_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(at_least(1)(size) for size in text.split(","))
    except ArgumentTypeError:
        raise ArgumentTypeError(f"sizes must be whole numbers of at least 1, as 8,768,1024; got {text!r}") from None


def sizes_of(axes: str) -> Callable[[str], tuple[int, ...]]:
    """One size per axis, as in "L,C,V"."""
    def named(text: str) -> tuple[int, ...]:
        sizes = any_sizes(text)
        if len(sizes) != len(axes.split(",")):
            raise ArgumentTypeError(f"must be the sizes {axes}; got {text}")
        return sizes

    return named


def some_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Comma-separated names."""
    def names(text: str) -> list[str]:
        requested = text.split(",")
        for name in requested:
            if name not in choices:
                raise ArgumentTypeError(f"unknown name {name!r}; there are: {', '.join(choices)}")
        return requested

    return names


def _existing(kind: str, exists: Callable[[Path], bool]) -> Callable[[str], Path]:
    def existing_path(text: str) -> Path:
        if not exists(path_of(text)):
            raise ArgumentTypeError(f"there is no {kind} {text}: name one that exists")
        return path_of(text)

    return existing_path


existing = _existing("file or folder", Path.exists)
existing_file = _existing("file", Path.is_file)
existing_folder = _existing("folder", Path.is_dir)


def program(text: str) -> Path:
    """A program's path, or its name where the shell finds it."""
    path = shutil.which(from_home(text))
    if path is None:
        raise ArgumentTypeError(f"there is no program {text}: name one that exists and can be run")
    return Path(path)
