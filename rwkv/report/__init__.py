"""What a run, or a sweep of runs, has come to: DIR/report.html, which is one file with nothing outside it, and DIR/report.csv.

Everything is read from the files that training leaves (reading.py), so a report can be made again at any time:
`python -m rwkv.tools.report DIR`.
"""

from pathlib import Path

from rwkv.io.atomic import write_file
from rwkv.report.findings import findings
from rwkv.report.numbers import Comparison, as_csv, compare, rows
from rwkv.report.page import page
from rwkv.report.reading import is_finished, read

__all__ = ["is_finished", "table", "write"]

PAGE, TABLE = "report.html", "report.csv"


def write(folder: Path, reference: str | None = None) -> Path:
    """The report's path. `reference`: the kernel that the others are compared with; None for the rule in numbers.py.

    Raises ValueError where there is no run in `folder`, and for a reference that is not among its kernels.
    """
    comparison = _compared(folder, reference)
    write_file(folder / TABLE, lambda file: file.write(as_csv(comparison).encode()))
    write_file(folder / PAGE, lambda file: file.write(page(folder, comparison, findings(comparison)).encode()))
    return folder / PAGE


def table(folder: Path) -> tuple[list[dict[str, object]], list[Path]]:
    """The rows of report.csv, and the files of the report."""
    return rows(_compared(folder, None)), [folder / PAGE, folder / TABLE]


def _compared(folder: Path, reference: str | None) -> Comparison:
    return compare(read(folder), reference)
