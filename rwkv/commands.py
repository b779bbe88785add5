"""Rewrites the commands in messages as the user types them: `python train.py` in a clone, `timemix train` if installed."""

import re
import sys
from pathlib import Path

CLONE = Path(__file__).parent.parent     # or site-packages, if timemix is installed
INSTALLED = "timemix"                    # the installed command, which starts every program
IN_A_CLONE = re.compile(r"python (?:-m rwkv\.tools\.(\w+)|-m kernels\.(bench)\b(?!\.)|-m (kernels)\b(?!\.)|(\w+)\.py\b)")


def commands_as_typed(text: str) -> str:
    """Returns `text` with `timemix train` for `python train.py` if the user typed timemix, else `text` unchanged."""
    return commands_as_installed(text) if sys.argv[0].startswith(f"{INSTALLED} ") else text


def commands_as_installed(text: str) -> str:
    return IN_A_CLONE.sub(lambda match: f"{INSTALLED} {match[match.lastindex or 0]}", text)


def command(program: str) -> str:
    """Returns the command that starts a program: `python train.py` in a clone, `timemix train` if installed or typed so."""
    clone_command = f"python {program}.py"
    return commands_as_typed(clone_command) if (CLONE / f"{program}.py").is_file() else commands_as_installed(clone_command)
