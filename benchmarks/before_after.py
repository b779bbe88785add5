"""python -m benchmarks.before_after FOLDER CHECKPOINT [--python FILE] [--dtypes float32 ...] [--rows 1 8 32] [--turns 9]

Decodes with this timemix and with the one in FOLDER, a clone of another version, in turns on one machine. Its Python is that of
FOLDER/.venv, or that of --python. Shown are the median milliseconds of a step of each, the median of the ratios of neighbouring
turns, and whether the texts at temperature 0 are equal. The last line of standard output is the result as JSON.
"""

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._main import run_program
from kernels.arguments import Parser, at_least
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.config import DTYPES
from rwkv.errors import UserError

HERE = Path(__file__).parent.parent
JOB = Path(__file__).parent / "_tree_job.py"
HEADER = ["dtype", "rows", "before", "after", "ratio", "texts"]


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    python = args.python or args.folder / ".venv/bin/python"
    for needed in (python, args.checkpoint):
        if not needed.exists():
            raise UserError(f"{needed} does not exist")
    rows = []
    for dtype in args.dtypes:
        rows += _measure([str(python), sys.executable], [args.folder, HERE], [str(args.checkpoint.resolve()), dtype], args)
    report = {"machine": hardware.describe("cpu"), "checkpoint": args.checkpoint.name, "turns": args.turns, "rows": rows}
    print(table(report), flush=True)
    publish(report, args.json)


def table(report: dict[str, Any]) -> str:
    lines = [[row["dtype"], str(row["rows"]), f"{row['before']:.2f} ms", f"{row['after']:.2f} ms", f"{row['ratio']:.2f}",
              "equal" if row["equal"] else "DIFFERENT"] for row in report["rows"]]
    return aligned([HEADER, *lines])


def _measure(pythons: list[str], folders: list[Path], arguments: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        before, after = (stack.enter_context(subprocess.Popen([python, str(JOB), *arguments], cwd=folder, text=True,
                                                              stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                         for python, folder in zip(pythons, folders, strict=True))
        return [{"dtype": arguments[1], "rows": n} | _in_turns(before, after, n, args.turns) for n in args.rows]


def _in_turns(before: subprocess.Popen[str], after: subprocess.Popen[str], rows: int, turns: int) -> dict[str, Any]:
    _turn(before, rows)                  # builds what is built once
    _turn(after, rows)
    pairs = [(_turn(before, rows), _turn(after, rows)) for _ in range(turns)]
    return {"before": median(old[0] for old, _ in pairs), "after": median(new[0] for _, new in pairs),
            "ratio": median(old[0] / new[0] for old, new in pairs), "equal": all(old[1] == new[1] for old, new in pairs)}


def _turn(process: subprocess.Popen[str], rows: int) -> list[Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{rows}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise UserError("a decoding process ended early: what it wrote stands above")
    return json.loads(line)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.before_after", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--python", type=Path, metavar="FILE")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), metavar="DTYPE")
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--turns", type=at_least(1), default=9, metavar="N")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
