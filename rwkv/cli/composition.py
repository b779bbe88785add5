"""Composes a configuration, or the jobs of a sweep, with Hydra, and explains Hydra's errors about values.

Hydra does not parse free text and paths (prompt=, data.path=, ...), so their commas, quotes, equals signs and newlines need no
escaping.
"""

import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import yaml

from rwkv.cli import configs, recipe
from rwkv.cli.arguments import CommandLine
from rwkv.cli.configs import EXPERIMENT, KERNELS, NULL_CHOICES, OPTIONAL, groups
from rwkv.cli.option_names import check, check_override, split_choices
from rwkv.config import PATH, TEXT, TrainConfig, free_text_kind, options
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

Config = TypeVar("Config", bound="DataclassInstance")
RECIPE = "recipe"                        # name of a recipe in Hydra's store
CANNOT_BE_NULL = "{0} cannot be null: give a value, or omit {0}="
NUMBERS = "a list of numbers, such as [0.9,0.99]"
EXPECTED = {bool: "true or false", int: "a whole number, such as 1000", float: "a number", list: "a list, such as [A,B]",
            list[float]: NUMBERS, tuple: NUMBERS,
            list[JsonObject]: 'a list, such as [{path: A.jsonl, weight: 0.7}, {path: "other text", weight: 0.3}], with '
                              "quotes around a path with characters other than A-Z a-z 0-9 / . _ -"}


@dataclass(frozen=True)
class Job:
    """A run of a sweep: the options that differ between the runs, the complete arguments, and the configuration."""

    swept: dict[str, str]
    arguments: list[str]
    config: Any


Jobs = Callable[[CommandLine], list[Job]]


def compose(line: CommandLine, schema: type[Config], config_name: str) -> Config:
    """Returns the `schema` object for a command line. Raises UserError for a value of the wrong type, and for a sweep.

    An experiment whose hydra.sweeper.params have several values is a sweep, unless the command line sets these options.
    """
    with _hydra(schema, config_name):
        params = _sweep_overrides(config_name, schema, line) if EXPERIMENT in line.keys else []
        for _, swept in _combinations([*params, *line.overrides], schema):
            _require_brackets(swept, line, schema)
            if swept:
                raise UserError(f"several values of {', '.join(swept)} require a sweep: use train.py -m")
        return _compose(config_name, schema, line.overrides, line.verbatim)


def _require_brackets(swept: dict[str, str], line: CommandLine, schema: type) -> None:
    """Raises UserError for an option that is a list, if its values were typed without brackets, and so are those of a sweep."""
    typed = dict(map(_split_override, line.overrides))
    for key in (key for key in swept if key in typed and key in options(schema)):
        if get_origin(options(schema)[key].type) in (list, tuple) and not typed[key].startswith("["):
            raise UserError(f"{key} must be {_expected_value(key, schema)}; got {typed[key]}")


def jobs(line: CommandLine, schema: type, config_name: str) -> list[Job]:
    """Returns the jobs of a sweep, one for each combination of values. Raises UserError like check and compose.

    The values are those of the command line and of an experiment's hydra.sweeper.params.
    """
    check(line, schema)
    with _hydra(schema, config_name):
        params = _sweep_overrides(config_name, schema, line)
        for override in params:
            check_override(override, schema)
        combinations = _combinations([*params, *line.overrides], schema)
        keys = [_split_override(override)[0] for override in line.overrides]
        if repeated := next((key for _, swept in combinations for key in swept if keys.count(key) > 1), None):
            raise UserError(f"{repeated}= occurs {keys.count(repeated)} times, so only the last one would have an effect: list "
                            f"all values as {repeated}=A,B")
        verbatim = [f"{key}={value}" for key, values in line.verbatim.items()
                    for value in (values if isinstance(values, list) else [values])]
        return [Job(swept, [*chosen, *verbatim], _compose(config_name, schema, chosen, line.verbatim))
                for chosen, swept in combinations]


@contextmanager
def _hydra(schema: type, config_name: str) -> Iterator[None]:
    """Registers the schema, the kernels and the folder of configurations with Hydra for the `with` block."""
    import hydra

    _restore_parser_asserts()
    _register(schema, config_name)
    with hydra.initialize_config_dir(str(configs.CONFIGS), version_base="1.3"):
        yield


@lru_cache(maxsize=1)                    # a later schema replaces an earlier one of the same name
def _register(schema: type, config_name: str) -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name=f"{config_name}_schema", node=schema)
    for name in KERNELS:
        store.store(group="kernel", name=name, node={"name": name})


def as_yaml(config: "DataclassInstance") -> str:
    plain = json.loads(json.dumps(asdict(config)))               # converts tuples to lists
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def _sweep_overrides(config_name: str, schema: type, line: CommandLine) -> list[str]:
    """Returns the experiment's hydra.sweeper.params as overrides, except keys that the command line sets."""
    from omegaconf import OmegaConf

    single = [override for override in line.overrides if not any(swept for _, swept in _combinations([override], schema))]
    with _composition(config_name, schema, single, return_hydra_config=True) as composed:
        params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    plain = {key.lstrip("+"): value for key, value in params.items()}
    return [f"{key}={value}" for key, value in plain.items() if key not in line.keys]


def _combinations(overrides: list[str], schema: type) -> list[tuple[list[str], dict[str, str]]]:
    """Returns, for each combination of values, the job's overrides and the options with several values."""
    alternatives = [_alternatives(override, schema) for override in overrides]
    return [([text for text, _ in job if text not in NULL_CHOICES],
             {key: value for _, swept in job for key, value in swept.items()}) for job in itertools.product(*alternatives)]


def _alternatives(override: str, schema: type) -> list[tuple[str, dict[str, str]]]:
    """Returns, for each value of an override, the override with this value; and {key: value} if there are several values."""
    key, value = _split_override(override)
    if key == EXPERIMENT:                # the value may be a path, which Hydra's grammar rejects
        several = split_choices(key, value)
        return [(f"{key}={choice}", {key: choice} if len(several) > 1 else {}) for choice in several]
    from hydra.core.override_parser.types import Glob, IntervalSweep

    item = _parse(override, schema)
    if not item.is_sweep_override():
        return [(override, {})]
    if isinstance(item.value(), Glob | IntervalSweep):
        raise UserError(f"{key}={value} must not use glob() or interval(): list the values as {key}=A,B")
    values = list(item.sweep_string_iterator())
    if not values:
        raise UserError(f"{override} has no values: give at least one, or a range(START,STOP) whose STOP is above START")
    return [(f"{item.key_or_group}={value}", {str(item.key_or_group): value}) for value in values]


def _parse(override: str, schema: type) -> "Override":
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except HydraException as error:
        key = override.partition("=")[0]
        expected = _expected_value(key, schema)
        reason = f"{key} must be {expected}" if expected else _first_line(error)
        raise UserError(f"cannot read {override}: {reason}") from None


def _compose(config_name: str, schema: type[Config], overrides: list[str], verbatim: dict[str, str | list[str]]) -> Config:
    with _composition(config_name, schema, overrides) as composed:
        config: Config = build(composed, verbatim)
        return config


@contextmanager
def _composition(config_name: str, schema: type, overrides: list[str], **more: bool) -> Iterator["DictConfig"]:
    """Yields Hydra's composition. Raises UserError for any error of Hydra, here or inside the `with` block."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    recipes = _chosen_recipes(overrides, schema)
    others = [override for override in overrides if _split_override(override)[0] not in recipes]
    try:
        for group, settings in recipes.items():
            ConfigStore.instance().store(RECIPE, settings.content, group, "_global_")
        yield hydra.compose(config_name, [*others, *(f"{group}={RECIPE}" for group in recipes)], **more)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        if isinstance(cause, OmegaConfBaseException):
            raise UserError(_describe_error(cause, schema, overrides, recipes)) from None
        raise UserError(_first_line(error)) from None


def _chosen_recipes(overrides: list[str], schema: type) -> dict[str, recipe.Recipe]:
    chosen = dict(map(_split_override, overrides)) if schema is TrainConfig else {}
    kinds = {key: free_text_kind(item) for key, item in options(schema).items()}
    texts = [key for key, kind in kinds.items() if kind or options(schema)[key].type == list[JsonObject]]
    paths = [key for key, kind in kinds.items() if kind == PATH]
    return {group: recipe.read(recipe.choice_file(chosen[group], configs.CONFIGS / group),
                               groups(schema)).verbatim(texts).from_home(paths)
            for group in OPTIONAL if chosen.get(group, "null") != "null"}


def _split_override(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _describe_error(error: "OmegaConfBaseException", schema: type, overrides: list[str],
                    recipes: dict[str, recipe.Recipe]) -> str:
    key = str(error.full_key or "").partition("[")[0]    # without the index of a list
    values: JsonObject = dict(map(_split_override, overrides))
    if not key:                          # OmegaConf names no option if a list contains something other than mappings
        present = {*values, *itertools.chain.from_iterable(settings.options for settings in recipes.values())}
        key = next((name for name, item in options(schema).items() if name in present and item.type == list[JsonObject]), "")
    # The error is in the first recipe that sets the option: experiment= may be a user's file, debug= never is
    wrong = next((settings for settings in recipes.values() if key in settings.options or not key), None)
    where = ""
    if wrong is not None and key not in values:
        values, where = wrong.options, f"{wrong.path}: "
    expected = _expected_value(key, schema)
    if key in values and values[key] in (None, "null"):
        return f"{where}{CANNOT_BE_NULL.format(key)}"
    if expected and key in values:
        return f"{where}{key} must be {expected}; got {values[key]}"
    return f"{where}{key}: {_first_line(error)}" if key else f"{where}{_first_line(error)}"


def _expected_value(key: str, schema: type) -> str | None:
    """Describes the values that an option accepts. Returns None if only the option's help describes them."""
    item = options(schema).get(key)
    if item is None:
        return None
    if item.metadata["one_of"]:
        return f"one of {', '.join(item.metadata['one_of'])}"
    kind: Any = get_args(item.type)[0] if isinstance(item.type, UnionType) else item.type        # the type before "| None"
    return EXPECTED.get(kind) or EXPECTED.get(get_origin(kind))


def _restore_parser_asserts() -> None:
    """Compiles Hydra's override parser again if python -O dropped its assert statements, which have side effects."""
    if sys.flags.optimize == 0:
        return
    from hydra.core.override_parser import overrides_parser, overrides_visitor

    source = Path(overrides_visitor.__file__).read_text(encoding="utf-8")
    exec(compile(source, overrides_visitor.__file__, "exec", optimize=0), vars(overrides_visitor))
    vars(overrides_parser)["HydraOverrideVisitor"] = overrides_visitor.HydraOverrideVisitor


def build(composed: "DictConfig", verbatim: dict[str, str | list[str]]) -> Any:
    """Returns the dataclass object of a composed configuration, with the verbatim values.

    The verbatim value null means None, except for options of the kind `TEXT`.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(composed)
    items = options(type(config))
    changed = []
    for key, value in verbatim.items():
        group, _, name = key.rpartition(".")
        target = operator.attrgetter(group)(config) if group else config
        is_null = value == "null" and free_text_kind(items[key]) != TEXT
        if is_null and type(None) not in get_args(items[key].type):
            raise UserError(CANNOT_BE_NULL.format(key))
        setattr(target, name, None if is_null else value)
        changed.append(target)
    for target in changed:
        getattr(target, "__post_init__", lambda: None)()         # checks the new values
    return config


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
