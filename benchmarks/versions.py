"""Compares the speed of this version with that of an earlier version, in turns.

    python -m benchmarks.versions OLD [--turns 3] PROGRAM [ARG ...]

OLD is another checkout of this repository. PROGRAM is a program that both have, a script (train.py) or a module
(benchmarks.training). Each turn runs the program in both versions, with the Python and the packages of this process. The order
alternates, because a machine may slow down while it is warm.

Prints, for this version and OLD, the medians of the elapsed seconds, of the CPU seconds, and of every number in the last line
of the program if that line is JSON; and the median, least and greatest ratio of this version to OLD within a turn. The last
line of standard output is the result as JSON. Does not run on Windows.

    git worktree add ../old 10dbd0e
    python -m benchmarks.versions ../old benchmarks.training --only float32
    python -m benchmarks.versions ../old train.py trainer.max_steps=100 logger=csv
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._main import run_program
from kernels.arguments import Parser, at_least, existing_folder
from kernels.bench.results import publish
from kernels.bench.text import aligned

ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    pairs = []
    for turn in range(args.turns):
        trees = (ROOT, args.old) if turn % 2 == 0 else (args.old, ROOT)
        numbers = {}
        for tree in trees:
            print(f"turn {turn + 1} of {args.turns}: {args.program} in {tree}", file=sys.stderr, flush=True)
            numbers[tree] = run(tree, [args.program, *args.rest])
        pairs.append((numbers[ROOT], numbers[args.old]))
    report = compare(pairs)
    print(aligned([["", "this", "old", "this / old", "least", "greatest"],
                   *([name, *(f"{value:.4g}" for value in row.values())] for name, row in report.items())]))
    publish(report, None)


def run(tree: Path, command: list[str]) -> dict[str, float]:
    """Runs a program of the checkout `tree`. Returns elapsed seconds, CPU seconds, and the numbers of the program's JSON."""
    program = [command[0]] if command[0].endswith(".py") else ["-m", command[0]]
    before, start = os.times(), time.perf_counter()
    process = subprocess.run([sys.executable, *program, *command[1:]], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
                             capture_output=True, text=True)
    elapsed, after = time.perf_counter() - start, os.times()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed in {tree}:\n{process.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"elapsed s": elapsed, "CPU s": cpu, **dict(_numbers(_last_json(process.stdout)))}


def compare(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns the medians and ratios of the numbers that all runs have.

    `pairs` are, for each turn, the numbers of this version and of OLD.
    """
    report = {}
    for name in pairs[0][0]:
        if all(numbers.get(name) for pair in pairs for numbers in pair):
            ratios = [this[name] / old[name] for this, old in pairs]
            report[name] = {"this": median(this[name] for this, _ in pairs), "old": median(old[name] for _, old in pairs),
                            "ratio": median(ratios), "least": min(ratios), "greatest": max(ratios)}
    return report


def _last_json(text: str) -> Any:
    try:
        return json.loads(text.rstrip().rpartition("\n")[2])
    except ValueError:
        return None


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields the path and the value of each number in a JSON value. A path is a name such as float32.ms.step."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.versions", __doc__)
    parser.add_argument("old", type=existing_folder, metavar="OLD")
    parser.add_argument("--turns", type=at_least(1), default=3)
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARG")
    args = parser.parse_args(argv)
    args.old = args.old.resolve()
    if not (args.old / "benchmarks").is_dir() or args.old == ROOT:
        parser.error(f"OLD must be another checkout of this repository; got {args.old}")
    return args


if __name__ == "__main__":
    run_program(main)
