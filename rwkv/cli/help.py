"""Makes the text of --help: the program's description, every option with help and current value, and each group's choices."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import Field
from operator import attrgetter
from pathlib import Path

from rwkv.cli import configs
from rwkv.cli.arguments import CommandLine
from rwkv.cli.composition import compose
from rwkv.cli.configs import KERNELS, choices
from rwkv.cli.option_names import check
from rwkv.commands import commands_as_typed
from rwkv.config import options

WIDTH = 80                               # columns of the page
COLUMN = 30                              # where the text beside a name begins


def help_page(line: CommandLine, schema: type, config_name: str, about: str) -> str:
    """Returns the text of --help: `about`, every option with its current value, and the choices of each group."""
    check(line, schema)
    defaults = (configs.CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8")
    groups = re.findall(r"^  - (?:optional )?(\w+): ", defaults, re.MULTILINE)
    descriptions = {group: {choice: _description(configs.CONFIGS / group / f"{choice}.yaml") for choice in choices(group)}
                    for group in groups if group != "kernel"}
    return _page(about, descriptions, options(schema), compose(line, schema, config_name))


def _page(about: str, descriptions: Mapping[str, Mapping[str, str]], items: Mapping[str, Field], config: object) -> str:
    """Formats the page.

    Args:
        descriptions: a description of each choice, by group and choice.
        items: the options by dotted key.
        config: the object with the current values.
    """
    lines = [commands_as_typed(about.strip()), "", "Options, OPTION=VALUE, with [current value]:"]
    heading = None
    for key, item in items.items():
        if item.metadata["heading"] not in (None, heading):
            heading = item.metadata["heading"]
            lines += ["", heading]
        lines += _entry(key, f"{item.metadata['help']}{_in_brackets(attrgetter(key)(config))}")
    lines += ["", "Choices, GROUP=NAME:"]
    for group, texts in descriptions.items():
        for name, text in texts.items():
            lines += _entry(f"{group}={name}", text)
    lines += _entry("kernel=", f"{', '.join(KERNELS)}; descriptions: {commands_as_typed('python -m kernels')}")
    return "\n".join(lines)


def _description(path: Path) -> str:
    """Returns the first comment of a YAML file other than `# @package`; "" if there is none."""
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return next((line[2:] for line in comments if not line.startswith("# @")), "")


def _entry(name: str, text: str) -> list[str]:
    """Formats `  name   text`. The text begins at `COLUMN` or, after a long name, two spaces after the name."""
    head = f"  {name}  ".ljust(COLUMN)
    wrapped = textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * COLUMN, break_long_words=False,
                            break_on_hyphens=False)
    return wrapped or [head.rstrip()]


def _in_brackets(value: object) -> str:
    """Formats a value as ` [VALUE]`. Returns "" for None, "" and []."""
    if value in (None, "", []):
        return ""
    if isinstance(value, (list, tuple)):
        return f" [{','.join(map(str, value))}]"
    if isinstance(value, float):
        return f" [{value:g}]"
    return f" [{str(value).lower() if isinstance(value, bool) else str(value).strip()}]"
