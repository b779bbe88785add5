"""Sorts the arguments of a program into Hydra's overrides, values that Hydra must not parse, and flags."""

import itertools
import sys
from dataclasses import dataclass

from kernels.arguments import from_home
from rwkv.cli.configs import NULL_CHOICES, keys_set_by
from rwkv.config import PATH, TrainConfig, free_text_kind, options

SHOW_JOB = (["--cfg", "job"], ["-c", "job"])
HELP_FLAGS = ("--help", "-h")
SWEEP_FLAGS = ("-m", "--multirun")
VALUED_FLAGS = ("--cfg", "-c")           # flags that take the next argument as their value
FLAGS = (*HELP_FLAGS, *SWEEP_FLAGS, *VALUED_FLAGS)


@dataclass(frozen=True)
class CommandLine:
    """The sorted arguments of a program.

    Attributes:
        overrides: arguments KEY=VALUE that Hydra parses.
        verbatim: texts and paths by key, which Hydra must not parse.
        flags: -m, --help and --cfg job.
    """

    overrides: list[str]
    verbatim: dict[str, str | list[str]]
    flags: list[str]

    @property
    def keys(self) -> list[str]:
        """Returns the dotted keys that the user set, and the names of the groups with a chosen file."""
        return [override.partition("=")[0] for override in self.overrides] + list(self.verbatim)

    @property
    def chosen_keys(self) -> list[str]:
        """Returns the dotted keys that the chosen files set, such as trainer.accelerator for trainer=cpu."""
        pairs = [override.partition("=")[::2] for override in self.overrides]
        return [option for group, choice in pairs for option in keys_set_by(group, choice)]


def split(arguments: list[str], schema: type) -> CommandLine:
    """Sorts the arguments into overrides, verbatim values, and flags. The options of `schema` say which values are verbatim.

    A leading +, Hydra's syntax for adding an option, is dropped, because the schema has all options.
    """
    line = CommandLine([], {}, [])
    items = options(schema)
    rest = (argument.lstrip("+") for argument in arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        kind = free_text_kind(items[key]) if equals and key in items else None
        if kind and items[key].type == list[str]:
            line.verbatim[key] = [*line.verbatim.get(key, []), value]
        elif kind:
            line.verbatim[key] = from_home(value) if kind == PATH else value
        elif argument.startswith("-"):
            line.flags.extend([argument, *itertools.islice(rest, argument in VALUED_FLAGS)])
        elif argument not in NULL_CHOICES or schema is not TrainConfig:
            line.overrides.append(argument)
    return line


def print_hints(line: CommandLine, schema: type, is_sweep: bool) -> None:
    """Prints a hint for each verbatim value that looks like a mistake: A,B with -m, or \\n, which is two characters."""
    for key, value in line.verbatim.items():
        if free_text_kind(options(schema)[key]) == PATH:
            continue
        if is_sweep and isinstance(value, str) and "," in value:
            print(f"{key}={value} is a single value, even with -m, because names and texts are taken verbatim", file=sys.stderr)
        values = value if isinstance(value, list) else [value]
        if any("\\n" in text and "\n" not in text for text in values):
            print(f"{key} contains a backslash and an n. For a line break, write {key}=$'\\n' in bash and zsh",
                  file=sys.stderr)
