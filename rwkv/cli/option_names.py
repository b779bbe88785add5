"""Checks the names of options and choices before Hydra and torch are imported."""

from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from kernels.arguments import from_home
from rwkv.cli import configs, recipe
from rwkv.cli.arguments import FLAGS, CommandLine
from rwkv.cli.configs import EXPERIMENT, OPTIONAL, check_choice, groups, sets_all_groups
from rwkv.config import options
from rwkv.errors import UserError


def check(line: CommandLine, schema: type) -> None:
    """Raises UserError for an unknown flag, option or choice of a group."""
    for flag in (flag for flag in line.flags if flag.startswith("-") and flag not in FLAGS):
        name, _, value = flag.lstrip("-").partition("=")
        name = _best_match(name, schema)
        example = f"{name}={value or 'VALUE'}" if name in _names(schema) else "NAME=VALUE, as --help lists them"
        raise UserError(f"unknown flag {flag}. Options are written without dashes: {example}")
    for override in line.overrides:
        check_override(override, schema)


def check_override(override: str, schema: type) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"cannot read {override!r}: options must be written as KEY=VALUE, such as {_example(override, schema)}")
    if key.startswith(recipe.SWEPT):
        return
    if key.startswith(("hydra.", "hydra/")):
        raise UserError(f"{key} has no effect here: omit the option. To start several runs, use -m, sweep.jobs= and "
                        "sweep.launcher=")
    if key == "kernel.name" or key in groups(schema):
        for choice in split_choices(key, value):
            check_choice(key.removesuffix(".name"), choice)
            _check_file(key, choice, schema)
    elif key not in options(schema):
        close = similar_names(key, _names(schema))
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists all options"
        raise UserError(f"unknown option {key}; {hint}")


def split_choices(group: str, value: str) -> list[str]:
    """Splits a value at its commas into choices. A path of an existing file is a single choice."""
    if group == EXPERIMENT and Path(from_home(value)).exists():
        return [value]
    return [choice.strip() for choice in value.split(",")]


def _check_file(group: str, choice: str, schema: type) -> None:
    """Raises UserError if a choice's file cannot be read, or sets an unknown option."""
    file = recipe.choice_file(choice, configs.CONFIGS / group)
    if not file.is_file() and (group != EXPERIMENT or not recipe.is_path(choice)):
        return                           # kernels and null have no file
    settings = recipe.read(file, groups(schema) if group in OPTIONAL else ())
    prefix = "" if group in OPTIONAL or sets_all_groups(file) else f"{group}."
    try:
        for group in settings.choices.keys() & {*OPTIONAL}:
            raise UserError(f"a recipe must not contain {group}=: copy the options of the {group} file into the recipe, or "
                            f"pass {group}= on the command line")
        for key in {f"{prefix}{key}" for key in settings.options} - options(schema).keys():
            check_override(f"{key}=", schema)
        for key, value in settings.choices.items():
            check_override(f"{key}={value}", schema)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _names(schema: type) -> list[str]:
    return [*options(schema), *groups(schema)]


def _best_match(name: str, schema: type) -> str:
    """Returns the only option or group close to a wrong name, such as trainer.max_steps for max-steps, or else `name`."""
    close = [] if name in _names(schema) else similar_names(name, _names(schema))
    return close[0] if len(close) == 1 else name


def _example(word: str, schema: type) -> str:
    """Returns an example for a word without "=": the option with a similar name, or an option with this word as its path."""
    name = _best_match(word, schema)
    if name in _names(schema):
        return f"{name}=VALUE"
    if Path(word).suffix or "/" in word:
        return f"{'checkpoint' if 'checkpoint' in options(schema) else 'data=text data.path'}={word}"
    return "kernel=conv1d"


def similar_names(key: str, names: list[str]) -> list[str]:
    """Returns up to three names close to a wrong key: names with the same last part, or else with a similar spelling."""
    last = key.rpartition(".")[2]
    same_leaf = [name for name in names if name.rpartition(".")[2] == last]
    if same_leaf:
        return get_close_matches(key, same_leaf, n=3, cutoff=0.0)
    similar = get_close_matches(key, names, n=1, cutoff=0.75)
    if similar:
        return similar
    leaves = get_close_matches(last, [name.rpartition(".")[2] for name in names], n=1, cutoff=0.65)
    candidates = [name for name in names if name.rpartition(".")[2] in leaves]
    if candidates:
        return get_close_matches(key, candidates, n=3, cutoff=0.0)
    # A common group alone makes long names similar, such as trainer.fast_dev_run and trainer.val_every
    return [name for name in get_close_matches(key, names, n=1)
            if SequenceMatcher(None, last, name.rpartition(".")[2]).ratio() >= 0.5]
