"""One run of a sweep in a process of its own: `python rwkv/training/sweep_child.py REASON_FILE OPTION ...`.

Runs train.py with the options. When an error ends it, this program writes the error in one line to REASON_FILE, for the
sweep's report; of several processes, the first that fails writes it. It does not import torch, since train.py must first set
variables that torch reads at its import.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "train.py"              # in a clone; an installed package has rwkv.programs.train
USER_ERROR = 2                           # exit status of a program that has shown the error as a sentence


def run(reason_file: Path) -> None:
    """Raises whatever the program raises, SystemExit included."""
    try:
        if PROGRAM.is_file():
            runpy.run_path(str(PROGRAM), run_name="__main__")
        else:
            runpy.run_module("rwkv.programs.train", run_name="__main__")
    except BaseException as error:
        reason = reason_of(error)
        if reason and not reason_file.exists():
            reason_file.write_text(reason, encoding="utf-8")
        raise


def reason_of(error: BaseException) -> str | None:
    """The error in one line; None for an exit without one. A program exits while it handles an error: SystemExit's context."""
    if not isinstance(error, SystemExit):
        return _one_line(f"{type(error).__name__}: {error}")
    cause = error.__context__
    if cause is None:
        return None
    return _one_line(str(cause) if error.code == USER_ERROR else f"{type(cause).__name__}: {cause}")


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.path[0] = str(ROOT)              # as if train.py had been started
    file, *sys.argv[1:] = sys.argv[1:]
    run(Path(file))
