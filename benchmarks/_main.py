"""What the programs of this folder share: how they end, and how they read a text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kernels.bench.results import exit_status
from rwkv.errors import UserError
from rwkv.io import utf8


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program's main and ends with its exit status; a user's mistake is one sentence and status 2."""
    sys.exit(exit_status(main, UserError))


def read_text(path: Path) -> str:
    """The whole text of a file. Raises UserError where it cannot be read, is not UTF-8, or is empty."""
    text = utf8.read_text(path, str(path))
    if not text:
        raise UserError(f"{path} is empty: name a file with text")
    return text
