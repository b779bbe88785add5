"""Measures the time of a training step, by part and by operation.

    python -m benchmarks.step_profile [--generation NAME,...] [--optim NAME,...] [--precision NAME,...] [--shape L,C,B,T,V]

The defaults are both architectures; adamw, muon and normuon; 32-true and, on a CPU with fast bfloat16 products, bf16-mixed; and
the shape of `make train`: 4 layers, 192 wide, 8 windows of 128 tokens, a vocabulary of 2,048.

    parts       forward (all blocks), loss (the head with its loss and gradients), backward (through the blocks), optimiser
                (clipping, step): milliseconds, medians of --steps bare steps (no Lightning, loader, log or checkpoint)
    products    matrix products; in the part optimiser, those of muon and normuon
    wkv         the operator
    norm        LayerNorm; the norm of RWKV-7's heads is fused, and counts as pointwise
    pointwise   elementwise operations, and the fused C functions (mixes, gates, ReLU^2)
    other       copies, casts, sums, the embedding, the softmax of the loss, AdamW
    between     Python, autograd and PyTorch's dispatch: time outside of operations

The fractions are measured with PyTorch's profiler, which overstates small operations and the time between operations. The last
line of standard output is the result as JSON.
"""

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._main import run_program
from benchmarks._training_job import new_task, training_step
from kernels import native
from kernels.arguments import Parser, at_least, sizes_of, some_of
from kernels.bench.profiler import silence_profiler
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware, threads
from kernels.machine.cpu import why_slow
from rwkv.config import GENERATIONS, ModelConfig, OptimConfig
from rwkv.training.device import dtype_for
from rwkv.training.optim.optimisers import OPTIMISERS

SHAPE = (4, 192, 8, 128, 2048)           # the shape of model=tiny and the defaults of data
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMS = ("adamw", "muon", "normuon")
PARTS = ("forward", "loss", "backward", "optimiser")
KINDS = ("products", "wkv", "norm", "pointwise", "other", "between")
PRODUCTS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "addbmm", "linear", "matmul", "_addmm_activation")
WARM_UP_STEPS, PROFILE_STEPS = 3, 3
LONGEST = 6                              # operations to list
PART, NATIVE = "part: ", "native::"      # prefixes of recorded names
Report = dict[str, Any]
Part = Callable[[str], AbstractContextManager[Any]]      # returns the context of a part of a step, given the name
Step = Callable[[Part], None]
Times = dict[str, Counter[str]]          # microseconds of each operation, by part


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    measured = []
    for precision in _precisions(args):
        for generation in args.generation:
            for optim in args.optim:
                measured.append(measure(generation, optim, precision, args.shape, args.steps))
                print(as_text(measured[-1]), flush=True)
    shape = dict(zip("LCBTV", args.shape, strict=True))
    publish({"machine": hardware.describe("cpu"), "shape": shape, "steps": measured}, args.json)


def _precisions(args: argparse.Namespace) -> list[str]:
    """Returns the given precisions, or by default those with fast products on this CPU. Prints why others are skipped."""
    if args.precision:
        return list(args.precision)
    slow = {precision: why_slow(dtype_for(precision), torch.device("cpu")) for precision in PRECISIONS}
    for precision, why in slow.items():
        if why:
            print(f"without {precision}: {why}; --precision {precision} measures it anyway", flush=True)
    return [precision for precision, why in slow.items() if not why]


def measure(generation: str, optim: str, precision: str, shape: tuple[int, ...], steps: int) -> Report:
    """Measures a step. Returns the milliseconds of each part, and the fraction of the step by part and kind of operation."""
    L, C, B, T, V = shape
    config = ModelConfig(generation=generation, n_layer=L, n_embd=C, ctx_len=T)
    dtype = dtype_for(precision)
    task = new_task(config, V, dtype, OptimConfig(name=optim))
    x = torch.randint(V, (B, T))
    optimizer = task.configure_optimizers()["optimizer"]

    def run(part: Part) -> None:
        training_step(task, optimizer, x, dtype, part)

    times = profile_operations(run)
    total = sum(sum(operations.values()) for operations in times.values())
    shares: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    longest: Counter[str] = Counter()
    for part, operations in times.items():
        for name, microseconds in operations.items():
            shares[part][kind_of(name)] += microseconds / total
            longest[f"{part}: {name}"] += microseconds / total
    return {"generation": generation, "optim": optim, "precision": precision, "kernel": task.model.operator.name,
            "ms": time_parts(run, steps), "shares": {part: {kind: shares[part][kind] for kind in KINDS} for part in PARTS},
            "products": sum(share["products"] for share in shares.values()), "longest": dict(longest.most_common(LONGEST))}


def time_parts(run: Step, steps: int) -> dict[str, float]:
    """Returns the median milliseconds of each part."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        times[name].append(1000 * (time.perf_counter() - start))

    for _ in range(WARM_UP_STEPS + steps):
        run(part)
    return {name: median(samples[WARM_UP_STEPS:]) for name, samples in times.items()}


def profile_operations(run: Step) -> Times:
    """Returns the time of each operation in PROFILE_STEPS steps, without the time of the operations that it calls.

    Operations inside WKV count as WKV.
    """
    def part(name: str) -> record_function:
        return record_function(PART + name)

    for _ in range(WARM_UP_STEPS):       # the first step compiles
        run(part)
    with silence_profiler(), _record_native_calls(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(PROFILE_STEPS):
            run(part)
    times: Times = defaultdict(Counter)
    for event in recorded.events():
        if event.name.startswith(PART):
            _add(event, None, times[event.name.removeprefix(PART)])
    return times


def _add(event: FunctionEvent, operator: str | None, times: Counter[str]) -> None:
    """Adds the times of an event and its children. `operator` is the name of the enclosing WKV operation, if any."""
    operator = operator or (event.name if kind_of(event.name) == "wkv" else None)
    times[operator or event.name] += event.self_cpu_time_total
    for child in event.cpu_children:
        _add(child, operator, times)


@contextmanager
def _record_native_calls() -> Iterator[None]:
    """Records the calls of the C library in the `with` block, because PyTorch's profiler does not see them."""
    run = native.run

    def recorded(name: str, *arguments: Any) -> None:
        with record_function(NATIVE + name):
            run(name, *arguments)

    native.run = recorded
    try:
        yield
    finally:
        native.run = run


def kind_of(name: str) -> str:
    """Returns the kind of an operation in the profiler's list, one of KINDS."""
    library, _, operation = name.partition("::")
    if library == "timemix" or name.startswith(NATIVE):
        return "wkv" if operation.startswith("wkv") else "pointwise" if name.startswith(NATIVE) else "other"
    if library != "aten":
        return "between"
    if operation in PRODUCTS:
        return "products"
    if operation.removesuffix("_backward") in ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm"):
        return "norm"
    packet = getattr(torch.ops.aten, operation)
    pointwise = any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
    return "pointwise" if pointwise else "other"


def as_text(report: Report) -> str:
    """Formats a step as a table with a line per part, and a line for the sum."""
    ms = report["ms"]
    shares = report["shares"]
    total = {kind: sum(shares[part][kind] for part in PARTS) for kind in KINDS}
    lines = [[part, f"{ms[part]:.2f}", *(f"{shares[part][kind]:.1%}" for kind in KINDS)] for part in PARTS]
    lines.append(["step", f"{sum(ms.values()):.2f}", *(f"{total[kind]:.1%}" for kind in KINDS)])
    longest = ", ".join(f"{name} {share:.1%}" for name, share in report["longest"].items())
    return (f"\n{report['generation']}, {report['optim']}, {report['precision']}, kernel {report['kernel']}\n"
            f"{aligned([['part', 'ms', *KINDS], *lines])}\nlongest: {longest}")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.step_profile", __doc__)
    parser.add_argument("--generation", type=some_of(GENERATIONS), default=GENERATIONS, metavar="NAME,...",
                        help=", ".join(GENERATIONS))
    parser.add_argument("--optim", type=some_of(OPTIMISERS), default=OPTIMS, metavar="NAME,...", help=", ".join(OPTIMISERS))
    parser.add_argument("--precision", type=some_of(PRECISIONS), metavar="NAME,...", help=", ".join(PRECISIONS))
    parser.add_argument("--shape", type=sizes_of("L,C,B,T,V"), default=SHAPE, metavar="L,C,B,T,V",
                        help="layers, width, windows, tokens of a window, vocabulary")
    parser.add_argument("--steps", type=at_least(1), default=20, metavar="N", help="steps whose parts are timed")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if sys.platform == "linux" and not threads.settings():       # torch reads GOMP_SPINCOUNT when imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.step_profile", *sys.argv[1:]],
                  {**os.environ, "GOMP_SPINCOUNT": threads.SPINS})
    run_program(main)
