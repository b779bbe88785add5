"""python -m kernels.bench timex|wkv [--device cpu|cuda] [--shape B,C,T ...] [--only NAME,...] [--json FILE]

Verifies each implementation, then times it; what is wrong is not timed, and the exit status says so.

Verified: output (and state) and every gradient at the very shape that is timed, all elements, against the float64 reference
(_subjects.py says how that is affordable). Timed: the operator as a user calls it, autograd included, all implementations and
the machine's own two limits in turns, medians. GFLOP/s count B*C*T*(T+1) per pass and GB/s the least traffic, so that a
share of a limit says how much is left to gain. The last line of standard output is the result as JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kernels import _machine
from kernels._subjects import SUBJECTS, Pass, Subject
from kernels._text import aligned
from kernels._timing import interleaved
from kernels.timex import cases as timex_cases
from kernels.wkv import cases as wkv_cases

Shape = tuple[int, int, int]         # B, C, T for both operators
MATMUL, COPY = ("machine", "matrix product"), ("machine", "copy")
COLUMNS = {                          # of a result: heading and format
    "ms": ("ms", ".3f"), "best_ms": ("best", ".3f"), "runs": ("runs", "d"), "gflops": ("GFLOP/s", ".1f"),
    "of_matmul": ("of matmul", ".0%"), "gbs": ("GB/s", ".1f"), "of_copy": ("of copy", ".0%"),
    "vs_baseline": ("x {baseline}", ".2f"), "err_ratio": ("err_ratio", ".0e"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    report: dict[str, Any] = {"op": args.op, "device": args.device, "dtype": "float32",
                              "machine": _machine.describe(args.device), "shapes": []}
    for shape in args.shape or _default_shapes(args.op, args.device):
        B, C, T = shape
        measured = measure(SUBJECTS[args.op](B, C, T, args.device), shape, args.device, args.only)
        report["shapes"].append(measured)
        print(table(args.op, args.device, measured), flush=True)
    line = json.dumps(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if any(measured["wrong"] for measured in report["shapes"]) else 0


def measure(subject: Subject, shape: Shape, device: str, only: list[str]) -> dict[str, Any]:
    """Everything about one shape, as plain data: limits, results, and who was skipped or found wrong, with the reasons."""
    names = [name for name in subject.names() if not only or name in only or name == subject.baseline]
    skipped = {name: reason for name in names
               if (reason := subject.why_not(name) or (None if name in only else subject.too_slow(name)))}
    errors, wrong = _verify(subject, [name for name in names if name not in skipped])
    passes = {(name, part.name): part for name in errors for part in subject.passes(name)}
    (matmul, flop), (copy, size) = _machine.matmul(device), _machine.copy(device)
    work = {MATMUL: matmul, COPY: copy, **{key: part.run for key, part in passes.items()}}
    samples = interleaved(work, device)
    limits = {"matmul_gflops": flop / median(samples[MATMUL]) / 1e9, "copy_gbs": size / median(samples[COPY]) / 1e9}
    results = [_result(key, passes[key], samples, limits, subject.baseline) | {"err_ratio": errors[key[0]]} for key in passes]
    return {"shape": dict(zip("BCT", shape, strict=True)), "baseline": subject.baseline, "limits": limits, "results": results,
            "skipped": skipped, "wrong": wrong}


def table(op: str, device: str, measured: dict[str, Any]) -> str:
    """What one shape's data say, for the terminal."""
    limits, shape = measured["limits"], " ".join(f"{axis}={size}" for axis, size in measured["shape"].items())
    head = (f"\n{op} {shape} float32 on {device}; this machine, in the same run: matrix product "
            f"{limits['matmul_gflops']:.0f} GFLOP/s, copy {limits['copy_gbs']:.0f} GB/s (read + write)")
    shown = [column for column in COLUMNS if any(result[column] is not None for result in measured["results"])]
    rows = [["", "", *(COLUMNS[column][0].format(**measured) for column in shown)]]
    rows += [[result["name"], result["pass"], *(_cell(result, column) for column in shown)] for result in measured["results"]]
    notes = [f"not measured: {reason}" for reason in measured["skipped"].values()]
    notes += [f"WRONG, not timed: {name}: {reason}" for name, reason in measured["wrong"].items()]
    return "\n".join((head, aligned(rows, left=2), *notes))


def _verify(subject: Subject, names: list[str]) -> tuple[dict[str, float], dict[str, str]]:
    """The worst error of each right implementation, and of each wrong one the reason."""
    errors, wrong = {}, {}
    for name in names:
        try:
            found, misses = subject.errors(name)
        except Exception as error:                  # a kernel that does not compile: said, counted, and the others go on
            wrong[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if misses:
            wrong[name] = ", ".join(f"{result} is off by {miss}" for result, miss in misses.items())
        else:
            errors[name] = max(found.values())
    return errors, wrong


def _result(key: tuple[str, str], part: Pass, samples: dict[tuple[str, str], list[float]], limits: dict[str, float],
            baseline: str) -> dict[str, Any]:
    seconds, same = median(samples[key]), samples.get((baseline, key[1]))
    gflops, gbs = part.flop / seconds / 1e9, part.bytes / seconds / 1e9
    return {"name": key[0], "pass": key[1], "ms": seconds * 1e3, "best_ms": min(samples[key]) * 1e3, "runs": len(samples[key]),
            "gflops": gflops or None, "of_matmul": gflops / limits["matmul_gflops"] or None,
            "gbs": gbs, "of_copy": gbs / limits["copy_gbs"], "vs_baseline": median(same) / seconds if same else None}


def _cell(result: dict[str, Any], column: str) -> str:
    return "" if result[column] is None else format(result[column], COLUMNS[column][1])


def _default_shapes(op: str, device: str) -> list[Shape]:
    if op == "timex":
        return list(timex_cases.BENCH_SHAPES[device])
    return [(B, C, T) for B, T, C in wkv_cases.BENCH_SHAPES[device]]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Verify and time the kernels.")
    parser.add_argument("op", choices=tuple(SUBJECTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=_shape, nargs="+", metavar="B,C,T", help="batch, channels, time steps")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help="these and the baseline; python -m kernels lists the names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch sees none")
    known = SUBJECTS[args.op].names()
    for name in args.only:
        if name not in known:
            parser.error(f"unknown {args.op} implementation {name!r}; there are: {', '.join(known)}")
    return args


def _shape(text: str) -> Shape:
    B, C, T = (int(size) for size in text.split(","))
    if min(B, C, T) < 1:
        raise ValueError(text)
    return B, C, T


if __name__ == "__main__":
    sys.exit(main())
