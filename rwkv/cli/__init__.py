"""The command line of the programs: checks arguments, composes options with Hydra, reports a user's error in a sentence.

The options are fields of the dataclasses in rwkv/config.py; their values come from configs/NAME.yaml and from the files of its
groups. The group `kernel` has a choice for each implementation of any generation's operator. The files of the groups
`experiment` and `debug` set options of all groups; recipe.py reads them, built-in or the user's. Free text and paths (prompt=,
data.path=, ...) bypass Hydra's grammar: commas, quotes, equals signs and newlines need no escaping. Names are checked before
Hydra and torch are imported.
"""

import ast
import atexit
import io
import itertools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

from kernels.arguments import from_home
from kernels.registry import RENAMED, KernelUnavailable, UnknownKernel, all_names, operators
from rwkv.cli import recipe
from rwkv.cli.help import description, page
from rwkv.config import PATH, TEXT, TrainConfig, free_text, options
from rwkv.errors import UserError
from rwkv.io import signals
from rwkv.io.commands import as_installed, as_typed
from rwkv.io.garbage import uncollected
from rwkv.io.unread import abandon, unread

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"      # installed, or in a clone
TIME_MIXING = [name for name in operators() if name.startswith("wkv")]      # one operator for each generation
KERNELS = tuple(sorted({"auto"}.union(*map(all_names, TIME_MIXING))))       # a model uses those of its operator
FORMER_KERNELS = tuple(name for op in TIME_MIXING for name in RENAMED.get(op, ()))
EXPERIMENT = "experiment"
OPTIONAL = (EXPERIMENT, "debug")         # groups of train.py that default to null; their files are recipes
NULL_CHOICES = tuple(f"{group}=null" for group in OPTIONAL)         # the defaults, which Hydra rejects as overrides
RECIPE = "recipe"                        # name of a recipe in Hydra's store
GLOBAL = "# @package _global_"           # in a choice's file: its options have full names, outside the group
SHOW_JOB = (["--cfg", "job"], ["-c", "job"])
HELP_FLAGS = ("--help", "-h")
SWEEP_FLAGS = ("-m", "--multirun")
VALUED_FLAGS = ("--cfg", "-c")           # followed by a value
FLAGS = (*HELP_FLAGS, *SWEEP_FLAGS, *VALUED_FLAGS)
READER_GONE = 1                          # exit statuses
USER_ERROR = 2
INTERRUPTED = 130
CANNOT_BE_NULL = "{0} cannot be null: give a value, or leave {0}= out"
NUMBERS = "a list of numbers, such as [0.9,0.99]"
EXPECTED = {bool: "true or false", int: "a whole number, such as 1000", float: "a number", list: "a list, such as [A,B]",
            list[float]: NUMBERS, tuple: NUMBERS,
            list[dict[str, Any]]: 'a list, such as [{path: A.jsonl, weight: 0.7}, {path: "other text", weight: 0.3}], with '
                                  "quotes around a path with characters other than A-Z a-z 0-9 / . _ -"}


def command(program: str) -> str:
    """The command that starts a program: `timemix train` if installed or if the user typed timemix, else `python train.py`."""
    clone_command = f"python {program}.py"
    return as_typed(clone_command) if (PACKAGE.parent / f"{program}.py").is_file() else as_installed(clone_command)


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
        """The dotted keys that the chosen groups set: trainer.accelerator for trainer=cpu."""
        pairs = [override.partition("=")[::2] for override in self.overrides]
        return [option for group, choice in pairs for option in _keys_set_by(group.lstrip("+"), choice)]


@dataclass(frozen=True)
class Job:
    """One run of a sweep: its swept options, its complete arguments, and its configuration."""

    swept: dict[str, str]
    arguments: list[str]
    config: Any


Jobs = Callable[[CommandLine], list[Job]]


def run(task: Callable[[Any, CommandLine], None], schema: type, config_name: str, about: str | None,
        sweep: Callable[[CommandLine, Jobs], None] | None = None) -> None:
    """Composes configs/CONFIG_NAME.yaml with sys.argv into a `schema` and calls task(config, command line).

    about: the first part of --help; None: the docstring of the task's file. sweep: called for -m instead of `task`, with the
    command line and a function that makes its jobs; None: -m is rejected. A user's error, here or in the task, ends the process
    with one sentence on standard error and exit status 2. If standard error is closed, the process continues; if standard
    output is, it ends quietly.
    """
    with redirect_stderr(unread(sys.stderr)), exit_on_user_error():
        line = split(sys.argv[1:], schema)
        if any(flag in HELP_FLAGS for flag in line.flags):
            print(help_page(line, schema, config_name, about or _docstring(task)), flush=True)
            return
        check(line, schema)
        is_sweep = any(flag in SWEEP_FLAGS for flag in line.flags)
        if is_sweep and sweep is None:
            raise UserError("-m requires train.py, the only program with sweeps: leave -m out")
        _hint(line, schema, is_sweep)
        if line.flags in SHOW_JOB:
            _show(compose(line, schema, config_name))
        elif sweep and line.flags and all(flag in SWEEP_FLAGS for flag in line.flags):
            sweep(line, partial(jobs, schema=schema, config_name=config_name))
        elif line.flags:
            raise UserError(f"{' '.join(line.flags)}: --cfg job must be the only flag")
        else:
            with uncollected():
                config = compose(line, schema, config_name)
            task(config, line)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Prints a user's error as one sentence, with exit status 2. Any other error is a bug and keeps its traceback.

    Arguments that are not UTF-8 are a user's error. The signals of rwkv/io/signals.py end the block like Ctrl-C, with exit
    status 130, and are ignored after it. Characters outside the encoding of standard output are printed as ?.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with signals.raising():
            _require_utf8(sys.argv[1:])
            yield
    except signals.Signalled as signalled:
        print(f"interrupted by {signalled.name}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:              # the reader of standard output has gone, as in: train.py --help | head
        abandon(sys.stdout)
        sys.exit(READER_GONE)
    except (UserError, UnknownKernel, KernelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:             # a full disk, a forbidden folder
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    finally:
        atexit.register(signals.ignore)  # runs before all other exit functions: atexit is last in, first out


def _require_utf8(arguments: list[str]) -> None:
    """Raises UserError for other bytes, which Python decodes to lone surrogates: no file of a run can hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"the argument {shown} must be UTF-8: rename the file, or set PYTHONUTF8=1 if the locale "
                            "is C") from None


def _docstring(task: Callable[..., None]) -> str:
    """The docstring of the task's file, from its source because python -OO drops docstrings."""
    return ast.get_docstring(ast.parse(Path(task.__code__.co_filename).read_text(encoding="utf-8"))) or ""


def _hint(line: CommandLine, schema: type, is_sweep: bool) -> None:
    """Prints a hint for suspicious verbatim values: A,B with -m, or \\n, which a shell passes as two characters."""
    for key, value in line.verbatim.items():
        if free_text(options(schema)[key]) == PATH:
            continue
        if is_sweep and isinstance(value, str) and "," in value:
            print(f"{key}={value} is a single value even with -m: names and texts are taken verbatim", file=sys.stderr)
        values = value if isinstance(value, list) else [value]
        if any("\\n" in text and "\n" not in text for text in values):
            print(f"{key}: \\n is a backslash and an n; for a line end, write {key}=$'\\n' in bash and zsh",
                  file=sys.stderr)


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


# Checks, without Hydra


def check(line: CommandLine, schema: type) -> None:
    """Raises UserError for an unknown flag, option or choice of a group."""
    for flag in (flag for flag in line.flags if flag.startswith("-") and flag not in FLAGS):
        name, _, value = flag.lstrip("-").partition("=")
        raise UserError(f"unknown flag {flag}; options are written without dashes: {_best_match(name, schema)}="
                        f"{value or 'VALUE'}")
    for override in line.overrides:
        check_override(override, schema)


def check_override(override: str, schema: type) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"cannot read {override!r}: options are written key=value, such as {_example(override, schema)}")
    key = key.lstrip("+")
    if key.startswith(("~", "hydra.", "hydra/")):
        return
    if key == "kernel.name" or key in groups(schema):
        for choice in _values(key, value):
            _check_choice(key.removesuffix(".name"), choice)
            _check_file(key, choice, schema)
    elif key not in options(schema):
        close = close_to(key, _names(schema))
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists them all"
        raise UserError(f"unknown option {key}; {hint}")


def _values(group: str, value: str) -> list[str]:
    """The choices in a comma-separated value; a file's path may contain commas."""
    if group == EXPERIMENT and Path(from_home(value)).exists():
        return [value]
    return [choice.strip() for choice in value.split(",")]


def _check_file(group: str, choice: str, schema: type) -> None:
    """Raises UserError if a choice's file cannot be read, or sets an unknown option."""
    file = recipe.located(choice, CONFIGS / group)
    if not file.is_file() and (group != EXPERIMENT or not recipe.is_path(choice)):
        return                           # a kernel, or null
    settings = recipe.read(file, groups(schema) if group in OPTIONAL else ())
    prefix = "" if group in OPTIONAL or _is_global(file) else f"{group}."
    chosen = [(key.removeprefix("override /"), value) for entry in settings.hydra.get("defaults", []) if isinstance(entry, dict)
              for key, value in entry.items() if key.startswith("override /")]
    try:
        for group in {*settings.choices, *dict(chosen)} & {*OPTIONAL}:
            raise UserError(f"a recipe cannot set {group}=: copy its options here, or set it on the command line")
        for key in {f"{prefix}{key}" for key in settings.options} - options(schema).keys():
            check_override(f"{key}=", schema)
        for key, value in [*settings.choices.items(), *chosen]:
            check_override(f"{key}={value}", schema)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _is_global(file: Path) -> bool:
    """Whether a choice's file sets options of all groups."""
    return GLOBAL in file.read_text(encoding="utf-8")


def groups(schema: type) -> list[str]:
    """The groups of a program."""
    names = {item.name for item in fields(schema)}
    names = names.union(OPTIONAL) if schema is TrainConfig else names & {"kernel", "sampling"}
    return sorted(name for name in names if name == "kernel" or (CONFIGS / name).is_dir())


def _names(schema: type) -> list[str]:
    """The names of all options and groups."""
    return [*options(schema), *groups(schema)]


def _best_match(name: str, schema: type) -> str:
    """The only option close to a wrong name, such as trainer.max_steps for max-steps; else `name` itself."""
    close = [] if name in _names(schema) else close_to(name, _names(schema))
    return close[0] if len(close) == 1 else name


def _example(word: str, schema: type) -> str:
    """An example for a word without "=": the option of that name, or one that takes the word as a path."""
    name = _best_match(word, schema)
    if name in _names(schema):
        return f"{name}=VALUE"
    if Path(word).suffix or "/" in word:
        return f"{'checkpoint' if 'checkpoint' in options(schema) else 'data=text data.path'}={word}"
    return "kernel=conv1d"


def close_to(key: str, names: list[str]) -> list[str]:
    """At most three names close to a wrong key: those with the same last part, or else those spelt alike."""
    last = key.rpartition(".")[2]
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return get_close_matches(key, same, n=3, cutoff=0.0)
    whole = get_close_matches(key, names, n=1, cutoff=0.75)
    if whole:
        return whole
    leaves = get_close_matches(last, [name.rpartition(".")[2] for name in names], n=1, cutoff=0.7)
    candidates = [name for name in names if name.rpartition(".")[2] in leaves]
    return get_close_matches(key, candidates, n=3, cutoff=0.0) or get_close_matches(key, names, n=1)


def choices(group: str) -> list[str]:
    """The names of a group's choices, without null."""
    return list(KERNELS) if group == "kernel" else sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _check_choice(group: str, choice: str) -> None:
    if (group == "kernel" and choice in FORMER_KERNELS) or (group == EXPERIMENT and recipe.is_path(choice)):
        return
    if choice not in choices(group) and not (choice == "null" and group in OPTIONAL):
        close = get_close_matches(choice, choices(group), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        paths = f"; for your own file give its path, such as ./{choice or 'mine'}.yaml" if group == EXPERIMENT else ""
        raise UserError(f"unknown {group} {choice!r}; {hint}there are: {', '.join(choices(group))}{paths}")


def preset(group: str, choice: str) -> dict[str, Any]:
    """The options that a choice sets, by name. Raises UserError for an unknown choice."""
    _check_choice(group, choice)
    values: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    return values


def _keys_set_by(group: str, choice: str) -> list[str]:
    """The dotted keys that a group's choice sets; [] for null, and for an option outside groups."""
    if group == "kernel":
        return ["kernel.name"]
    file = recipe.located(choice, CONFIGS / group)
    if not file.is_file():
        return []
    settings = recipe.read(file, groups(TrainConfig) if group in OPTIONAL else ())
    if group not in OPTIONAL:
        return [name if _is_global(file) else f"{group}.{name}" for name in settings.options]
    overridden = [pair for entry in settings.content["defaults"] for pair in entry.items()]
    chosen = [option for key, value in overridden for option in _keys_set_by(key.removeprefix("override /"), value)]
    return chosen + list(settings.options)


# Help


def help_page(line: CommandLine, schema: type, config_name: str, about: str) -> str:
    """The text of --help: `about`, every option with its current value, and the choices of each group."""
    check(line, schema)
    defaults = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8")
    groups = re.findall(r"^  - (?:optional )?(\w+): ", defaults, re.MULTILINE)
    descriptions = {group: {choice: description(CONFIGS / group / f"{choice}.yaml") for choice in choices(group)}
                    for group in groups if group != "kernel"}
    return page(about, KERNELS, descriptions, options(schema), compose(line, schema, config_name))


# Composition, by Hydra


def compose(line: CommandLine, schema: type, config_name: str) -> Any:
    """The `schema` object for a command line. Raises UserError for a value of the wrong type, and for a sweep."""
    with _hydra(schema, config_name):
        for _, swept in _combinations(line.overrides, schema):
            if swept:
                raise UserError(f"several values of {', '.join(swept)} require a sweep: train.py -m")
        return _compose(config_name, schema, line.overrides, line.verbatim)


def jobs(line: CommandLine, schema: type, config_name: str) -> list[Job]:
    """The jobs of a sweep: all combinations of the options with several values, and of an experiment's hydra.sweeper.params.

    Raises UserError like check and compose.
    """
    check(line, schema)
    with _hydra(schema, config_name):
        params = _params(config_name, schema, line)
        for override in params:
            check_override(override, schema)
        verbatim = [f"{key}={value}" for key, values in line.verbatim.items()
                    for value in (values if isinstance(values, list) else [values])]
        return [Job(swept, [*chosen, *verbatim], _compose(config_name, schema, chosen, line.verbatim))
                for chosen, swept in _combinations([*params, *line.overrides], schema)]


@contextmanager
def _hydra(schema: type, config_name: str) -> Iterator[None]:
    """Registers the schema, the kernels and the folder of configurations with Hydra."""
    import hydra
    from hydra.core.config_store import ConfigStore

    _restore_parser_asserts()
    store = ConfigStore.instance()
    store.store(name=f"{config_name}_schema", node=schema)
    for name in (*KERNELS, *FORMER_KERNELS):
        store.store(group="kernel", name=name, node={"name": name})
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def _show(config: Any) -> None:
    plain = json.loads(json.dumps(asdict(config)))               # tuples as lists
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="", flush=True)


def _params(config_name: str, schema: type, line: CommandLine) -> list[str]:
    """The configuration's hydra.sweeper.params as overrides, without the keys that the command line sets."""
    from omegaconf import OmegaConf

    single = [override for override in line.overrides if not any(swept for _, swept in _combinations([override], schema))]
    with _composed(config_name, schema, single, return_hydra_config=True) as composed:
        params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    return [f"{key}={value}" for key, value in params.items() if key not in line.keys]


def _combinations(overrides: list[str], schema: type) -> list[tuple[list[str], dict[str, str]]]:
    """For each combination of values: the overrides of the job, and its swept options."""
    alternatives = [_alternatives(override, schema) for override in overrides]
    return [([text for text, _ in job if text not in NULL_CHOICES],
             {key: value for _, swept in job for key, value in swept.items()}) for job in itertools.product(*alternatives)]


def _alternatives(override: str, schema: type) -> list[tuple[str, dict[str, str]]]:
    """For each value of an override: the override of the job, and the option if it is swept."""
    key, value = _split(override)
    if key == EXPERIMENT:                # may be a path, which Hydra's grammar rejects
        several = _values(key, value)
        return [(f"{key}={choice}", {key: choice} if len(several) > 1 else {}) for choice in several]
    item = _parse(override, schema)
    if not item.is_sweep_override():
        return [(override, {})]
    return [(f"{item.key_or_group}={value}", {str(item.key_or_group): value}) for value in item.sweep_string_iterator()]


def _parse(override: str, schema: type) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except HydraException as error:
        key = override.partition("=")[0].lstrip("+")
        expected = _expected_values(key, schema)
        reason = f"{key} must be {expected}" if expected else _first_line(error)
        raise UserError(f"cannot read {override}: {reason}") from None


def _compose(config_name: str, schema: type, overrides: list[str], verbatim: dict[str, str | list[str]]) -> Any:
    with _composed(config_name, schema, overrides) as composed:
        return build(composed, verbatim)


@contextmanager
def _composed(config_name: str, schema: type, overrides: list[str], **more: bool) -> Iterator[Any]:
    """Hydra's composition. Raises UserError for a value of the wrong type, also inside the block, and for all other errors of
    Hydra.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    recipes = _recipes(overrides, schema)
    others = [override for override in overrides if _split(override)[0] not in recipes]
    try:
        for group, settings in recipes.items():
            ConfigStore.instance().store(RECIPE, settings.content, group, "_global_")
        yield hydra.compose(config_name, [*others, *(f"{group}={RECIPE}" for group in recipes)], **more)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        is_type = isinstance(cause, OmegaConfBaseException)
        raise UserError(_type_error(cause, schema, overrides, recipes) if is_type else _first_line(error)) from None


def _recipes(overrides: list[str], schema: type) -> dict[str, recipe.Recipe]:
    """The recipes that the overrides choose, by group."""
    chosen = dict(map(_split, overrides)) if schema is TrainConfig else {}
    paths = {key for key, item in options(schema).items() if free_text(item) == PATH}
    return {group: recipe.read(recipe.located(chosen[group], CONFIGS / group), groups(schema)).from_home(paths)
            for group in OPTIONAL if chosen.get(group, "null") != "null"}


def _split(override: str) -> tuple[str, str]:
    """The key and the value of an override."""
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _type_error(error: Any, schema: type, overrides: list[str], recipes: dict[str, recipe.Recipe]) -> str:
    """The message about a value that OmegaConf has rejected."""
    key = str(error.full_key or "").partition("[")[0]    # without the index of a list
    values: dict[str, Any] = dict(map(_split, overrides))
    where = ""
    for settings in recipes.values() if key not in values else ():
        if key in settings.options or not key:
            values, where = settings.options, f"{settings.path}: "
    expected = _expected_values(key, schema)
    if key in values and values[key] in (None, "null"):
        return f"{where}{CANNOT_BE_NULL.format(key)}"
    if expected and key in values:
        return f"{where}{key} must be {expected}; got {values[key]}"
    return f"{where}{key}: {_first_line(error)}" if key else f"{where}{_first_line(error)}"


def _expected_values(key: str, schema: type) -> str | None:
    """The values that the option takes, in words; None if only its help describes them."""
    item = options(schema).get(key)
    if item is None:
        return None
    if item.metadata["one_of"]:
        return f"one of {', '.join(item.metadata['one_of'])}"
    kind: Any = get_args(item.type)[0] if isinstance(item.type, UnionType) else item.type        # int | None
    return EXPECTED.get(kind) or EXPECTED.get(get_origin(kind))


def _restore_parser_asserts() -> None:
    """Compiles Hydra's override parser with its assert statements, which python -O drops: they advance the parser."""
    if sys.flags.optimize == 0:
        return
    from hydra.core.override_parser import overrides_parser, overrides_visitor

    source = Path(overrides_visitor.__file__).read_text(encoding="utf-8")
    exec(compile(source, overrides_visitor.__file__, "exec", optimize=0), vars(overrides_visitor))
    vars(overrides_parser)["HydraOverrideVisitor"] = overrides_visitor.HydraOverrideVisitor


def build(composed: Any, verbatim: dict[str, str | list[str]]) -> Any:
    """The schema's object with the verbatim values. null means None, except for TEXT options."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(composed)
    items = options(type(config))
    changed = []
    for key, value in verbatim.items():
        group, _, name = key.rpartition(".")
        target = operator.attrgetter(group)(config) if group else config
        is_null = value == "null" and free_text(items[key]) != TEXT
        if is_null and type(None) not in get_args(items[key].type):
            raise UserError(CANNOT_BE_NULL.format(key))
        setattr(target, name, None if is_null else value)
        changed.append(target)
    for target in changed:
        getattr(target, "__post_init__", lambda: None)()         # checks the new values
    return config


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
