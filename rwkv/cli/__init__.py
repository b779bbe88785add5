"""The command line of the programs: checks the arguments, composes the options with Hydra, and reports a user's errors.

    arguments.py    sorts the arguments                 configs.py    the folder configs/: groups and their choices
    option_names.py checks the names, and suggests      recipe.py     files of options for experiment= and debug=
    composition.py  Hydra, and the jobs of a sweep      help.py       the page of --help
    exits.py        exit statuses                       garbage.py    turns off garbage collection while a program starts

The options are fields of the dataclasses in rwkv/config/. The values come from configs/NAME.yaml and from the files of its
groups. Names are checked before Hydra and torch are imported.
"""

import ast
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

from rwkv.cli.arguments import HELP_FLAGS, SHOW_JOB, SWEEP_FLAGS, CommandLine, print_hints, split
from rwkv.cli.composition import Config, Job, Jobs, as_yaml, build, compose, jobs
from rwkv.cli.configs import CONFIGS, KERNELS, choices, groups, preset
from rwkv.cli.exits import INTERRUPTED, USER_ERROR, exit_on_user_error
from rwkv.cli.garbage import without_garbage_collection
from rwkv.cli.help import help_page
from rwkv.cli.option_names import check
from rwkv.commands import command
from rwkv.errors import UserError
from rwkv.io.broken_pipe import discard_when_unread


def run(task: Callable[[Config, CommandLine], None], schema: type[Config], config_name: str, about: str | None,
        sweep: Callable[[CommandLine, Jobs], None] | None = None) -> None:
    """Composes configs/CONFIG_NAME.yaml with sys.argv into a `schema` and calls task(config, command line).

    A user's error, here or in the task, is printed on standard error and ends the process with exit status 2. If standard
    output is closed, the process ends without a message. If standard error is closed, the process continues.

    Args:
        about: the first part of --help; None: the docstring of the task's file.
        sweep: called instead of `task` for -m, with the command line and a function that makes the jobs; None: -m is an error.
    """
    with redirect_stderr(discard_when_unread(sys.stderr)), exit_on_user_error():
        line = split(sys.argv[1:], schema)
        if any(flag in HELP_FLAGS for flag in line.flags):
            print(help_page(line, schema, config_name, about or _docstring(task)), flush=True)
            return
        check(line, schema)
        is_sweep = any(flag in SWEEP_FLAGS for flag in line.flags)
        if is_sweep and sweep is None:
            raise UserError("only train.py supports sweeps: omit -m")
        print_hints(line, schema, is_sweep)
        if line.flags in SHOW_JOB:
            print(as_yaml(compose(line, schema, config_name)), end="", flush=True)
        elif sweep and line.flags and all(flag in SWEEP_FLAGS for flag in line.flags):
            sweep(line, partial(jobs, schema=schema, config_name=config_name))
        elif line.flags:
            raise UserError(f"--cfg job must be the only flag; got {' '.join(line.flags)}")
        else:
            with without_garbage_collection():
                config = compose(line, schema, config_name)
            task(config, line)


def _docstring(task: Callable[..., None]) -> str:
    """Reads the docstring of the task's file from the source, because python -OO drops docstrings."""
    return ast.get_docstring(ast.parse(Path(task.__code__.co_filename).read_text(encoding="utf-8"))) or ""
