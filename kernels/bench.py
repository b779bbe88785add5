"""python -m kernels.bench OP: verifies each implementation of timex, wkv or another operator, then times it; what is wrong is
not timed, and the exit status says so.

    --device cpu|cuda  --dtype NAME  --only NAME,...  --seconds S
    --shape SIZES ...     B,C,T for timex and wkv; what an operator's sizes are is in its subject.py
    --sweep [SIZE,...]    the first shape at other last sizes too, for a curve: over T
    --json FILE           the result as a file: what python -m kernels.tables and python -m kernels.plot read
    --plot FOLDER         the result as figures (kernels/plot.py); with a sweep, since a curve has more than one point
    --malloc default      the C library's allocator as it comes; tuned: large freed blocks are kept (kernels/allocator.py)

Verified: output (and state) and every gradient at the very shape that is timed, all elements, against the float64 reference
(_subjects.py says how that is affordable). Timed: the operator as a user calls it, autograd included, backward alone on a
graph that is kept; all implementations, the machine's own two limits, and the copy of one such tensor in turns; medians.
What would take too long or too much memory, foretold from a small part, is left out and said, unless --only names it.
GFLOP/s count B*C*T*(T+1) per pass of timex and GB/s the least traffic, so that a share of a limit says how much is left to
gain. `extra MB` is the memory beyond inputs and outputs at its peak (_memory.py), `launches` how many kernels or torch
operators a pass takes (_launches.py). The last line of standard output is the result as JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kernels import _machine, plot
from kernels._launches import launches
from kernels._memory import extra_bytes
from kernels._subjects import Costs, Pass, Shape, Subject, subject_of
from kernels._text import aligned
from kernels._timing import interleaved
from kernels.allocator import keep_large_blocks
from kernels.registry import operators

MATMUL, COPY, COPY_ONE = ("machine", "matrix product"), ("machine", "copy"), ("machine", "copy of one tensor")
LONGEST_S, LARGEST_GB = 6, {"cpu": 3, "cuda": 16}       # beyond these a shape is measured only for those named
COLUMNS = {                          # of a result: heading and format
    "ms": ("ms", ".3f"), "best_ms": ("best", ".3f"), "runs": ("runs", "d"), "gflops": ("GFLOP/s", ".1f"),
    "of_matmul": ("of matmul", ".0%"), "gbs": ("GB/s", ".1f"), "of_copy": ("of copy", ".0%"),
    "copies": ("x one copy", ".1f"), "vs_baseline": ("x {baseline}", ".2f"), "launches": ("launches", "d"),
    "extra_mb": ("extra MB", ".1f"), "err_ratio": ("err_ratio", ".0e"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    malloc = "tuned" if args.malloc == "tuned" and keep_large_blocks() else "default"
    report: dict[str, Any] = {"op": args.op, "device": args.device, "dtype": args.dtype, "malloc": malloc,
                              "machine": _machine.describe(args.device), "shapes": [], "sweep": []}
    for kind, shapes in (("shapes", args.shape), ("sweep", args.sweep)):
        for shape in shapes:
            report[kind].append(measure(args.op, shape, args.device, args.dtype, args.only, args.seconds))
            print(table(report, report[kind][-1]), flush=True)
    line = json.dumps(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n", encoding="utf-8")
    if args.plot:
        plot.draw(args.plot, [report])
    print(line)
    return 1 if any(measured["wrong"] for measured in report["shapes"] + report["sweep"]) else 0


def measure(op: str, shape: Shape, device: str, dtype: str, only: list[str], budget_s: float) -> dict[str, Any]:
    """Everything about one shape, as plain data: limits, results, and who was skipped or found wrong, with the reasons."""
    subject: Subject = subject_of(op)(*shape, device, getattr(torch, dtype))
    names = [name for name in subject.names() if not only or name in only or name == subject.baseline]
    skipped = {name: reason for name in names if (reason := _why_not(subject, name, asked=name in only))}
    errors, wrong = _verify(subject, [name for name in names if name not in skipped])
    passes = {(name, part.name): part for name in errors for part in subject.passes(name)}
    extra = {key: extra_bytes(part.run, device) for key, part in passes.items()}
    counts = {key: launches(part.run, device) if subject.LAUNCHES else None for key, part in passes.items()}
    samples, limits = _times(subject, passes, device, budget_s)
    results = [_result(key, passes[key], samples, limits, subject.baseline)
               | {"launches": counts[key], "extra_mb": extra[key] / 1e6, "err_ratio": errors[key[0]]} for key in passes]
    return {"shape": dict(zip(subject.AXES, shape, strict=True)), "baseline": subject.baseline, "limits": limits,
            "results": results, "skipped": skipped, "wrong": wrong}


def table(report: dict[str, Any], measured: dict[str, Any]) -> str:
    """What one shape's data say, for the terminal."""
    limits, shape = measured["limits"], " ".join(f"{axis}={size}" for axis, size in measured["shape"].items())
    head = (f"\n{report['op']} {shape} {report['dtype']} on {report['device']}, malloc {report['malloc']}; in the same run:\n"
            f"matrix product {limits['matmul_gflops']:.0f} GFLOP/s, copy {limits['copy_gbs']:.0f} GB/s (read + write), "
            f"copy of one such tensor {limits['copy_one_ms']:.3f} ms")
    shown = [column for column in COLUMNS if any(result[column] is not None for result in measured["results"])]
    rows = [["", "", *(COLUMNS[column][0].format(**measured) for column in shown)]]
    rows += [[result["name"], result["pass"], *(_cell(result, column) for column in shown)] for result in measured["results"]]
    notes = [f"not measured: {reason}" for reason in _grouped(measured["skipped"])]
    notes += [f"WRONG, not timed: {name}: {reason}" for name, reason in measured["wrong"].items()]
    return "\n".join((head, aligned(rows, left=2), *notes))


def _grouped(skipped: dict[str, str]) -> list[str]:
    """Reasons that differ in nothing but the name as one."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(reason.removeprefix(name), []).append(name)
    return [", ".join(alike) + (":" if alike[1:] else "") + reason for reason, alike in names.items()]


def _why_not(subject: Subject, name: str, asked: bool) -> str | None:
    """The reason why `name` is left out: it cannot run here, or will take longer than anyone wants to wait."""
    reason = subject.why_not(name)
    if reason or asked:
        return reason
    try:
        reason = _too_much(subject.foretold(name), LARGEST_GB[subject.device])
    except Exception:                    # verification will meet it too, and say it
        return None
    return f"{name} takes over {reason} at this shape; --only '{name}' measures it" if reason else None


def _too_much(costs: Costs, largest_gb: float) -> str | None:
    if costs.seconds > LONGEST_S:
        return f"{LONGEST_S} s forward and backward"
    return f"{largest_gb} GB beside inputs and outputs" if costs.extra > 1e9 * largest_gb else None


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


def _times(subject: Subject, passes: dict[tuple[str, str], Pass], device: str,
           budget_s: float) -> tuple[dict[tuple[str, str], list[float]], dict[str, float]]:
    """Seconds of every pass, and what the machine could do meanwhile."""
    (matmul, flop), (copy, size) = _machine.matmul(device), _machine.copy(device)
    source, target = subject.sequence, subject.sequence.clone()
    work = {MATMUL: matmul, COPY: copy, COPY_ONE: lambda: target.copy_(source), **{key: passes[key].run for key in passes}}
    samples = interleaved(work, device, budget_s)
    return samples, {"matmul_gflops": flop / median(samples[MATMUL]) / 1e9, "copy_gbs": size / median(samples[COPY]) / 1e9,
                     "copy_one_ms": median(samples[COPY_ONE]) * 1e3}


def _result(key: tuple[str, str], part: Pass, samples: dict[tuple[str, str], list[float]], limits: dict[str, float],
            baseline: str) -> dict[str, Any]:
    seconds, same = median(samples[key]), samples.get((baseline, key[1]))
    gflops, gbs = part.flop / seconds / 1e9, part.bytes / seconds / 1e9
    return {"name": key[0], "pass": key[1], "ms": seconds * 1e3, "best_ms": min(samples[key]) * 1e3, "runs": len(samples[key]),
            "gflops": gflops or None, "of_matmul": gflops / limits["matmul_gflops"] or None,
            "gbs": gbs, "of_copy": gbs / limits["copy_gbs"], "copies": seconds * 1e3 / limits["copy_one_ms"],
            "vs_baseline": median(same) / seconds if same else None}


def _cell(result: dict[str, Any], column: str) -> str:
    return "" if result[column] is None else format(result[column], COLUMNS[column][1])


def _sweep(args: argparse.Namespace, subject: type[Subject]) -> list[Shape]:
    """The lengths asked for, or the operator's own, with the first shape's other sizes; what is measured anyway left out."""
    if args.sweep is None and args.plot is None:
        return []
    shapes = [(*args.shape[0][:-1], length) for length in args.sweep or subject.SWEEP[args.device]]
    return [shape for shape in shapes if shape not in args.shape]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Verify and time the kernels.")
    parser.add_argument("op", choices=operators())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", metavar="NAME", help="of the inputs; the operator's first unless given")
    parser.add_argument("--shape", type=_sizes, nargs="+", metavar="SIZES", help="B,C,T: batch, channels, time steps")
    parser.add_argument("--sweep", type=_sizes, nargs="?", const=(), metavar="SIZE,...",
                        help="the first shape with these last sizes too")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help="these and the baseline; python -m kernels lists the names")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of measuring each pass of each kernel")
    parser.add_argument("--malloc", choices=("tuned", "default"), default="tuned", help="the C library's allocator")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the result; needs matplotlib")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch sees none")
    if args.plot and (reason := plot.why_not(args.plot)):
        parser.error(reason)
    subject = subject_of(args.op)
    args.dtype, args.shape = args.dtype or subject.DTYPES[0], args.shape or [*subject.SHAPES[args.device]]
    if reason := _wrong(args, subject):
        parser.error(reason)
    args.sweep = _sweep(args, subject)
    return args


def _wrong(args: argparse.Namespace, subject: type[Subject]) -> str | None:
    """What the operator does not know of what was asked."""
    known, axes = subject.names(), ",".join(subject.AXES)
    for name in args.only:
        if name not in known:
            return f"unknown {args.op} implementation {name!r}; there are: {', '.join(known)}"
    for shape in args.shape:
        if len(shape) != len(subject.AXES):
            return f"--shape of {args.op} is {axes}, got {','.join(map(str, shape))}"
    return None if args.dtype in subject.DTYPES else f"--dtype of {args.op} is {' or '.join(subject.DTYPES)}, got {args.dtype}"


def _sizes(text: str) -> Shape:
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
