"""From what runs measured to what a report says: numbers of a run, medians and ranges of a kernel, differences.

Throughput and times are medians over a run, after its warm-up; a kernel's number is the median over its runs (its seeds), with
the least and the largest. The reference is `reference` or `formula` where one was trained, else the first kernel that the
command line names; a run is compared with the reference's run of the same seed, step by step.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rwkv.report.reading import RESULTS, Curve, Run

PLAIN = ("reference", "formula")         # kernels that are the definition of what they compute
EARLY = 20                               # steps in which kernels that compute the same have hardly come apart
MAY_DIFFER = ("kernel.name", "seed", "out_dir", "resume", "logger.run_name")
WHEN = ("start", "end")
Numbers = dict[str, float]               # by name, of those that are known: tidy.py says what each is


@dataclass
class Kernel:
    """A kernel, or a kernel with one choice of the further options in which runs differ: `label` tells them apart."""

    label: str
    runs: list[Run]
    numbers: list[Numbers]               # of each run

    def finished(self) -> "Kernel":
        """Of the runs that were trained to the end: what statistics are about."""
        kept = [(run, numbers) for run, numbers in zip(self.runs, self.numbers, strict=True) if run.status == "finished"]
        return Kernel(self.label, [run for run, _ in kept], [numbers for _, numbers in kept])

    def values(self, name: str) -> list[float]:
        return [numbers[name] for numbers in self.numbers if name in numbers]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def status(self) -> str:
        """What became of most: finished where any run was."""
        statuses = [run.status for run in self.runs]
        return "finished" if "finished" in statuses else statuses[0]


@dataclass
class Comparison:
    """kernels: in the order of the command line. reference: a label among them, None where there is nothing to compare.

    differences: by run's name, |train/loss - that of the reference| by step. options: those in which more than kernel and seed
    differ, with the runs of each value; machines: the same of machine, versions and commit.
    """

    kernels: list[Kernel]
    reference: str | None
    differences: dict[str, Curve]
    options: dict[str, dict[str, list[str]]]
    machines: dict[str, dict[str, list[str]]]

    @property
    def runs(self) -> list[Run]:
        return [run for kernel in self.kernels for run in kernel.runs]


def compare(runs: list[Run], reference: str | None = None) -> Comparison:
    """Raises ValueError for a reference that is not among the kernels."""
    options = differing({run.name: flat(run.config) for run in runs if run.config}, MAY_DIFFER)
    machines = differing({run.name: run.machine for run in runs if run.machine}, ("date",))
    labels = {run.name: _label(run, options) for run in runs}
    chosen = _reference(runs, reference)
    differences = {run.name: _difference(run, _counterpart(run, runs, labels, chosen)) for run in runs}
    kernels = [Kernel(label, [run for run in runs if labels[run.name] == label], [])
               for label in dict.fromkeys(labels.values())]
    for kernel in kernels:
        kernel.numbers = [numbers_of(run, differences[run.name]) for run in kernel.runs]
    compared = len(kernels) > 1 and chosen is not None
    return Comparison(kernels, chosen if compared else None, differences if compared else {}, options, machines)


def numbers_of(run: Run, difference: Curve) -> Numbers:
    """Those that the run has."""
    found = {"steps": max(run.curve("train/loss"), default=None), "val_loss": _last(run.curve("val/loss")),
             "val_bpb": _last(run.curve("val/bpb")), "train_loss": _last(run.curve("train/loss")),
             "tok_per_sec": _median(after(run.curve("tok_per_sec"), run.measured.get("warm_up", 0)).values()),
             "peak_mib": max(run.curve("peak_mem").values(), default=None), **_times(run), **_errors(run)}
    if difference:
        worst = max(difference, key=lambda step: (_or_infinite(difference[step]), -step))
        early = [_or_infinite(value) for step, value in difference.items() if step <= EARLY]
        found |= {"difference": difference[worst], "difference_step": worst, "difference_early": max(early, default=None)}
    return {name: float(value) for name, value in found.items() if value is not None}


def _times(run: Run) -> dict[str, float | None]:
    """Milliseconds of a step, and of WKV in it."""
    steps = run.measured.get("steps", [])
    found = {name: [step[name] for step in steps] for name in ("ms", "forward_ms", "backward_ms")}
    rest = [step["ms"] - step["forward_ms"] - step["backward_ms"] for step in steps]
    return {"step_ms": _median(found["ms"]), "forward_ms": _median(found["forward_ms"]),
            "backward_ms": _median(found["backward_ms"]), "rest_ms": _median(rest)}


def _errors(run: Run) -> dict[str, float]:
    """Of the worst layer: err_start_y, max_start_y, and so on."""
    found = {}
    for when in WHEN:
        layers = run.measured.get("errors", {}).get(when, {}).get("layers", [])
        for result in RESULTS if layers else ():
            name = result.replace(" ", "_")
            found[f"err_{when}_{name}"] = max(_or_infinite(layer["errors"][result]["err_ratio"]) for layer in layers)
            found[f"max_{when}_{name}"] = max(_or_infinite(layer["errors"][result]["max"]) for layer in layers)
    return found


def allowed(run: Run, when: str) -> dict[str, float]:
    """The err_ratio that the tests hold every kernel to, by result."""
    tolerance: dict[str, float] = run.measured.get("errors", {}).get(when, {}).get("allowed", {})
    return tolerance


def _reference(runs: list[Run], asked: str | None) -> str | None:
    kernels = list(dict.fromkeys(run.kernel for run in runs))
    if asked is not None and asked not in kernels:
        raise ValueError(f"the reference is one of the kernels that were trained, {', '.join(kernels)}; got {asked!r}")
    trained = {run.kernel for run in runs if run.curve("train/loss")}
    plain = [kernel for kernel in PLAIN if kernel in trained]
    return asked or next(iter([*plain, *(kernel for kernel in kernels if kernel in trained)]), None)


def _counterpart(run: Run, runs: list[Run], labels: dict[str, str], reference: str | None) -> Run | None:
    """The reference's run with the same seed and the same further options."""
    rest = labels[run.name].removeprefix(run.kernel)
    return next((other for other in runs if other.kernel == reference and other.seed == run.seed
                 and labels[other.name].removeprefix(other.kernel) == rest), None)


def _difference(run: Run, other: Run | None) -> Curve:
    if other is None or other is run:
        return {}
    ours, theirs = run.curve("train/loss"), other.curve("train/loss")
    return {step: abs(ours[step] - theirs[step]) for step in ours if step in theirs}


def _label(run: Run, options: Mapping[str, Any]) -> str:
    config = flat(run.config)
    return ", ".join([run.kernel, *(f"{key}={config[key]}" for key in options if key in config)])


def differing(settings: Mapping[str, Mapping[str, Any]], aside: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """By setting that is not the same in all runs, the runs of each of its values."""
    keys = dict.fromkeys(key for one in settings.values() for key in one if key not in aside)
    found: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        values: dict[str, list[str]] = {}
        for name, one in settings.items():
            values.setdefault(str(one.get(key, "(none)")), []).append(name)
        if len(values) > 1:
            found[key] = values
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_layer": 4}} as {"model.n_layer": 4}."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def after(curve: Curve, warm_up: int) -> Curve:
    """Without the first steps; all of it where nothing would be left."""
    return {step: value for step, value in curve.items() if step > warm_up} or curve


def _last(curve: Curve) -> float | None:
    return curve[max(curve)] if curve else None


def _median(values: Iterable[float]) -> float | None:
    values = [value for value in values if not math.isnan(value)]
    return statistics.median(values) if values else None


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value
