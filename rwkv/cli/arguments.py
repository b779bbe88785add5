"""The arguments of a program: Hydra's overrides, verbatim values, and flags."""

import itertools
import sys
from dataclasses import dataclass

from kernels.arguments import from_home
from rwkv.cli.configs import NULL_CHOICES, keys_set_by
from rwkv.config import PATH, TrainConfig, free_text, options

SHOW_JOB = (["--cfg", "job"], ["-c", "job"])
HELP_FLAGS = ("--help", "-h")
SWEEP_FLAGS = ("-m", "--multirun")
VALUED_FLAGS = ("--cfg", "-c")           # flags that take the next argument as their value
FLAGS = (*HELP_FLAGS, *SWEEP_FLAGS, *VALUED_FLAGS)


@dataclass(frozen=True)
class CommandLine:
    """Overrides for Hydra, verbatim values by key, and flags (-m, --help, --cfg job)."""

    overrides: list[str]
    verbatim: dict[str, str | list[str]]
    flags: list[str]

    @property
    def keys(self) -> list[str]:
        """The dotted keys that the user set, and the names of chosen groups."""
        return [override.partition("=")[0].lstrip("+~") for override in self.overrides] + list(self.verbatim)

    @property
    def chosen(self) -> list[str]:
        """The dotted keys that the chosen groups set, such as trainer.accelerator if trainer=cpu is chosen."""
        pairs = [override.partition("=")[::2] for override in self.overrides]
        return [option for group, choice in pairs for option in keys_set_by(group.lstrip("+"), choice)]


def split(arguments: list[str], schema: type) -> CommandLine:
    """Sorts the arguments into overrides, verbatim values, and flags."""
    line = CommandLine([], {}, [])
    items = options(schema)
    rest = iter(arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        key = key.lstrip("+")
        kind = free_text(items[key]) if equals and key in items else None
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
    """Prints a hint for each verbatim value that looks wrong: A,B with -m, or \\n, which a shell passes as two characters."""
    for key, value in line.verbatim.items():
        if free_text(options(schema)[key]) == PATH:
            continue
        if is_sweep and isinstance(value, str) and "," in value:
            print(f"{key}={value} is a single value even with -m: names and texts are taken verbatim", file=sys.stderr)
        values = value if isinstance(value, list) else [value]
        if any("\\n" in text and "\n" not in text for text in values):
            print(f"{key}: \\n is a backslash and an n; for a line end, write {key}=$'\\n' in bash and zsh",
                  file=sys.stderr)
