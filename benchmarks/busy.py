"""python -m benchmarks.busy [--spins N ...] [--turns 10] [--json FILE]          (Linux)

The time of a training step and of a decoded token on a quiet machine, and beside one busy process per core that this program
starts: with torch's default OpenMP settings, and with GOMP_SPINCOUNT=N for each N (default: the value that train.py and
generate.py set). All settings take turns, first quiet, then busy. The numbers are medians over the turns; `quiet cost` is the
median ratio of a quiet turn to the same turn with torch's defaults, less 1. The last line of standard output is the result as
JSON. Takes two to three minutes, and one more for each further N.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._main import run_program
from kernels.arguments import Parser, at_least
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware, threads

ROOT = Path(__file__).parent.parent
SECONDS = {"train": (1.5, 3.0), "decode": (0.7, 0.7)}            # length of a turn: quiet, busy
OWN = "torch's own"
Job = subprocess.Popen[str]


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    machine = hardware.describe("cpu")
    rows = [row for kind in SECONDS for row in _measure(kind, args.spins, args.turns)]
    print(table(rows), flush=True)
    publish({"machine": machine, "turns": args.turns, "rows": rows}, args.json)


def table(rows: list[dict[str, Any]]) -> str:
    head = ["", "GOMP_SPINCOUNT", "quiet ms", "busy ms", "busy / quiet", "quiet cost"]
    cells = [[row["of"], row["spins"], f"{row['quiet_ms']:.1f}", f"{row['busy_ms']:.1f}",
              f"{row['busy_ms'] / row['quiet_ms']:.2f}", f"{row['quiet_cost']:+.1%}"] for row in rows]
    return aligned([head, *cells], left=2)


def _measure(kind: str, spins: list[str], turns: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(_job(kind, name)) for name in (OWN, *spins)}
        company = stack.enter_context(_company())
        quiet: dict[str, list[float]] = {name: [] for name in jobs}
        busy: dict[str, list[float]] = {name: [] for name in jobs}
        for turn in range(turns):
            order = list(jobs) if turn % 2 else list(reversed(jobs))
            for name in order:
                quiet[name].append(_turn(jobs[name], SECONDS[kind][0]))
            _signal(company, signal.SIGCONT)
            for name in order:
                busy[name].append(_turn(jobs[name], SECONDS[kind][1]))
            _signal(company, signal.SIGSTOP)
    return [{"of": kind, "spins": name, "quiet_ms": median(quiet[name]), "busy_ms": median(busy[name]),
             "quiet_cost": median(one / other for one, other in zip(quiet[name], quiet[OWN], strict=True)) - 1}
            for name in jobs]


@contextmanager
def _job(kind: str, spins: str) -> Iterator[Job]:
    environment = {name: value for name, value in os.environ.items() if name not in threads.SETTINGS}
    environment |= {} if spins == OWN else {"GOMP_SPINCOUNT": spins}
    with _killed_at_the_end([sys.executable, "-m", "benchmarks._busy_job", kind], env=environment) as job:
        assert job.stdout is not None
        if job.stdout.readline() != "ready\n":
            sys.exit(f"the job {kind} failed")
        yield job


@contextmanager
def _company() -> Iterator[list[Job]]:
    """A process per core that keeps it busy; all are stopped until SIGCONT."""
    with ExitStack() as stack:
        company = [stack.enter_context(_killed_at_the_end([sys.executable, "-c", "while True: pass"]))
                   for _ in os.sched_getaffinity(0)]
        _signal(company, signal.SIGSTOP)
        yield company


@contextmanager
def _killed_at_the_end(command: list[str], **options: Any) -> Iterator[Job]:
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def _signal(company: list[Job], number: signal.Signals) -> None:
    for process in company:
        process.send_signal(number)


def _turn(job: Job, seconds: float) -> float:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write(f"{seconds}\n")
    job.stdin.flush()
    return float(job.stdout.readline())


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.busy", __doc__)
    parser.add_argument("--spins", nargs="+", default=[threads.SPINS], metavar="N", help="values of GOMP_SPINCOUNT")
    parser.add_argument("--turns", type=at_least(1), default=10, metavar="N")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result here as well")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
