"""python -m kernels.bench OP: verifies and times each implementation of an operator (timex, wkv4, wkv7, matvec, softmax, pad).
A wrong implementation is not timed, and makes the exit status 1.

    --dtype NAME          dtype of the inputs; default: float32
    --shape SIZES ...     B,C,T for timex and wkv4; B,H,N,T for wkv7; N,K,R for matvec; rows,columns for softmax;
                          N,h,w,offset,pad_x,pad_y for pad
    --sweep [SIZE,...]    also measure the first shape with each SIZE as its last size (T), for a curve
    --only NAME,...       measure only these implementations and the baseline; python -m kernels lists them
    --seconds S           time for each pass of each implementation
    --json FILE           write the result, which python -m kernels.bench.tables and python -m kernels.bench.plot read
    --plot FOLDER         draw the result with matplotlib; implies --sweep, since a curve needs several points

All elements of the output, the state and every gradient are compared with a float64 reference at the timed shape (case.py
explains why that is affordable). The operator is timed as a user calls it, including autograd. The backward pass is timed
alone, on a retained graph. The timed calls alternate between all implementations, the machine's limits, and a copy of one input
tensor. The table shows medians. An implementation whose estimated time or memory is too large is skipped with a note, unless
--only names it.

    GFLOP/s             timex: B*C*T*(T+1) operations per pass; wkv7: per step and element of the state 10 forward, 32 backward
    x limit             time relative to a matrix product with the same number of operations
    GB/s                the least possible traffic per second
    of copy, of read    GB/s relative to a copy, and to a read by all threads (the limit of matvec)
    extra MB            peak memory beyond inputs and outputs
    launches            number of kernels or torch operators in a pass (profiler.py)
    spread              distance between the quartiles of the runs, as a fraction of the median

If the spread of either time in a ratio exceeds a quarter, the machine was busy, and the table omits the ratio.
"""

import argparse
import os
import sys
from statistics import median
from typing import Any

import torch

from kernels.arguments import Parser, above_zero, any_sizes, path_of
from kernels.bench import plot
from kernels.bench.case import BenchCase, Pass, Shape, case_of
from kernels.bench.profiler import extra_bytes, launches
from kernels.bench.results import exit_status, output_file, save
from kernels.bench.text import aligned
from kernels.bench.timing import spread, time_alternately
from kernels.machine import hardware
from kernels.machine.allocator import keep_large_blocks
from kernels.registry import operators

MAX_SECONDS = 6                          # slower or larger implementations are timed only if --only names them
MAX_EXTRA_GB = {"cpu": 3, "cuda": 16}
UNSTEADY = "?"
MAX_SPREAD = 0.25                        # the table shows a ratio only if both times have at most this spread
# columns that divide by one of the machine's limits, and the limit's name
RATIOS = {"x_limit": "matmul", "of_copy": "copy", "of_read": "read", "copies": "copy_one"}
LIMIT = "limit"                          # samples have the key (LIMIT, name) for a limit, and (implementation, pass) otherwise
COLUMNS = {                              # the heading and format of each column
    "ms": ("ms", ".3f"), "runs": ("runs", "d"), "spread": ("spread", ".0%"),
    "gflops": ("GFLOP/s", ".1f"),
    "x_limit": ("x limit", ".2f"), "gbs": ("GB/s", ".1f"), "of_copy": ("of copy", ".0%"), "of_read": ("of read", ".0%"),
    "copies": ("x one copy", ".1f"), "vs_baseline": ("x {baseline}", ".2f"), "launches": ("launches", "d"),
    "extra_mb": ("extra MB", ".1f"), "err_ratio": ("err_ratio", ".0e"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    warning = _load_warning()
    if warning:
        print(warning, flush=True)
    malloc = "tuned" if keep_large_blocks() else "default"
    report: dict[str, Any] = {"op": args.op, "device": args.device, "dtype": args.dtype, "malloc": malloc,
                              "machine": hardware.describe(args.device), "shapes": [], "sweep": []}
    _print_progress(_plan(args))
    for kind, shapes in (("shapes", args.shape), ("sweep", args.sweep)):
        for shape in shapes:
            measured = measure(args.op, shape, args.device, args.dtype, args.only, args.seconds)
            report[kind].append(measured)
            print(table(report, measured), flush=True)
            if args.json:                # saves after each shape, so that an interrupted run keeps its measurements
                save(report, args.json)
    if args.plot:
        plot.draw(args.plot, [report])
    return 1 if any(measured["wrong"] for measured in report["shapes"] + report["sweep"]) else 0


def _plan(args: argparse.Namespace) -> str:
    """Describes what will be timed and for how long, including an untimed call before each timed call."""
    case = case_of(args.op)
    names = [name for name in case.names() if not args.only or name in args.only or name == case.baseline]
    runnable = [name for name in names if case.why_not(name, args.device, args.dtype) is None]
    shapes = [*args.shape, *args.sweep]
    timed = 2 * len(runnable) + len(RATIOS)
    seconds = max(1.0, 2 * args.seconds * timed * len(shapes))
    duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    sizes = " ".join(",".join(map(str, shape)) for shape in shapes)
    return (f"{args.op} on {args.device} in {args.dtype}, {','.join(case.AXES)} = {sizes}: {', '.join(runnable)}\n"
            f"each is compared with float64; timing them all takes up to {duration}, --seconds {args.seconds:g} for each pass")


def _load_warning() -> str | None:
    """Returns a warning if programs kept more than half of the cores busy in the last minute, else None."""
    if not hasattr(os, "getloadavg"):    # Windows
        return None
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if load < cores / 2:
        return None
    return (f"the machine had a load of {load:.1f} on {cores} cores in the last minute. If the machine is still busy,\n"
            "times are too long, and ratios of times that vary too much are omitted")


def measure(op: str, shape: Shape, device: str, dtype: str, only: list[str], budget_s: float) -> dict[str, Any]:
    """Measures one shape. Returns JSON data: limits, results, and the reasons why implementations were skipped or are wrong."""
    case: BenchCase = case_of(op)(*shape, device, getattr(torch, dtype, dtype))     # a GGUF format is not a torch dtype
    names = [name for name in case.names() if not only or name in only or name == case.baseline]
    sizes = dict(zip(case.AXES, shape, strict=True))
    at = f"{op} {_sizes(sizes)}"
    skipped = {name: reason for name in names if (reason := _skip_reason(case, name, dtype, name in only, at))}
    errors, wrong = _verify(case, [name for name in names if name not in skipped], at)
    _print_progress(f"{at}: timing {', '.join(errors)}")
    passes = {(name, part.name): part for name in errors for part in case.passes(name)}
    peak_extra = {key: extra_bytes(part.run, device) for key, part in passes.items()}
    counts = {key: launches(part.run, device) if case.LAUNCHES else None for key, part in passes.items()}
    samples, limits = _times(case, passes, device, budget_s)
    results = [_result(key, passes[key], samples, limits, case.baseline)
               | {"launches": counts[key], "extra_mb": peak_extra[key] / 1e6, "err_ratio": errors[key[0]]} for key in passes]
    return {"shape": sizes, "baseline": case.baseline, "limits": limits,
            "spread": {name: spread(samples[LIMIT, name]) for name in RATIOS.values()}, "results": results,
            "skipped": skipped, "wrong": wrong}


def table(report: dict[str, Any], measured: dict[str, Any]) -> str:
    limits = measured["limits"]
    shape = _sizes(measured["shape"])
    head = (f"\n{report['op']} {shape} {report['dtype']} on {report['device']}, malloc {report['malloc']}; in the same run:\n"
            f"matrix product {limits['matmul_gflops']:.0f} GFLOP/s, copy {limits['copy_gbs']:.0f} GB/s (read + write), "
            f"read {limits['read_gbs']:.0f} GB/s,\n"
            f"copy of one such tensor {limits['copy_one_ms']:.3f} ms")
    shown = [column for column in COLUMNS if any(result[column] is not None for result in measured["results"])]
    rows = [["", "", *(COLUMNS[column][0].format(**measured) for column in shown)]]
    rows += [[result["name"], result["pass"], *(_cell(result, column, measured) for column in shown)]
             for result in measured["results"]]
    notes = _unsteady_note(measured)
    notes += [f"not measured: {reason}" for reason in _group_reasons(measured["skipped"])]
    notes += [f"WRONG, not timed: {name}: {reason}" for name, reason in measured["wrong"].items()]
    return "\n".join((head, aligned(rows, left=2), *notes))


def _sizes(shape: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in shape.items())


def _group_reasons(skipped: dict[str, str]) -> list[str]:
    """Merges reasons that differ only in the implementation's name: "a, b: is slow"."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(reason.removeprefix(name), []).append(name)
    return [", ".join(group) + (":" if group[1:] else "") + reason for reason, group in names.items()]


def _skip_reason(case: BenchCase, name: str, dtype: str, named: bool, at: str) -> str | None:
    """Returns the reason for skipping an implementation, or None.

    An implementation named by --only is skipped only if it cannot run. Others must not exceed MAX_SECONDS and MAX_EXTRA_GB.
    """
    reason = case.why_not(name, case.device, dtype)
    if reason or named:
        return reason
    _print_progress(f"{at}: estimating the time of {name}")
    try:
        costs = case.estimate(name)
    except Exception:                    # verification will raise and report the same error
        return None
    largest_gb = MAX_EXTRA_GB[case.device]
    limit = None
    if costs.seconds > MAX_SECONDS:
        limit = f"{MAX_SECONDS} s forward and backward"
    elif costs.peak_extra > 1e9 * largest_gb:
        limit = f"{largest_gb} GB beyond inputs and outputs"
    return f"{name} takes over {limit} at this shape; --only '{name}' measures it" if limit else None


def _verify(case: BenchCase, names: list[str], at: str) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the largest error of each correct implementation, and the reason for each wrong implementation."""
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for name in names:
        _print_progress(f"{at}: comparing {name} with float64")
        try:
            worst, misses = case.errors(name)
            reason = ", ".join(f"{result} is off by {miss}" for result, miss in misses.items())
        except Exception as error:       # such as a kernel that does not compile, which is reported as wrong
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if reason:
            wrong[name] = reason
            _print_progress(f"WRONG, not timed: {name}: {reason}")
        else:
            errors[name] = max(worst.values())
    return errors, wrong


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _times(case: BenchCase, passes: dict[tuple[str, str], Pass], device: str,
           budget_s: float) -> tuple[dict[tuple[str, str], list[float]], dict[str, float]]:
    """Measures every pass and the machine's limits alternately. Returns the seconds of each call, and the limits."""
    matmul, flop = hardware.matmul(device)
    copy, copied_bytes = hardware.copy(device)
    read, read_bytes = hardware.read(device)
    source = case.sequence
    target = source.clone()
    limits = {"matmul": matmul, "copy": copy, "read": read, "copy_one": lambda: target.copy_(source)}
    work = {(LIMIT, name): run for name, run in limits.items()} | {key: one.run for key, one in passes.items()}
    samples = time_alternately(work, device, budget_s)
    seconds = {name: median(samples[LIMIT, name]) for name in limits}
    return samples, {"matmul_gflops": flop / seconds["matmul"] / 1e9, "copy_gbs": copied_bytes / seconds["copy"] / 1e9,
                     "read_gbs": read_bytes / seconds["read"] / 1e9, "copy_one_ms": seconds["copy_one"] * 1e3}


def _result(key: tuple[str, str], part: Pass, samples: dict[tuple[str, str], list[float]], limits: dict[str, float],
            baseline: str) -> dict[str, Any]:
    name, pass_name = key
    seconds = median(samples[key])
    gflops = part.flop / seconds / 1e9
    gbs = part.bytes / seconds / 1e9
    same_pass = samples.get((baseline, pass_name))
    return {"name": name, "pass": pass_name, "ms": seconds * 1e3, "runs": len(samples[key]), "spread": spread(samples[key]),
            "gflops": gflops or None, "of_matmul": gflops / limits["matmul_gflops"] or None,
            "x_limit": limits["matmul_gflops"] / gflops if gflops else None,
            "gbs": gbs, "of_copy": gbs / limits["copy_gbs"], "of_read": gbs / limits["read_gbs"] if part.reads else None,
            "copies": seconds * 1e3 / limits["copy_one_ms"],
            "vs_baseline": median(same_pass) / seconds if same_pass else None}


def _cell(result: dict[str, Any], column: str, measured: dict[str, Any]) -> str:
    if result[column] is None:
        return ""
    return format(result[column], COLUMNS[column][1]) if _is_steady(result, column, measured) else UNSTEADY


def _is_steady(result: dict[str, Any], column: str, measured: dict[str, Any]) -> bool:
    """Returns True if both times of a ratio varied little, and for columns that are not ratios of two times."""
    if column in RATIOS:
        return max(result["spread"], measured["spread"][RATIOS[column]]) <= MAX_SPREAD
    if column != "vs_baseline":
        return True
    baseline = next(other for other in measured["results"]
                    if (other["name"], other["pass"]) == (measured["baseline"], result["pass"]))
    return max(result["spread"], baseline["spread"]) <= MAX_SPREAD


def _unsteady_note(measured: dict[str, Any]) -> list[str]:
    ratios = [(result, column) for result in measured["results"] for column in (*RATIOS, "vs_baseline")
              if result[column] is not None]
    if all(_is_steady(result, column, measured) for result, column in ratios):
        return []
    return [f"{UNSTEADY}: no ratio, because the middle half of its times spreads over more than {MAX_SPREAD:.0%} of the\n"
            "median. Measure again when the machine is idle, or with a larger --seconds"]


def _sweep_shapes(args: argparse.Namespace, case: type[BenchCase]) -> list[Shape]:
    """Returns the first shape with each size of --sweep or SWEEP as its last size, without the shapes of --shape."""
    if args.sweep is None and args.plot is None:
        return []
    shapes = [(*args.shape[0][:-1], length) for length in args.sweep or case.SWEEP[args.device]]
    return [shape for shape in shapes if shape not in args.shape]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("kernels.bench", __doc__)
    parser.add_argument("op", choices=operators())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", metavar="NAME")
    parser.add_argument("--shape", type=any_sizes, nargs="+", metavar="SIZES")
    parser.add_argument("--sweep", type=any_sizes, nargs="?", const=(), metavar="SIZE,...")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...")
    parser.add_argument("--seconds", type=above_zero, default=0.5, metavar="S")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=path_of, metavar="FOLDER")
    args = parser.parse_args(argv)
    case = case_of(args.op)
    args.dtype = args.dtype or case.DTYPES[0]
    args.shape = args.shape or [*case.SHAPES[args.device]]
    try:
        _check_options(args, case)
        args.sweep = _sweep_shapes(args, case)
        _check_memory(args, case)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check_options(args: argparse.Namespace, case: type[BenchCase]) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda requires a CUDA device, but torch finds none")
    if args.dtype not in case.DTYPES:
        raise ValueError(f"--dtype must be {' or '.join(case.DTYPES)} for {args.op}; got {args.dtype}")
    for name in args.only:
        if name not in case.names():
            raise ValueError(f"--only names an unknown {args.op} implementation, {name!r}; the choices are: "
                             f"{', '.join(case.names())}")
    reasons = [case.why_not(name, args.device, args.dtype) for name in args.only]
    if reasons and all(reasons):
        raise ValueError(f"--only names no implementation that can run here: {'; '.join(dict.fromkeys(map(str, reasons)))}")
    for shape in args.shape:
        if len(shape) != len(case.AXES):
            raise ValueError(f"--shape must have the sizes {','.join(case.AXES)} for {args.op}; got "
                             f"{','.join(map(str, shape))}")
    if args.plot:
        plot.check(args.plot)


def _check_memory(args: argparse.Namespace, case: type[BenchCase]) -> None:
    """Raises ValueError for a shape whose tensors alone are larger than the free memory."""
    free = hardware.free_bytes(args.device)
    for shape in [*args.shape, *args.sweep]:
        needed = case.numbers(*shape) * getattr(torch, args.dtype, torch.float32).itemsize
        if free is not None and needed > free:
            raise ValueError(f"{args.op} with the shape {','.join(map(str, shape))} requires {needed / 1e9:,.1f} GB for "
                             f"inputs and results, but only {free / 1e9:.1f} GB are free on {args.device}: choose a smaller "
                             "--shape or --sweep")


if __name__ == "__main__":
    sys.exit(exit_status(main))
