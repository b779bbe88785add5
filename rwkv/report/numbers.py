"""Computes the numbers of a report: medians, least and greatest values over a kernel's runs, and differences of losses.

Throughput and times are medians over a run without the warm-up. A kernel's number is the median over the kernel's runs, one per
seed, with the minimum and the maximum. The reference is the kernel `reference` or `formula` if the sweep trained one of these,
otherwise the first trained kernel of the command line. Each run is compared step by step with the reference's run of the same
seed.

report.csv has a row for each run, and three rows for each kernel: median, minimum and maximum. columns() describes the quantity
in each column. A field is empty if the quantity was not measured.
"""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rwkv.config import TrainConfig, is_met
from rwkv.config import options as options_of
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.report.run_files import Curve, Run

REFERENCES = ("reference", "formula")    # kernels that define their operator, in order of preference
EARLY = 20                               # first steps of a run, in which rounding hardly separates equivalent kernels
MAY_DIFFER = ("kernel.name", "seed", "out_dir", "resume", "logger.run_name")
OPTIONS = options_of(TrainConfig)
WHEN = ("start", "end")
REWARDS = ("rewards_margin", "rewards_accuracy", "rewards_chosen", "rewards_rejected")    # metrics of pairs: train/..., val/...
Numbers = dict[str, float]               # by column of report.csv, without quantities that were not measured


@dataclass
class Kernel:
    """The runs of a kernel, and the numbers of each run.

    If runs differ in other options too, each combination of values is a separate Kernel. `label` is the kernel's name with the
    values of these options.
    """

    label: str
    runs: list[Run]
    numbers: list[Numbers]

    def only_finished(self) -> "Kernel":
        """Returns the same kernel with only the finished runs, for statistics."""
        finished = [(run, numbers) for run, numbers in zip(self.runs, self.numbers, strict=True) if run.status == "finished"]
        return Kernel(self.label, [run for run, _ in finished], [numbers for _, numbers in finished])

    def values(self, name: str) -> list[float]:
        return [numbers[name] for numbers in self.numbers if name in numbers]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def status(self) -> str:
        """Returns "finished" if any run is finished, otherwise the status of the first run."""
        statuses = [run.status for run in self.runs]
        return "finished" if "finished" in statuses else statuses[0]


@dataclass
class Comparison:
    """All runs by kernel, in the order of the command line.

    Attributes:
        reference: the kernel with which the others are compared; None for a single kernel.
        results: the operator's outputs and gradients with measured errors.
        differences: for each run's name, by step, the absolute difference between train/loss and the reference's train/loss.
        options: the differing options other than kernel and seed, with the names of the runs that have each value.
        machines: the differing machines, versions and commits, with the names of the runs that have each value.
    """

    kernels: list[Kernel]
    reference: str | None
    results: list[str]
    differences: dict[str, Curve]
    options: dict[str, dict[str, list[str]]]
    machines: dict[str, dict[str, list[str]]]

    @property
    def runs(self) -> list[Run]:
        return [run for kernel in self.kernels for run in kernel.runs]

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1

    @property
    def config(self) -> JsonObject:
        """The options of the first run with a config.yaml, by dotted key."""
        return next((flatten(run.config) for run in self.runs if run.config), {})


def compare(runs: list[Run], reference: str | None = None) -> Comparison:
    """Groups the runs by kernel and compares each with the reference. Raises UserError if `reference` was not trained."""
    options = differing_settings({run.name: flatten(run.config) for run in runs if run.config}, MAY_DIFFER)
    machines = differing_settings({run.name: run.machine for run in runs if run.machine}, ("date",))
    labels = {}
    for run in runs:
        config = flatten(run.config)
        labels[run.name] = ", ".join([run.kernel, *(f"{key}={config[key]}" for key in options
                                                    if key in config and _has_effect(config, key))])
    reference = _reference(runs, reference)
    differences = {run.name: _difference(run, runs, labels, reference) for run in runs}
    kernels = [Kernel(label, [run for run in runs if labels[run.name] == label], [])
               for label in dict.fromkeys(labels.values())]
    for kernel in kernels:
        kernel.numbers = [numbers_of(run, differences[run.name]) for run in kernel.runs]
    if len(kernels) == 1:
        reference = None
    return Comparison(kernels, reference, _measured_results(runs), differences if reference else {}, options, machines)


def numbers_of(run: Run, difference: Curve) -> Numbers:
    """Returns the numbers of a run. `difference` is the run's value in Comparison.differences."""
    validated = max(run.curve("val/loss"), default=-1)       # an earlier step's val/bpb would be from before a resumption
    numbers = {"steps": max(run.curve("train/loss"), default=None), "val_loss": _last(run.curve("val/loss")),
               "val_bpb": run.curve("val/bpb").get(validated), "val_lost": run.curve("val/lost").get(validated),
               "train_loss": _last(run.curve("train/loss")),
               "tok_per_sec": _median(without_warm_up(run.curve("tok_per_sec"), run.measured.get("warm_up", 0)).values()),
               "peak_mib": max(run.curve("peak_mem").values(), default=None),
               **{name.replace("/", "_"): _last(run.curve(name)) for name in reward_names()},
               **_median_times(run), **_largest_errors(run)}
    if difference:
        worst = max(difference, key=lambda step: (_or_infinite(difference[step]), -step))        # first of equal differences
        early = [_or_infinite(value) for step, value in difference.items() if step <= EARLY]
        numbers |= {"difference": difference[worst], "difference_step": worst, "difference_early": max(early, default=None)}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def reward_names() -> list[str]:
    """Returns the names of the metrics for pairs of answers: train/rewards_margin and so on."""
    return [f"{split}/{name}" for split in ("train", "val") for name in REWARDS]


def learns_pairs(run: Run) -> bool:
    return bool(run.curve(f"val/{REWARDS[0]}") or run.curve(f"train/{REWARDS[0]}"))


def unit_of_loss(runs: Iterable[Run]) -> tuple[str, str]:
    """Returns the unit of the losses, and the kind of item over which the losses are averaged."""
    return ("objective", "pair") if any(map(learns_pairs, runs)) else ("nats", "token")


def _median_times(run: Run) -> dict[str, float | None]:
    steps = run.measured.get("steps", [])
    return {"step_ms": _median(step["ms"] for step in steps),
            "forward_ms": _median(step["forward_ms"] for step in steps),
            "backward_ms": _median(step["backward_ms"] for step in steps),
            "rest_ms": _median(step["ms"] - step["forward_ms"] - step["backward_ms"] for step in steps)}


def _largest_errors(run: Run) -> dict[str, float]:
    worst = {}
    for when in WHEN:
        for result in _measured_results([run]):
            errors = [layer["errors"][result] for layer in run.layers(when) if result in layer["errors"]]
            if errors:
                worst[column("err", when, result)] = max(_or_infinite(error["err_ratio"]) for error in errors)
                worst[column("max", when, result)] = max(_or_infinite(error["max"]) for error in errors)
    return worst


def column(kind: str, when: str, result: str) -> str:
    """Returns the column of an error, such as err_end_grad_k.

    `kind` is "err" for RMS error / RMS, or "max" for the largest absolute error.
    """
    return f"{kind}_{when}_{result.replace(' ', '_')}"


def _measured_results(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(result for run in runs for when in WHEN for layer in run.layers(when)
                              for result in layer["errors"]))


def _reference(runs: list[Run], requested: str | None) -> str | None:
    kernels = list(dict.fromkeys(run.kernel for run in runs))
    if requested is not None and requested not in kernels:
        raise UserError(f"the reference must be one of the kernels that were trained, {', '.join(kernels)}; got {requested!r}")
    trained = [run.kernel for run in runs if run.curve("train/loss")]
    preferred = [kernel for kernel in REFERENCES if kernel in trained]
    return requested or next(iter(preferred + trained), None)


def _difference(run: Run, runs: list[Run], labels: dict[str, str], reference: str | None) -> Curve:
    """Returns, by step, the absolute difference between the losses of the run and of the reference run.

    The reference run has the same seed and options. Returns {} if there is none.
    """
    options = labels[run.name].removeprefix(run.kernel)
    counterpart = next((candidate for candidate in runs if candidate.kernel == reference and candidate.seed == run.seed
                        and labels[candidate.name].removeprefix(candidate.kernel) == options), run)
    if counterpart is run:
        return {}
    reference_losses = counterpart.curve("train/loss")
    return {step: abs(loss - reference_losses[step])
            for step, loss in run.curve("train/loss").items() if step in reference_losses}


def differing_settings(settings: Mapping[str, JsonObject], ignored: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Returns the settings that differ between runs, each with the names of the runs that have each value.

    `settings` has the settings of each run, by the run's name. Runs in which an option has no effect are not listed under it.
    """
    keys = dict.fromkeys(key for options in settings.values() for key in options if key not in ignored)
    result: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        values: dict[str, list[str]] = {}
        for name, options in settings.items():
            if _has_effect(options, key):
                values.setdefault(str(options.get(key, "(none)")), []).append(name)
        if len(values) > 1:
            result[key] = values
    return result


def _has_effect(config: JsonObject, key: str) -> bool:
    """Returns True unless the option `key` requires another option, by dotted key in `config`, to have another value."""
    needs = OPTIONS[key].metadata["needs"] if key in OPTIONS else ()
    if not needs or needs[0] not in config:
        return True
    required, *allowed = needs
    return is_met(allowed, config[required])


def flatten(config: Mapping[str, object], prefix: str = "") -> JsonObject:
    """Flattens nested options to dotted keys: {"model": {"n_layer": 4}} becomes {"model.n_layer": 4}."""
    options: JsonObject = {}
    for key, value in config.items():
        options |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return options


def without_warm_up(curve: Curve, warm_up: int) -> Curve:
    """Returns the curve without the first `warm_up` steps, or the whole curve if there are no later steps."""
    return {step: value for step, value in curve.items() if step > warm_up} or curve


def _last(curve: Curve) -> float | None:
    return curve[max(curve)] if curve else None


def _median(values: Iterable[float]) -> float | None:
    values = [value for value in values if not math.isnan(value)]
    return statistics.median(values) if values else None


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min, "max": max}
IDENTITY = {
    "level": "run: one run; kernel: a statistic over a kernel's runs",
    "statistic": "value (for a run), or median, min or max (for a kernel)",
    "kernel": "name of the kernel, with the values of other options in which the runs differ",
    "seed": "seed of the run",
    "run": "name of the run's directory",
    "status": "finished, failed, unavailable, stopped, waiting or not finished",
    "reason": "why the run failed, or why the kernel cannot run on this machine",
    "runs": "number of runs in the statistic",
    "order": "the run's position in the shuffled order of training",
}
QUANTITIES = {
    "steps": "the last step",
    "val_loss": "last validation loss, in nats per token; for pairs of answers, the objective per pair",
    "val_bpb": "last validation loss, in bits per byte; empty if the tokenizer loses too much of the text",
    "val_lost": "fraction of the validation text that the tokenizer loses, if any, or the fraction of unknown tokens in "
                "precomputed ids",
    "train_loss": "mean training loss of the last logged interval, in nats per token; for pairs of answers, the objective per "
                  "pair",
    **{f"{split}_{name}": f"{words}, mean over {pairs}" for split, pairs in (
        ("train", "the last logged interval's pairs"), ("val", "the last validation's pairs"))
       for name, words in zip(REWARDS, (
           "reward of the chosen answer minus that of the rejected one",
           "fraction of pairs whose chosen answer has the higher reward", "reward of the chosen answer",
           "reward of the rejected answer"), strict=True)},
    "tok_per_sec": "tokens per second, median of the logged steps after warm-up",
    "step_ms": "milliseconds of a training step, median of the sampled steps",
    "forward_ms": "the part of step_ms for the operator's forward passes",
    "backward_ms": "the part of step_ms for the operator's backward passes",
    "rest_ms": "the part of step_ms for everything else",
    "peak_mib": "peak memory in MiB, of the GPU or, on a CPU, of the process",
    "difference": "largest difference, over all logged steps, between train/loss and that of the reference's run with the "
                  "same seed",
    "difference_step": "the step of the largest difference",
    "difference_early": f"largest difference within the first {EARLY} steps",
}


def columns(results: Iterable[str]) -> dict[str, str]:
    """Returns the columns of report.csv with descriptions. `results` has the output "y" and the gradients "grad NAME"."""
    errors = {column(kind, when, result): f"{words} of {result} against float64, at the {when}, in the worst layer"
              for when in WHEN for result in results
              for kind, words in (("err", "RMS error / RMS"), ("max", "largest absolute error"))}
    return IDENTITY | QUANTITIES | errors


def rows(comparison: Comparison) -> list[dict[str, object]]:
    """Returns the rows of report.csv. Each kernel has first the rows of its runs, and then the rows of statistics."""
    result: list[dict[str, object]] = []
    for kernel in comparison.kernels:
        result += [{"level": "run", "statistic": "value", "kernel": kernel.label, "seed": run.seed, "run": run.name,
                    "status": run.status, "reason": run.reason or "", "runs": 1, "order": run.order or "", **numbers}
                   for run, numbers in zip(kernel.runs, kernel.numbers, strict=True)]
        result += _statistics(kernel)
    return result


def as_csv(comparison: Comparison) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns(comparison.results)))
    writer.writeheader()
    writer.writerows(rows(comparison))
    return text.getvalue()


def _statistics(kernel: Kernel) -> list[dict[str, object]]:
    finished = kernel.only_finished()
    identity = {"level": "kernel", "kernel": kernel.label, "status": kernel.status(), "runs": len(finished.runs),
                "reason": next((run.reason for run in kernel.runs if run.reason), "") or ""}
    measured = dict.fromkeys(name for numbers in finished.numbers for name in numbers)
    return [identity | {"statistic": statistic} | {name: function(finished.values(name)) for name in measured}
            for statistic, function in STATISTICS.items()]
