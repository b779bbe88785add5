"""Parses command lines: `Parser` reports a usage error as one sentence, and types convert and check the texts of options.

A type is a function that converts an option's text to a value. For an invalid text the type raises
argparse.ArgumentTypeError, and argparse prints the error's message after the option's name.
"""

import argparse
import difflib
import math
import os
import re
import shutil
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn


class Parser(argparse.ArgumentParser):
    """Parses the arguments of python -m MODULE. A usage error prints one line on standard error, and ends with status 2.

    `rewrite_usage` is a function that is applied to the usage and the description before they are printed. A program that
    offers other modules as subcommands sets `rewrite_usage`, in order to print the subcommand's name instead of
    "python -m MODULE".
    """

    rewrite_usage: ClassVar[Callable[[str], str]] = str

    def __init__(self, module: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(prog=Parser.rewrite_usage(f"python -m {module}"),
                         description=_wrap(Parser.rewrite_usage(description or "")), epilog=_wrap(epilog or ""),
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        if any(argument == "" or re.fullmatch("--[a-z-]+=", argument) for argument in args):
            self.error("an argument is empty, perhaps because a shell variable is not set: give a value, or omit the option")
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name, _, value = unknown[0].lstrip("-").partition("=")
            matches = difflib.get_close_matches(f"--{name.replace('_', '-')}", self._option_string_actions, n=1)
            hint = f"did you mean {' '.join([*matches, value]).rstrip()}?" if matches else "see --help"
            self.error(f"unknown argument {unknown[0]}: {hint}")
        return arguments

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _wrap(text: str) -> str:
    """Returns the text with its paragraphs wrapped for the terminal, except those with an indented line, such as examples."""
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(part if re.search("^ ", part, re.MULTILINE) else wrapper.fill(part)
                       for part in text.strip("\n").split("\n\n"))


def from_home(text: str) -> str:
    """Returns the path with a leading ~ or ~/ expanded, because shells do not expand the tilde in --out=~/x."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text        # noqa: PTH111 (Path raises)


def path_of(name: str | Path) -> Path:
    """Returns from_home(text) as a path. Applying path_of to the result again changes nothing.

    Path("./~/x") equals Path("~/x"), so a Path is in the folder ./~ if the folder exists, and otherwise in the home folder.
    """
    path = name if isinstance(name, Path) and Path("~").is_dir() else Path(from_home(str(name)))
    return path.absolute() if path.parts[:1] == ("~",) else path


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


def fraction(text: str) -> float:
    number = above_zero(text)
    if number >= 1:
        raise ArgumentTypeError(f"must be less than 1; got {text!r}")
    return number


def any_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(at_least(1)(size) for size in text.split(","))
    except ArgumentTypeError:
        raise ArgumentTypeError(f"sizes must be whole numbers of at least 1, such as 8,768,1024; got {text!r}") from None


def sizes_of(axes: str) -> Callable[[str], tuple[int, ...]]:
    """Returns the type of an option with one size per axis. `axes` contains the names of the axes, such as "L,C,V"."""
    def named(text: str) -> tuple[int, ...]:
        sizes = any_sizes(text)
        if len(sizes) != len(axes.split(",")):
            raise ArgumentTypeError(f"must contain one size for each of {axes}; got {text}")
        return sizes

    return named


def some_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns the type of an option that accepts a comma-separated list of names from `choices`."""
    def names(text: str) -> list[str]:
        requested = text.split(",")
        for name in requested:
            if name not in choices:
                raise ArgumentTypeError(f"the name {name!r} is unknown: choose from {', '.join(choices)}")
        return requested

    return names


def _existing(kind: str, exists: Callable[[Path], bool]) -> Callable[[str], Path]:
    def existing_path(text: str) -> Path:
        if not exists(path_of(text)):
            raise ArgumentTypeError(f"there is no {kind} {text}: check the path")
        return path_of(text)

    return existing_path


existing = _existing("file or folder", Path.exists)
existing_file = _existing("file", Path.is_file)
existing_folder = _existing("folder", Path.is_dir)


def program(text: str) -> Path:
    """Returns the path of the program that `text` names by a path or by a name on the PATH."""
    path = shutil.which(from_home(text))
    if path is None:
        raise ArgumentTypeError(f"there is no executable program {text}: check the path, or the environment variable PATH")
    return Path(path)
