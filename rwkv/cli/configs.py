"""Lists the groups in the folder configs/, the choices of each group, and the options that a choice sets.

The group `kernel` has a choice for each implementation of each model generation's operator. The files of the groups
`experiment` and `debug` set options of all groups.
"""

from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

import yaml

from kernels.registry import all_names, operators
from rwkv.cli import recipe
from rwkv.config import TrainConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"      # installed, or in a clone
TIME_MIXING = [name for name in operators() if name.startswith("wkv")]      # each model generation has one operator
KERNELS = tuple(sorted({"auto"}.union(*map(all_names, TIME_MIXING))))       # a model can use the kernels of its own operator
EXPERIMENT = "experiment"
OPTIONAL = (EXPERIMENT, "debug")         # groups of train.py that are null by default; their files are recipes
NULL_CHOICES = tuple(f"{group}=null" for group in OPTIONAL)         # Hydra rejects overrides that state the default
GLOBAL = "# @package _global_"           # a file with this line gives the full names of its options, including the group


def groups(schema: type) -> list[str]:
    """Returns the names of a program's groups."""
    names = {item.name for item in fields(schema)}
    names = names.union(OPTIONAL) if schema is TrainConfig else names & {"kernel", "sampling"}
    return sorted(name for name in names if name == "kernel" or (CONFIGS / name).is_dir())


def choices(group: str) -> list[str]:
    """Returns the names of a group's choices, without null."""
    return list(KERNELS) if group == "kernel" else sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def sets_all_groups(file: Path) -> bool:
    """Returns True if a choice's file may set options of all groups."""
    return GLOBAL in file.read_text(encoding="utf-8")


def check_choice(group: str, choice: str) -> None:
    """Raises UserError for an unknown choice of a group."""
    if group == EXPERIMENT and recipe.is_path(choice):
        return
    if choice not in choices(group) and not (choice == "null" and group in OPTIONAL):
        close = get_close_matches(choice, choices(group), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        own = f"{choice or 'mine'}.yaml"
        with suppress(OSError):          # the choice may be too long for a path, or in a folder that is not readable
            own = choice if choice and Path(choice).exists() else own
        paths = f"; to use your own file, give a path such as ./{own}" if group == EXPERIMENT else ""
        raise UserError(f"unknown {group} {choice!r}; {hint}the choices are: {', '.join(choices(group))}{paths}")


def preset(group: str, choice: str) -> JsonObject:
    """Returns the options that a choice sets, by name. Raises UserError for an unknown choice."""
    check_choice(group, choice)
    values: JsonObject = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    return values


def keys_set_by(group: str, choice: str) -> list[str]:
    """Returns the dotted keys that a group's choice sets; none for null, and for an option that is not a group."""
    if group == "kernel":
        return ["kernel.name"]
    file = recipe.choice_file(choice, CONFIGS / group)
    if not file.is_file():
        return []
    settings = recipe.read(file, groups(TrainConfig) if group in OPTIONAL else ())
    if group not in OPTIONAL:
        return [name if sets_all_groups(file) else f"{group}.{name}" for name in settings.options]
    chosen = [option for group, choice in settings.choices.items() for option in keys_set_by(group, choice)]
    return chosen + list(settings.options)
