"""Reads recipes: YAML files with the options of a training run, for experiment=. A recipe may contain

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
RUN_FILE = "config.yaml"                 # name of the recipe in a run's directory
RUN_GROUPS = {"kernel", "model", "data", "optim", "trainer", "logger"}        # groups in the file of every run
SINGLE_RUN_OPTIONS = ("out_dir", "resume", "plan")       # a new run ignores these options of a run's file
REFERENCE = re.compile(r"(\\*)\$\{")      # the start of an interpolation in OmegaConf, and the backslashes that escape it
MAX_DEPTH = 3                            # maximum levels of nesting, more than options have
DEFAULT = re.compile(r"(?:override\s+)?/?(\w+)")         # a group in an entry of `defaults`
SWEPT = "hydra.sweeper.params."
MISSING = "???"                          # OmegaConf's placeholder for a value to be given later


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe.

    Attributes:
        options: values by dotted key.
        choices: names of chosen files by group.
        swept: values for a sweep, separated by commas, by option or group.
        written: each option's value with all scalars as the strings in the file, such as "no" for False.
    """

    path: Path
    options: JsonObject
    choices: dict[str, str]
    swept: JsonObject
    written: JsonObject

    @property
    def content(self) -> JsonObject:
        """Returns the recipe as nested dictionaries, with the choices in Hydra's syntax."""
        nested: JsonObject = {}
        for key, value in self.options.items():
            *groups, name = key.split(".")
            group = nested
            for part in groups:
                group = group.setdefault(part, {})
            group[name] = value
        sweeper = {"hydra": {"sweeper": {"params": self.swept}}} if self.swept else {}
        return {**sweeper, **nested, "defaults": [{f"override /{group}": choice} for group, choice in self.choices.items()]}

    def verbatim(self, texts: Collection[str]) -> "Recipe":
        """Returns the recipe with the strings in the file for the options `texts`, which YAML may read as numbers or dates."""
        other = {key: _as_written(value, self.written[key]) for key, value in self.options.items()
                 if key in texts and key in self.written}
        return replace(self, options=self.options | other)

    def from_home(self, paths: Collection[str]) -> "Recipe":
        """Returns the recipe with a leading ~ expanded in the options that `paths` names."""
        expanded = {key: from_home(value) for key, value in self.options.items() if key in paths and isinstance(value, str)}
        return replace(self, options=self.options | expanded)


def is_path(choice: str) -> bool:
    """Returns True if a choice is the path of a user's file, such as ./mine.yaml, mine.yml or runs/latest."""
    return choice.endswith(ENDINGS) or "/" in choice or os.sep in choice


def choice_file(choice: str, folder: Path) -> Path:
    """Returns the file of a choice, which is a name in `folder`, the path of a file, or the path of a run's directory."""
    if not is_path(choice):
        return folder / f"{choice}.yaml"
    path = Path(from_home(choice))
    return path / RUN_FILE if (path / RUN_FILE).is_file() else path


def read(path: Path, groups: Collection[str]) -> Recipe:
    """Reads a recipe. Raises UserError for a file that cannot be read, is not YAML, sets nothing, or has a duplicate key.

    The names of options are not checked. `groups` are the groups for which the file may name a choice instead of options.
    """
    content = _read_mapping(path)
    written = dict(_leaves(_read_mapping(path, _Strings)))
    defaults = content.pop("defaults", [])
    swept = _read_swept(path, {key: content.pop(key) for key in [*content] if str(key).partition(".")[0] == "hydra"})
    options: JsonObject = {}
    for key, value in _leaves(content):
        if key in options:
            raise UserError(f"{path} sets {key} twice: delete one of the two lines")
        if value == MISSING:
            raise UserError(f"{path}: {key} has no value, only the placeholder {MISSING}: give a value, or delete the line")
        options[key] = value
    choices = _read_choices(path, defaults or [], groups) if groups else {}         # without groups, Hydra reads the defaults
    for key, value in options.items():
        if key in groups and value is not None:
            if key in choices:
                raise UserError(f"{path} sets {key} twice: delete one of the two lines")
            choices[key] = str(value)
    options = {key: value for key, value in options.items() if key not in groups}
    if not (options or choices or swept or (defaults and not groups)):
        raise UserError(f"{path} sets no option: write at least one option, such as optim: {{lr: 1e-4}}")
    if RUN_GROUPS <= content.keys() and not choices:
        options = {key: _escape_interpolation(value) for key, value in options.items() if key not in SINGLE_RUN_OPTIONS}
    return Recipe(path, options, choices, swept, written)


def _read_choices(path: Path, defaults: object, groups: Collection[str]) -> dict[str, str]:
    choices: dict[str, str] = {}
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        if entry == "_self_":            # Hydra's mark for the order; a recipe's options always override its choices
            continue
        group, choice = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (None, None)
        match = DEFAULT.fullmatch(str(group))
        if not isinstance(defaults, list) or not isinstance(choice, (str, int, float)) or match is None:
            raise UserError(f'{path}: "defaults" must be a list of choices, such as [override /model: small]; got {entry!r}')
        if match[1] not in groups:
            raise UserError(f'{path}: {match[1]} in "defaults" is not a group. Set the option outside "defaults", as '
                            f"{match[1]}: {choice}")
        if match[1] in choices:
            raise UserError(f"{path} sets {match[1]} twice: delete one of the two lines")
        choices[match[1]] = str(choice)
    return choices


def _read_swept(path: Path, hydra: JsonObject) -> JsonObject:
    """Returns the values of hydra.sweeper.params by option. `hydra` are a recipe's entries for Hydra."""
    swept: JsonObject = {}
    for key, value in _leaves(hydra):
        name = key.removeprefix(SWEPT)
        if value is None and key in ("hydra", SWEPT[:-1]):
            continue
        if name == key:
            raise UserError(f"{path}: {key} has no effect here. Of Hydra's own options, only {SWEPT}NAME has an effect")
        if isinstance(value, dict):
            raise UserError(f"{path}: {key} must not contain groups. Write each option's full name, and its values separated "
                            'by commas, such as model.n_layer: "2,4"')
        if isinstance(value, list):
            raise UserError(f'{path}: {key} must be a string of values separated by commas, "{",".join(map(str, value))}"; got '
                            f"the list {value}")
        if name in swept:
            raise UserError(f"{path} sets {key} twice: delete one of the two lines")
        swept[name] = value
    return swept


def _leaves(content: JsonObject, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields each dotted key and its value, down to `MAX_DEPTH` levels, because a YAML mapping may contain itself."""
    for key, value in content.items():
        if isinstance(value, dict) and value and prefix.count(".") < MAX_DEPTH:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value or None if isinstance(value, dict) else value


def _as_written(value: Any, written: Any) -> Any:
    """Returns `value` with the strings in `written` for its numbers, dates and booleans."""
    if isinstance(value, list):
        return [_as_written(*pair) for pair in zip(value, written, strict=True)]
    if isinstance(value, dict):
        return {key: _as_written(item, written.get(key, item)) for key, item in value.items()}      # <<: adds keys
    return value if value is None or isinstance(value, str) else written


def _escape_interpolation(value: object) -> object:
    """Returns the value with "${" escaped, because strings in a run's file are verbatim, not OmegaConf's interpolations."""
    return REFERENCE.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _read_mapping(path: Path, loader: type[yaml.SafeLoader] | None = None) -> JsonObject:
    text = read_text(path, str(path))
    try:
        content = yaml.load(text, loader or _UniqueKeys)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"cannot read {path}: {_located_problem(error, text)}") from None
    except (yaml.YAMLError, ValueError) as error:        # such as a nonexistent date
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


class _Strings(yaml.SafeLoader):
    """A loader that reads every scalar without a tag as a string."""

    yaml_implicit_resolvers = {}         # noqa: RUF012 (types-PyYAML declares an instance variable)


class _UniqueKeys(yaml.SafeLoader):
    """A loader that raises MarkedYAMLError for a duplicate key. YAML forbids duplicate keys, but SafeLoader accepts them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep)
