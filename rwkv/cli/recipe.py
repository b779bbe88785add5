"""Recipes: YAML files with options of a training run, for experiment=.

    # any options, in groups or by dotted name
    optim: {lr: 1e-4}
    model.n_layer: 6
    data: jsonl                          # a choice of a group
    defaults: [override /optim: muon]    # also a choice, in Hydra's syntax
    hydra: {sweeper: {params: {seed: "0,1"}}}    # values for a sweep, -m

The config.yaml of a run is a recipe too: the new run has the same options, in its own directory.
"""

import os
import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kernels.arguments import from_home
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import read_text

ENDINGS = (".yaml", ".yml")
RUN_FILE = "config.yaml"                 # in the directory of a run
RUN_GROUPS = {"kernel", "model", "data", "optim", "trainer", "logger"}        # groups that the file of every run has
SINGLE_RUN_OPTIONS = ("out_dir", "resume", "plan")       # options in a run's file that a new run ignores
REFERENCE = re.compile(r"(\\*)\$\{")      # OmegaConf's interpolation; backslashes escape it
MAX_DEPTH = 3                            # maximum levels of nesting; options have fewer
DEFAULT = re.compile(r"(?:override\s+)?/?(\w+)")         # a group in an entry of `defaults`
SWEPT = "hydra.sweeper.params."
MISSING = "???"                          # OmegaConf's mark of a value to be given later, which it would ignore


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe: options by dotted key, choices by group, and values for a sweep by option or group."""

    path: Path
    options: JsonObject
    choices: dict[str, str]
    swept: JsonObject

    @property
    def content(self) -> JsonObject:
        """The recipe as nested dictionaries, with choices in Hydra's syntax."""
        nested: JsonObject = {}
        for key, value in self.options.items():
            *groups, name = key.split(".")
            group = nested
            for part in groups:
                group = group.setdefault(part, {})
            group[name] = value
        sweeper = {"hydra": {"sweeper": {"params": self.swept}}} if self.swept else {}
        return {**sweeper, **nested, "defaults": [{f"override /{group}": choice} for group, choice in self.choices.items()]}

    def from_home(self, paths: Collection[str]) -> "Recipe":
        """The recipe with a leading ~ expanded in the options that `paths` names."""
        expanded = {key: from_home(value) for key, value in self.options.items() if key in paths and isinstance(value, str)}
        return replace(self, options=self.options | expanded)


def is_path(choice: str) -> bool:
    """Whether a choice is the path of a user's file: ./mine.yaml, mine.yml, runs/latest."""
    return choice.endswith(ENDINGS) or "/" in choice or os.sep in choice


def located(choice: str, folder: Path) -> Path:
    """The file of a choice: a name in the built-in `folder`, the path of a file, or the path of a run's directory."""
    if not is_path(choice):
        return folder / f"{choice}.yaml"
    path = Path(from_home(choice))
    return path / RUN_FILE if (path / RUN_FILE).is_file() else path


def read(path: Path, groups: Collection[str]) -> Recipe:
    """Reads a recipe. Raises UserError for a file that cannot be read, is not YAML, sets nothing, or has a duplicate key.

    groups: the names of groups for which the file may give a choice instead of options. Names of options are not checked.
    """
    content = _mapping(path)
    defaults = content.pop("defaults", [])
    swept = _swept(path, {key: content.pop(key) for key in [*content] if str(key).partition(".")[0] == "hydra"})
    options: JsonObject = {}
    for key, value in _leaves(content):
        if key in options:
            raise UserError(f"{path} sets {key} twice: delete one of the two")
        if value == MISSING:
            raise UserError(f"{path}: {key} has no value, only {MISSING}: give one, or delete the line")
        options[key] = value
    choices = _choices(path, defaults or [], groups) if groups else {}         # Hydra reads the defaults of other files
    for key, value in options.items():
        if key in groups and value is not None:
            if key in choices:
                raise UserError(f"{path} sets {key} twice: delete one of the two")
            choices[key] = str(value)
    options = {key: value for key, value in options.items() if key not in groups}
    if not (options or choices or swept or (defaults and not groups)):
        raise UserError(f"{path} sets no option: write options, such as optim: {{lr: 1e-4}}")
    if RUN_GROUPS <= content.keys() and not choices:
        options = {key: _literal(value) for key, value in options.items() if key not in SINGLE_RUN_OPTIONS}
    return Recipe(path, options, choices, swept)


def _choices(path: Path, defaults: object, groups: Collection[str]) -> dict[str, str]:
    """The choices of Hydra's list `defaults`, by group."""
    choices: dict[str, str] = {}
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        if entry == "_self_":            # Hydra's place for the options; a recipe's always override its choices
            continue
        group, choice = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (None, None)
        match = DEFAULT.fullmatch(str(group))
        if not isinstance(defaults, list) or not isinstance(choice, (str, int, float)) or match is None:
            raise UserError(f"{path}: defaults must be a list of choices, such as [override /model: small]; got {entry!r}")
        if match[1] not in groups:
            raise UserError(f"{path}: {match[1]} in defaults is not a group: set it as an option, {match[1]}: {choice}")
        if match[1] in choices:
            raise UserError(f"{path} sets {match[1]} twice: delete one of the two")
        choices[match[1]] = str(choice)
    return choices


def _swept(path: Path, hydra: JsonObject) -> JsonObject:
    """The values of hydra.sweeper.params by option. hydra: a recipe's entries for Hydra."""
    swept: JsonObject = {}
    for key, value in _leaves(hydra):
        name = key.removeprefix(SWEPT)
        if value is None and key in ("hydra", SWEPT[:-1]):
            continue
        if name == key:
            raise UserError(f"{path}: {key} has no effect here: of Hydra's own options only {SWEPT}NAME has")
        if isinstance(value, dict):
            raise UserError(f"{path}: {key} must be values separated by commas, under the option's full name, such as "
                            'model.n_layer: "2,4"')
        if name in swept:
            raise UserError(f"{path} sets {key} twice: delete one of the two")
        swept[name] = value
    return swept


def _leaves(content: JsonObject, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the values by dotted key, down to MAX_DEPTH levels, because a YAML mapping may contain itself."""
    for key, value in content.items():
        if isinstance(value, dict) and value and prefix.count(".") < MAX_DEPTH:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value or None if isinstance(value, dict) else value


def _literal(value: object) -> object:
    """The value with "${" escaped: strings in a run's file are verbatim, not OmegaConf's interpolations."""
    return REFERENCE.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _mapping(path: Path) -> JsonObject:
    text = read_text(path, str(path))
    try:
        content = yaml.load(text, _UniqueKeys)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"cannot read {path}: {_located_problem(error, text)}") from None
    except (yaml.YAMLError, ValueError) as error:        # such as a date that does not exist
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of options, such as optim: {{lr: 1e-4}}; got {type(content).__name__}")
    return content


def _located_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return str(error.problem)
    line = text.split("\n")[mark.line] if mark.line < text.count("\n") + 1 else ""
    hint = "; indent with spaces, not with a tab" if line[:len(line) - len(line.lstrip())].count("\t") else ""
    return f"line {mark.line + 1}: {error.problem}{hint}"


class _UniqueKeys(yaml.SafeLoader):
    """Raises a MarkedYAMLError for a duplicate key, which YAML forbids and SafeLoader accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
