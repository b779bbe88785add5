"""Writes commands in messages as the user would type them: `python train.py` in a clone, `timemix train` if installed."""

import re
import sys
from pathlib import Path

CLONE = Path(__file__).parent.parent     # site-packages, if installed
INSTALLED = "timemix"                    # the installed program, which runs all others
IN_A_CLONE = re.compile(r"python (?:-m rwkv\.tools\.(\w+)|-m kernels\.(bench)\b(?!\.)|-m (kernels)\b(?!\.)|(\w+)\.py\b)")


def as_typed(text: str) -> str:
    """`text` with its commands unchanged in a clone; if the user runs the installed program, with `timemix train` and so on."""
    return as_installed(text) if sys.argv[0].startswith(f"{INSTALLED} ") else text


def as_installed(text: str) -> str:
    return IN_A_CLONE.sub(lambda match: f"{INSTALLED} {match[match.lastindex or 0]}", text)


def command(program: str) -> str:
    """The command that starts a program: `timemix train` if installed or if the user typed timemix, else `python train.py`."""
    clone_command = f"python {program}.py"
    return as_typed(clone_command) if (CLONE / f"{program}.py").is_file() else as_installed(clone_command)
