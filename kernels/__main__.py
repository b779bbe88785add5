"""python -m kernels: Lists the implementations of every operator.

Each line shows an implementation's idea, the supported devices, and the reason if the implementation cannot run here.
"""

import ast
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels import native
from kernels.arguments import Parser
from kernels.registry import KernelUnavailable, load, names, operators, why_not

WIDTH = 127


def main(argv: Sequence[str] = ()) -> None:
    Parser("kernels", (__doc__ or "").partition(": ")[2]).parse_args(argv)
    try:
        show()
        print(end="", flush=True)        # sys.stdout is None in a program started with >&-
    except BrokenPipeError:              # the reader closed the pipe, as in: python -m kernels | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show() -> None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for op in operators():
        print(f"{op}: {idea(op, '__init__')}\n")
        rows = [("", "runs on", "here"),
                *((name, runs_on(op, name), runnable_devices(op, name, devices)) for name in names(op))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            head = "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + "  "
            print(wrap(head, describe(op, row[0], devices) if row[0] else "idea"))
        print()
    print(f"Devices here: {', '.join(devices)}. A kernel of timex, wkv4 or wkv7 is chosen by name: train.py kernel=NAME, "
          "select('wkv4', NAME).")


def runs_on(op: str, name: str) -> str:
    """Returns the devices that the implementation declares, or "?" if its file cannot be loaded."""
    try:
        return " ".join(load(op, name).REQUIRES.devices)
    except KernelUnavailable:
        return "?"


def runnable_devices(op: str, name: str, devices: Sequence[str]) -> str:
    runnable = [device for device in devices if why_not(op, name, device) is None]
    return "no" if not runnable or not_built(op, name) else " ".join(runnable)


def describe(op: str, name: str, devices: Sequence[str]) -> str:
    reasons = [why_not(op, name, device) for device in devices]
    runs_nowhere = runnable_devices(op, name, devices) == "no"
    return idea(op, name) + (f" Not here: {reasons[0] or not_built(op, name)}." if runs_nowhere else "")


def not_built(op: str, name: str) -> str | None:
    """Returns the reason if a C kernel is missing from the built library, otherwise None."""
    missing = native.not_built(Path(__file__).parent / op / f"{name}.py") if name.startswith("c_") else None
    return f"the kernel is not built: the library does not contain {missing} (run make native)" if missing else None


def idea(op: str, name: str) -> str:
    """Returns the first sentence of the docstring of the implementation's file.

    The file is parsed, not imported, because its back end may not be installed.
    """
    try:
        file = ast.parse((Path(__file__).parent / op / f"{name}.py").read_bytes())
    except (OSError, SyntaxError, ValueError):    # the column "here" shows the reason
        return ""
    paragraph = (ast.get_docstring(file) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].removesuffix(".") + "."


def wrap(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


if __name__ == "__main__":
    main(sys.argv[1:])
