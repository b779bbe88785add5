"""The command line: Hydra composes, the dataclasses of rwkv/config.py are its schema, and a user's error is one sentence.

Free text and paths (prompt=, data.path=, ...) are taken verbatim, before Hydra's grammar sees them: commas, quotes, equals
signs and newlines need no escaping. Overrides are checked, and every job of a sweep composed, before anything runs.
"""

import itertools
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kernels.registry import KernelUnavailable
from kernels.select import select
from rwkv.unread import unread

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
PATHS = ("prompts", "state", "save_state", "out", "checkpoint", "tokenizer", "out_dir", "resume", "init_from", "data.path",
         "data.cache_dir", "data.tokenizer")
TEXTS = ("prompt", "start", "data.sample_prompt")        # verbatim, and `null` is a text like any other
VERBATIM = (*PATHS, *TEXTS, "stop", "logit_bias", "logger.run_name", "logger.group")
REPEATABLE = ("stop", "logit_bias")      # verbatim, and a list: each time adds one
OPTIONAL = ("experiment", "debug")       # groups of which none need be chosen
SWEEP_FLAGS = ("-m", "--multirun")
USER_ERROR, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class CommandLine:
    """The overrides for Hydra, those taken verbatim by key, and Hydra's own flags (-m, --help, --cfg job)."""

    overrides: list[str]
    verbatim: dict[str, str | list[str]]
    flags: list[str]

    @property
    def keys(self) -> list[str]:
        """What the user set, by dotted key; a group's name where a whole group was chosen."""
        return [override.partition("=")[0].lstrip("+~") for override in self.overrides] + list(self.verbatim)

    @property
    def chosen(self) -> list[str]:
        """The options that the chosen groups set, by dotted key: of trainer=cpu, trainer.accelerator."""
        pairs = [override.partition("=")[::2] for override in self.overrides]
        return [option for group, choice in pairs for option in _set_by(group.lstrip("+"), choice)]


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the options in which its runs differ, its whole command line, and what that composes to."""

    swept: dict[str, str]
    arguments: list[str]
    config: Any


Jobs = Callable[[CommandLine], list[Job]]


def run(task: Callable[[Any, CommandLine], None], schema: type, config_name: str,
        sweep: Callable[[CommandLine, Jobs], None] | None = None) -> None:
    """Composes configs/CONFIG_NAME.yaml with the command line into a `schema` and calls task(config, command line).

    sweep: called for -m instead, with the command line and what makes jobs of one; without it Hydra runs the jobs.
    A user's mistake, here or in the task, ends the process with one sentence on standard error and exit status 2. The process
    goes on where nobody reads standard error any more.
    """
    with redirect_stderr(unread(sys.stderr)):
        _run(task, schema, config_name, sweep)


def _run(task: Callable[[Any, CommandLine], None], schema: type, config_name: str,
         sweep: Callable[[CommandLine, Jobs], None] | None) -> None:
    line = split(sys.argv[1:], schema)
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)

    def job(composed: DictConfig) -> None:
        with_sentences(lambda: task(build(composed, line.verbatim), line))

    with_sentences(lambda: check(line, schema, config_name))
    if sweep is not None and line.flags and all(flag in SWEEP_FLAGS for flag in line.flags):
        with_sentences(lambda: sweep(line, partial(jobs, schema=schema, config_name=config_name)))
        return
    sys.argv[1:] = line.flags + line.overrides
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(job)()


def split(arguments: list[str], schema: type) -> CommandLine:
    """Tells verbatim overrides (of keys that the schema has, where they are given a value), overrides and flags apart."""
    line = CommandLine([], {}, [])
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in REPEATABLE and _exists(schema, key):
            line.verbatim[key] = [*line.verbatim.get(key, []), value]
        elif equals and key in VERBATIM and _exists(schema, key):
            line.verbatim[key] = _from_home(value) if key in PATHS else value
        elif not argument.startswith("-"):
            line.overrides.append(argument)
        else:
            line.flags.append(argument)
    return line


def _from_home(path: str) -> str:
    """With the home folder in the place of a leading ~, which shells expand only at the beginning of a word."""
    return str(Path(path).expanduser()) if path.startswith("~/") else path


def build(composed: DictConfig, verbatim: dict[str, str | list[str]]) -> Any:
    """The schema's object, with the verbatim values put in (`null` means none, as in YAML, but for texts)."""
    config = OmegaConf.to_object(composed)
    for key, value in verbatim.items():
        *parents, last = key.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, None if value == "null" and key not in TEXTS else value)
    return config


def jobs(line: CommandLine, schema: type, config_name: str) -> list[Job]:
    """Every combination of the options that name several values, and of the sweep of an experiment (hydra.sweeper.params).

    Raises UsageError as check does.
    """
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        overrides = [*_params(config_name, line), *line.overrides]
        for override in overrides:
            check_override(override, schema)
        verbatim = [f"{key}={value}" for key, value in line.verbatim.items()]
        return [Job(swept, [*chosen, *verbatim], _compose(config_name, chosen, line.verbatim))
                for chosen, swept in _combinations(overrides)]


def _params(config_name: str, line: CommandLine) -> list[str]:
    """What the configuration sweeps over and the command line does not say."""
    single = [override for override in line.overrides if not any(swept for _, swept in _combinations([override]))]
    composed = hydra.compose(config_name, single, return_hydra_config=True)
    params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    return [f"{key}={value}" for key, value in params.items() if key not in line.keys]


def with_sentences(action: Callable[[], None]) -> None:
    """Turns a user's error into its sentence and exit status 2. A ValueError that we did not raise is a bug, and stays one."""
    try:
        action()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (KernelUnavailable, UsageError) as error:
        _exit(error)
    except OSError as error:             # a full disk, a folder that may not be written
        _exit(error)
    except ValueError as error:
        if not _raised_here(error):
            raise
        _exit(error)


class UsageError(Exception):
    """A command line that says something that does not exist or does not fit."""


def check(line: CommandLine, schema: type, config_name: str) -> None:
    """Raises UsageError for an unknown option, group choice or flag value; composes every job, so types are right too."""
    if any(flag in ("--help", "-h", "--hydra-help") for flag in line.flags):
        return
    for flag in line.flags:
        if "=" in flag:
            raise UsageError(f"unknown flag {flag}; options are written without dashes: {flag.lstrip('-')}")
    for override in line.overrides:
        check_override(override, schema)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for overrides, _ in _combinations(line.overrides):
            _compose(config_name, overrides, line.verbatim)


def check_override(override: str, schema: type) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UsageError(f"cannot read {override!r}: options are written key=value, for instance kernel=conv1d")
    key = key.lstrip("+")
    if key.startswith(("~", "hydra.", "hydra/")):
        return
    if (CONFIGS / key).is_dir():
        for choice in value.split(","):
            _check_choice(key, choice.strip())
    elif not _exists(schema, key):
        options = _options(schema)
        close = get_close_matches(key, options, n=1) or [option for option in options if option.endswith(f".{key}")]
        hint = f"did you mean {close[0]}?" if close else "--help lists them all"
        raise UsageError(f"unknown option {key}; {hint}")


def _set_by(group: str, choice: str) -> list[str]:
    """The options that the file of a group's choice sets; none where there is no such file, as for debug=null."""
    file = CONFIGS / group / f"{choice}.yaml"
    if not file.is_file():
        return []
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    if group not in OPTIONAL:
        return [f"{group}.{name}" for name in content]
    overridden = [pair for entry in content.pop("defaults", []) for pair in entry.items()]
    found = [option for key, value in overridden for option in _set_by(key.removeprefix("override /"), value)]
    return found + [f"{key}.{name}" for key, options in content.items() if key != "hydra" for name in options]


def _check_choice(group: str, choice: str) -> None:
    choices = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    if choice in choices or (choice == "null" and group in OPTIONAL):
        return
    if group == "kernel":
        select(choice)                   # says what there is, and what runs here
    raise UsageError(f"unknown {group} {choice!r}; there are: {', '.join(choices)}")


def _combinations(overrides: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The overrides of each job, and of them those that the sweep chose: the product over all that name several values."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UsageError(f"cannot read the options: {_first_line(error)}") from None
    choices: list[list[tuple[str, dict[str, str]]]] = [
        [(f"{item.key_or_group}={value}", {str(item.key_or_group): value}) for value in item.sweep_string_iterator()]
        if item.is_sweep_override() else [(text, {})] for text, item in zip(overrides, parsed, strict=True)]
    return [([text for text, _ in job], {key: value for _, swept in job for key, value in swept.items()})
            for job in itertools.product(*choices)]


def _compose(config_name: str, overrides: list[str], verbatim: dict[str, str | list[str]]) -> Any:
    """The schema's object."""
    try:
        composed = hydra.compose(config_name, overrides)
    except HydraException as error:
        cause = error.__cause__
        detail = f"{getattr(cause, 'full_key', '')}: {_first_line(cause)}" if isinstance(cause, OmegaConfBaseException) else ""
        raise UsageError(detail or _first_line(error)) from None
    try:
        return build(composed, verbatim)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key}: {_first_line(error)}") from None


def _exists(schema: Any, key: str) -> bool:
    return key in _options(schema)


def _options(schema: type, prefix: str = "") -> list[str]:
    """Every dotted key of a schema's leaves."""
    found = []
    for item in fields(schema):
        kind = get_type_hints(schema)[item.name]
        nested = next((arg for arg in (kind, *get_args(kind)) if isinstance(arg, type) and is_dataclass(arg)), None)
        if nested is not None and not isinstance(kind, UnionType):
            found += _options(nested, f"{prefix}{item.name}.")
        else:
            found.append(prefix + item.name)
    return found


def _raised_here(error: BaseException) -> bool:
    """Whether a `raise` of this program made it: not a library's, and not one of Python's own functions called by us."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(ROOT) and "site-packages" not in last.filename
    return ours and (last.line or "").startswith("raise ")


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error is not None else ""


def _exit(error: BaseException) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(USER_ERROR)
