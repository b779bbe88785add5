"""Writes the report of a run or a sweep to DIR/report.html, which needs no other files, and to DIR/report.csv.

A report depends only on the files in the run directories (run_files.py). So `python -m rwkv.tools.report DIR` can write the
report again at any time.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rwkv.io.atomic import write_file
from rwkv.report.findings import BAD, findings
from rwkv.report.numbers import as_csv, compare, rows
from rwkv.report.page import render
from rwkv.report.run_files import read
from rwkv.report.verdict import verdict

PAGE = "report.html"
TABLE = "report.csv"


class Report(NamedTuple):
    """A written report.

    Attributes:
        page: the path of report.html.
        sentences: the problems, and the kernel with the lowest loss or the highest speed.
        best: the name and the loss of the finished run with the lowest validation loss; None without a validation loss.
    """

    page: Path
    sentences: list[str]
    best: tuple[str, float] | None


def write(folder: Path, reference: str | None = None) -> Report:
    """Writes the report on the runs in `folder`.

    `reference` is the kernel with which the other kernels are compared; None applies the rule in numbers.py. The returned
    sentences do not list differing options as problems, because the user has just set these options. Raises UserError if there
    is no run in `folder`, or if no run has the kernel `reference`.
    """
    comparison = compare(read(folder), reference)
    _write(folder / TABLE, as_csv(comparison))
    _write(folder / PAGE, render(folder, comparison, findings(comparison)))
    problems = [finding.text for finding in findings(replace(comparison, options={})) if finding.kind == BAD]
    losses = [(numbers["val_loss"], run.name) for kernel in comparison.kernels
              for run, numbers in zip(kernel.runs, kernel.numbers, strict=True)
              if run.status == "finished" and math.isfinite(numbers.get("val_loss", math.nan))]
    best = None
    if losses:
        loss, name = min(losses)
        best = name, loss
    return Report(folder / PAGE, [*problems, *verdict(comparison)], best)


def _write(path: Path, text: str) -> None:
    content = text.encode(errors="backslashreplace")     # the name of a folder may not be UTF-8
    write_file(path, lambda file: file.write(content))


def table(folder: Path) -> tuple[list[dict[str, object]], list[Path]]:
    """Returns the rows of report.csv, and the paths of report.html and report.csv."""
    return rows(compare(read(folder))), [folder / PAGE, folder / TABLE]
