"""report.csv: a row for each run, and three for each kernel, the median of its runs, the least and the largest.

Each column is one quantity; a field is empty where it was not measured.
"""

import csv
import io
import statistics
from collections.abc import Callable

from rwkv.report.numbers import RESULTS, WHEN, Comparison, Kernel

STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min, "max": max}
IDENTITY = {
    "level": "run, or kernel: a statistic over the runs of a kernel",
    "statistic": "value (of a run), median, min or max",
    "kernel": "its name, with further options where runs differ in more than kernel and seed",
    "seed": "of a run",
    "run": "its directory's name",
    "status": "finished, failed, unavailable, stopped, waiting or not finished",
    "reason": "why it failed, or cannot run here",
    "runs": "over how many runs the statistic is",
    "order": "a run's place in the shuffled order in which they were trained",
}
QUANTITIES = {
    "steps": "the last step",
    "val_loss": "the last validation loss, nats per token",
    "val_bpb": "the same in bits per byte",
    "train_loss": "the loss of the last logged step, nats per token",
    "tok_per_sec": "tokens per second, median of the logged steps after warm-up",
    "step_ms": "milliseconds of a training step, median of the sampled steps",
    "forward_ms": "of these, in WKV's forward passes",
    "backward_ms": "in WKV's backward passes",
    "rest_ms": "in all else",
    "peak_mib": "the most memory used, MiB: the GPU's, or the process's",
    "difference": "largest |train/loss - that of the reference with the same seed| over all logged steps",
    "difference_step": "the step of that",
    "difference_early": "the largest within the first 20 steps",
} | {
    f"{kind}_{when}_{result.replace(' ', '_')}": f"{words} of {result} against float64, at the {when}, in the worst layer"
    for when in WHEN for result in RESULTS
    for kind, words in (("err", "RMS error / RMS"), ("max", "largest absolute error"))}
COLUMNS = IDENTITY | QUANTITIES


def rows(comparison: Comparison) -> list[dict[str, object]]:
    return [row for kernel in comparison.kernels for row in (*_runs(kernel), *_statistics(kernel))]


def as_csv(comparison: Comparison) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(COLUMNS))
    writer.writeheader()
    writer.writerows(rows(comparison))
    return text.getvalue()


def _runs(kernel: Kernel) -> list[dict[str, object]]:
    return [{"level": "run", "statistic": "value", "kernel": kernel.label, "seed": run.seed, "run": run.name,
             "status": run.status, "reason": run.reason or "", "runs": 1, "order": run.order or "", **numbers}
            for run, numbers in zip(kernel.runs, kernel.numbers, strict=True)]


def _statistics(kernel: Kernel) -> list[dict[str, object]]:
    finished = kernel.finished()
    identity = {"level": "kernel", "kernel": kernel.label, "status": kernel.status(), "runs": len(finished.runs),
                "reason": next((run.reason for run in kernel.runs if run.reason), "") or ""}
    return [identity | {"statistic": statistic} | {
        name: of(values) for name in QUANTITIES if (values := finished.values(name))} for statistic, of in STATISTICS.items()]
