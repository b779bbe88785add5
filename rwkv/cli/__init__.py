"""The command line of train, generate and evaluate: arguments are checked, Hydra composes, and a user's error is one sentence.

The options are the dataclasses of rwkv/config.py; configs/NAME.yaml and the files of its groups compose them, and the group
`kernel` has a choice for each implementation of any generation's operator. Free text and paths (prompt=, data.path=, ...) never
reach Hydra's grammar: commas, quotes, equals signs and newlines need no escaping. A wrong name is found before Hydra and torch
are imported.
"""

import argparse
import ast
import atexit
import io
import itertools
import json
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
from rwkv.cli.help import description, page
from rwkv.config import PATH, TEXT, free_text, options
from rwkv.errors import UserError
from rwkv.io import signals
from rwkv.io.garbage import uncollected
from rwkv.io.unread import abandon, unread

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"      # installed, or in a clone
TIME_MIXING = [name for name in operators() if name.startswith("wkv")]      # one for each generation
KERNELS = tuple(sorted({"auto"}.union(*map(all_names, TIME_MIXING))))       # a model takes those of its operator
FORMER_KERNELS = tuple(name for op in TIME_MIXING for name in RENAMED.get(op, ()))
OPTIONAL = ("experiment", "debug")       # groups with null as a choice
GLOBAL = "# @package _global_"           # in a choice's file: it sets options beside the group, and not inside it
SHOW_JOB = (["--cfg", "job"], ["-c", "job"])
HELP_FLAGS = ("--help", "-h")
SWEEP_FLAGS = ("-m", "--multirun")
VALUED_FLAGS = ("--cfg", "-c", "--package", "-p", "--info", "-i")         # Hydra's: the next argument is their value
FLAGS = (*HELP_FLAGS, *SWEEP_FLAGS, *VALUED_FLAGS, "--resolve")
READER_GONE, USER_ERROR, INTERRUPTED = 1, 2, 130         # exit statuses
EXPECTED = {bool: "true or false", int: "a whole number, as 1000", float: "a number", list: "a list, as [A,B]",
            tuple: "a list of numbers, as [0.9,0.99]"}


@dataclass(frozen=True)
class CommandLine:
    """The overrides for Hydra, the values taken verbatim by key, and the flags (-m, --help, --cfg job)."""

    overrides: list[str]
    verbatim: dict[str, str | list[str]]
    flags: list[str]

    @property
    def keys(self) -> list[str]:
        """The dotted keys that the user set; for a chosen group its name."""
        return [override.partition("=")[0].lstrip("+~") for override in self.overrides] + list(self.verbatim)

    @property
    def chosen(self) -> list[str]:
        """The dotted keys that the chosen groups set: trainer.accelerator for trainer=cpu."""
        pairs = [override.partition("=")[::2] for override in self.overrides]
        return [option for group, choice in pairs for option in _set_by(group.lstrip("+"), choice)]


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the options in which the runs differ, its whole command line, and its configuration."""

    swept: dict[str, str]
    arguments: list[str]
    config: Any


Jobs = Callable[[CommandLine], list[Job]]


def run(task: Callable[[Any, CommandLine], None], schema: type, config_name: str, about: str | None,
        sweep: Callable[[CommandLine, Jobs], None] | None = None, several: bool = True) -> None:
    """Composes configs/CONFIG_NAME.yaml with sys.argv into a `schema` and calls task(config, command line).

    about: the first part of --help. sweep: called for -m instead of `task`, with the command line and a function that makes the
    jobs of one; without it Hydra runs the jobs. several: False where -m makes no sense. A user's mistake, here or in the task,
    ends the process with one sentence on standard error and exit status 2. A reader of standard error that goes away does not
    end the process; one of standard output ends it quietly.
    """
    with redirect_stderr(unread(sys.stderr)), exit_on_user_error():
        line = split(sys.argv[1:], schema)
        if any(flag in HELP_FLAGS for flag in line.flags):
            print(help_page(line, schema, config_name, about or _docstring(task)), flush=True)
            return
        check(line, schema)
        if not several and any(flag in SWEEP_FLAGS for flag in line.flags):
            raise UserError("-m runs a program once for each of several values, and this one goes on until it is ended: leave "
                            "-m out")
        if any(flag in SWEEP_FLAGS for flag in line.flags):
            _say_what_is_not_split(line, schema)
        _say_what_is_no_line_end(line, schema)
        if sweep and line.flags and all(flag in SWEEP_FLAGS for flag in line.flags):
            sweep(line, partial(jobs, schema=schema, config_name=config_name))
        elif line.flags:
            _run_by_hydra(task, schema, config_name, line)
        else:
            with uncollected():
                config = compose(line, schema, config_name)
            task(config, line)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Shows a user's mistake as its sentence, with exit status 2. Any other error is a bug and keeps its traceback.

    Arguments that are not UTF-8 are such a mistake. The signals of rwkv/io/signals.py end the block as Ctrl-C does, with exit
    status 130, and change nothing after it. What the encoding of standard output lacks is shown as ?.
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
    except BrokenPipeError:              # whoever read standard output has seen enough, as in: train.py --help | head
        abandon(sys.stdout)
        sys.exit(READER_GONE)
    except (UserError, UnknownKernel, KernelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:             # a full disk, a forbidden folder
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {said}", file=sys.stderr)
        sys.exit(USER_ERROR)
    finally:
        atexit.register(signals.ignore)  # of atexit's functions the last comes first


def _require_utf8(arguments: list[str]) -> None:
    """Python keeps other bytes as halves of surrogate pairs, which no file of a run can hold."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"the argument {shown} is not UTF-8, or is not read as such: rename the file that it names, or set "
                            "PYTHONUTF8=1 where the locale is C") from None


def _docstring(task: Callable[..., None]) -> str:
    """That of the task's file, read from it: python -OO leaves docstrings out."""
    return ast.get_docstring(ast.parse(Path(task.__code__.co_filename).read_text(encoding="utf-8"))) or ""


def _say_what_is_not_split(line: CommandLine, schema: type) -> None:
    for key, value in line.verbatim.items():
        if "," in value and free_text(options(schema)[key]) != PATH and isinstance(value, str):
            print(f"{key}={value} is one value, also with -m: names and texts are taken verbatim", file=sys.stderr)


def _say_what_is_no_line_end(line: CommandLine, schema: type) -> None:
    """A hint for stop='\\n': a shell's quotes leave a backslash and an n, which is what a text of code may mean as well."""
    for key, value in line.verbatim.items():
        values = value if isinstance(value, list) else [value]
        if free_text(options(schema)[key]) != PATH and any("\\n" in text and "\n" not in text for text in values):
            print(f"{key}: \\n is taken verbatim, as a backslash and an n; a line end is written {key}=$'\\n' in bash and zsh",
                  file=sys.stderr)


def split(arguments: list[str], schema: type) -> CommandLine:
    """Sorts the arguments into overrides, values of verbatim options of `schema`, and flags."""
    line = CommandLine([], {}, [])
    known, rest = options(schema), iter(arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        key = key.lstrip("+")
        kind = free_text(known[key]) if equals and key in known else None
        if kind and known[key].type == list[str]:
            line.verbatim[key] = [*line.verbatim.get(key, []), value]
        elif kind:
            line.verbatim[key] = from_home(value) if kind == PATH else value
        elif not argument.startswith("-"):
            line.overrides.append(argument)
        else:
            line.flags.extend([argument, *itertools.islice(rest, argument in VALUED_FLAGS)])
    return line


# Checks, without Hydra


def check(line: CommandLine, schema: type) -> None:
    """Raises UserError for an unknown flag, an unknown option and an unknown choice of a group."""
    for flag in (flag for flag in line.flags if flag.startswith("-") and flag not in FLAGS):
        name, _, value = flag.lstrip("-").partition("=")
        raise UserError(f"unknown flag {flag}; options are written without dashes: {_meant(name, schema)}={value or 'VALUE'}")
    for override in line.overrides:
        check_override(override, schema)


def check_override(override: str, schema: type) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"cannot read {override!r}: options are written key=value, for instance {_example(override, schema)}")
    key = key.lstrip("+")
    if key.startswith(("~", "hydra.", "hydra/")):
        return
    of_program = _of_program(schema)
    if key in ("kernel", "kernel.name") or (key in of_program and (CONFIGS / key).is_dir()):
        for choice in value.split(","):
            _check_choice(key.removesuffix(".name"), choice.strip())
    elif key not in options(schema):
        close = close_to(key, _names(schema))
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists them all"
        raise UserError(f"unknown option {key}; {hint}")


def _of_program(schema: type) -> set[str]:
    """The options of `schema` without a dot, its groups among them."""
    return {item.name for item in fields(schema)}.union(OPTIONAL)


def _names(schema: type) -> list[str]:
    """All that can stand before an equals sign."""
    groups = (name for name in _of_program(schema) if name == "kernel" or (CONFIGS / name).is_dir())
    return [*options(schema), *sorted(groups)]


def _meant(name: str, schema: type) -> str:
    """The one option that `name` may stand for, as trainer.max_steps for max-steps; `name` itself where there are others."""
    close = [] if name in _names(schema) else close_to(name, _names(schema))
    return close[0] if len(close) == 1 else name


def _example(word: str, schema: type) -> str:
    """An option as it is written, for who wrote a word alone: with that word, where it is one's name or may be a path."""
    meant = _meant(word, schema)
    if meant in _names(schema):
        return f"{meant}=VALUE"
    if Path(word).suffix or "/" in word:
        return f"{'checkpoint' if 'checkpoint' in options(schema) else 'data=text data.path'}={word}"
    return "kernel=conv1d"


def close_to(key: str, known: list[str]) -> list[str]:
    """The names that a wrong key may mean, at most three: the same last part in other groups, or the same but for letters,
    with groups or without them.
    """
    last = key.rpartition(".")[2]
    same = [option for option in known if option.rpartition(".")[2] == last]
    if same:
        return get_close_matches(key, same, n=3, cutoff=0.0)
    whole = get_close_matches(key, known, n=1, cutoff=0.75)
    if whole:
        return whole
    leaves = get_close_matches(last, [option.rpartition(".")[2] for option in known], n=1, cutoff=0.7)
    found = [option for option in known if option.rpartition(".")[2] in leaves]
    return get_close_matches(key, found, n=3, cutoff=0.0) or get_close_matches(key, known, n=1)


def choices(group: str) -> list[str]:
    """The names that can be given to `group`, such as kernel, model or data, without null."""
    return list(KERNELS) if group == "kernel" else sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _check_choice(group: str, choice: str) -> None:
    if group == "kernel" and choice in FORMER_KERNELS:
        return
    if choice not in choices(group) and not (choice == "null" and group in OPTIONAL):
        close = get_close_matches(choice, choices(group), n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"unknown {group} {choice!r}; {meant}there are: {', '.join(choices(group))}")


def preset(group: str, choice: str) -> dict[str, Any]:
    """The options that a choice sets, by name. Raises UserError for a choice that there is not."""
    _check_choice(group, choice)
    found: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    return found


def _set_by(group: str, choice: str) -> list[str]:
    """The dotted keys that a group's choice sets; none for an override that chooses no group, and for null."""
    if group == "kernel":
        return ["kernel.name"]
    file = CONFIGS / group / f"{choice}.yaml"
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    if group not in OPTIONAL:
        return [name if GLOBAL in text else f"{group}.{name}" for name in content]
    overridden = [pair for entry in content.pop("defaults", []) for pair in entry.items()]
    found = [option for key, value in overridden for option in _set_by(key.removeprefix("override /"), value)]
    return found + [f"{key}.{name}" for key, options in content.items() if key != "hydra" for name in options]


# Help


def help_page(line: CommandLine, schema: type, config_name: str, about: str) -> str:
    """--help: `about`, the choices of each group, and every option with its value under this command line."""
    check(line, schema)
    defaults = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8")
    groups = re.findall(r"^  - (?:optional )?(\w+): ", defaults, re.MULTILINE)
    described = {group: {choice: description(CONFIGS / group / f"{choice}.yaml") for choice in choices(group)}
                 for group in groups if group != "kernel"}
    return page(about, KERNELS, described, options(schema), compose(line, schema, config_name))


# Composition, by Hydra


def compose(line: CommandLine, schema: type, config_name: str) -> Any:
    """The schema's object for a command line. Raises UserError for a value of the wrong type and for several values."""
    with _hydra(schema, config_name):
        for _, swept in _combinations(line.overrides, schema):
            if swept:
                raise UserError(f"several values of {', '.join(swept)} make a sweep, which starts with the flag -m")
        return _compose(config_name, schema, line.overrides, line.verbatim)


def jobs(line: CommandLine, schema: type, config_name: str) -> list[Job]:
    """Every combination of the options with several values, and of the sweep of an experiment (hydra.sweeper.params).

    Raises UserError as check and compose do.
    """
    check(line, schema)
    with _hydra(schema, config_name):
        params = _params(config_name, schema, line)
        for override in params:
            check_override(override, schema)
        verbatim = [f"{key}={value}" for key, value in line.verbatim.items()]
        return [Job(swept, [*chosen, *verbatim], _compose(config_name, schema, chosen, line.verbatim))
                for chosen, swept in _combinations([*params, *line.overrides], schema)]


@contextmanager
def _hydra(schema: type, config_name: str) -> Iterator[None]:
    """Hydra with our schema, kernels and folder of configurations."""
    import hydra

    _restore_asserts_of_the_parser()
    _register(schema, config_name)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def _register(schema: type, config_name: str) -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name=f"{config_name}_schema", node=schema)
    for name in (*KERNELS, *FORMER_KERNELS):
        store.store(group="kernel", name=name, node={"name": name})


def _run_by_hydra(task: Callable[[Any, CommandLine], None], schema: type, config_name: str, line: CommandLine) -> None:
    """Hydra's own flags, and -m for a program without sweeps. --cfg job shows the verbatim values too, which Hydra lacks."""
    import hydra

    with _hydra(schema, config_name):                            # for the sentences: Hydra shows its errors in many lines
        for overrides, _ in _combinations(line.overrides, schema):
            _compose(config_name, schema, overrides, line.verbatim)
    if line.flags in SHOW_JOB:
        print(_as_yaml(compose(line, schema, config_name)), end="", flush=True)
        return

    def job(composed: Any) -> None:
        with exit_on_user_error():
            task(build(composed, line.verbatim), line)

    if sys.version_info >= (3, 14):      # whose argparse checks helps as strings; Hydra 1.3 has another object among its own
        argparse.ArgumentParser._check_help = lambda self, action: None       # type: ignore[attr-defined]
    sys.argv[1:] = line.flags + line.overrides
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(job)()


def _params(config_name: str, schema: type, line: CommandLine) -> list[str]:
    """The sweep of the configuration, as overrides, but for the keys on the command line."""
    import hydra
    from omegaconf import OmegaConf

    single = [override for override in line.overrides if not any(swept for _, swept in _combinations([override], schema))]
    composed = hydra.compose(config_name, single, return_hydra_config=True)
    params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    return [f"{key}={value}" for key, value in params.items() if key not in line.keys]


def _combinations(overrides: list[str], schema: type) -> list[tuple[list[str], dict[str, str]]]:
    """The product over all overrides with several values: for each job its overrides, and the options that the sweep set."""
    parsed = [_parsed(override, schema) for override in overrides]
    alternatives: list[list[tuple[str, dict[str, str]]]] = [
        [(f"{item.key_or_group}={value}", {str(item.key_or_group): value}) for value in item.sweep_string_iterator()]
        if item.is_sweep_override() else [(text, {})] for text, item in zip(overrides, parsed, strict=True)]
    return [([text for text, _ in job], {key: value for _, swept in job for key, value in swept.items()})
            for job in itertools.product(*alternatives)]


def _parsed(override: str, schema: type) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except HydraException as error:
        key = override.partition("=")[0].lstrip("+")
        expected = _expected(key, schema)
        raise UserError(f"cannot read {override}: " + (f"{key} is {expected}" if expected else _first_line(error))) from None


def _compose(config_name: str, schema: type, overrides: list[str], verbatim: dict[str, str | list[str]]) -> Any:
    """The schema's object, inside _hydra."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed = hydra.compose(config_name, overrides)
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException):
            raise UserError(_wrong_type(error.__cause__, schema, overrides)) from None
        raise UserError(_first_line(error)) from None
    try:
        return build(composed, verbatim)
    except OmegaConfBaseException as error:
        raise UserError(_wrong_type(error, schema, overrides)) from None


def _wrong_type(error: Any, schema: type, overrides: list[str]) -> str:
    """The sentence about a value that OmegaConf has refused, by the option's type."""
    key = str(error.full_key)
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    expected = _expected(key, schema)
    if expected is None or key not in given:
        return f"{key}: {_first_line(error)}"
    return f"{key} is {expected}; got {given[key]}"


def _expected(key: str, schema: type) -> str | None:
    """What the option's value is, in words; None where nothing shorter than its help says it."""
    item = options(schema).get(key)
    if item is None:
        return None
    if item.metadata["one_of"]:
        return f"one of {', '.join(item.metadata['one_of'])}"
    kind: Any = get_args(item.type)[0] if isinstance(item.type, UnionType) else item.type        # int | None
    return EXPECTED.get(get_origin(kind) or kind)


def _as_yaml(config: Any) -> str:
    plain = json.loads(json.dumps(asdict(config)))       # tuples as lists
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _restore_asserts_of_the_parser() -> None:
    """Hydra's parser of overrides reads on inside assert statements, which python -O leaves out: compile it with them."""
    if sys.flags.optimize == 0:
        return
    from hydra.core.override_parser import overrides_parser, overrides_visitor

    source = Path(overrides_visitor.__file__).read_text(encoding="utf-8")
    exec(compile(source, overrides_visitor.__file__, "exec", optimize=0), vars(overrides_visitor))
    vars(overrides_parser)["HydraOverrideVisitor"] = overrides_visitor.HydraOverrideVisitor


def build(composed: Any, given: dict[str, str | list[str]]) -> Any:
    """The schema's object with the verbatim values `given`. `null` is None, as in YAML, but in a text."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(composed)
    known = options(type(config))
    changed = {}
    for key, value in given.items():
        *parents, last = key.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        is_null = value == "null" and free_text(known[key]) != TEXT
        if is_null and type(None) not in get_args(known[key].type):
            raise UserError(f"{key} cannot be null: give a value, or leave {key}= out")
        setattr(target, last, None if is_null else value)
        changed[id(target)] = target
    for target in changed.values():
        getattr(target, "__post_init__", lambda: None)()         # its checks have not seen these values yet
    return config


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error is not None else ""
