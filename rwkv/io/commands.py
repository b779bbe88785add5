"""Commands in texts for the user: `python train.py`, as in a clone, or `timemix train`, by the installed program."""

import re
import sys

INSTALLED = "timemix"                    # the program that is installed with the packages; it runs all others
IN_A_CLONE = re.compile(r"python (?:-m rwkv\.tools\.(\w+)|-m kernels\.(bench)\b(?!\.)|-m (kernels)\b(?!\.)|(\w+)\.py\b)")


def as_typed(text: str) -> str:
    """`text` with the commands of a clone as those of the installed program, if that was typed: timemix train."""
    return as_installed(text) if sys.argv[0].startswith(f"{INSTALLED} ") else text


def as_installed(text: str) -> str:
    return IN_A_CLONE.sub(lambda found: f"{INSTALLED} {found[found.lastindex or 0]}", text)
