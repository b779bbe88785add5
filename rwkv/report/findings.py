"""Finds what a report mentions first: failed runs, wrong kernels, and differences in options other than kernel and seed."""

from typing import NamedTuple

from rwkv.io.lines import count_of
from rwkv.report import units
from rwkv.report.numbers import EARLY, WHEN, Comparison, Kernel, Numbers, column
from rwkv.report.run_files import Run

MAX_DISTANCE = {"32-true": 1e-3}         # nats within EARLY steps, by precision; 100 times what rounding causes
MAX_DISTANCE_HALF = 0.1                  # nats within EARLY steps, for other precisions
BAD = "bad"
NOTE = "note"
GOOD = "good"


class Finding(NamedTuple):
    kind: str                            # BAD, NOTE or GOOD
    text: str


def findings(comparison: Comparison) -> list[Finding]:
    """Returns all findings on a comparison. If only kernel and seed differ, the last finding names the equivalent kernels."""
    difference_findings = [Finding(BAD, f"The runs differ in more than kernel and seed: {key} is {_by_value(values)}.")
                           for key, values in comparison.options.items()]
    difference_findings += [Finding(BAD, f"The runs differ in machine or versions: {key} is {_by_value(values)}.")
                            for key, values in comparison.machines.items()]
    damaged = [Finding(BAD, f"{run.name}: {problem}.") for run in comparison.runs for problem in run.damaged]
    result = [*difference_findings, *damaged, *_lost_text(comparison)]
    equivalent = []
    for kernel in comparison.kernels:
        problems = _deviations(kernel, comparison.reference)
        errors = [sentence for result in comparison.results if (sentence := _largest_error_phrase(kernel, result))]
        if errors:
            problems.insert(0, Finding(BAD, f"{kernel.label} is wrong: the error of {'; of '.join(errors)}"))
        elif warnings := {str(run.measured["wrong"]) for run in kernel.runs if run.measured.get("wrong")}:
            problems = [*(Finding(BAD, f"{sentence}.") for sentence in sorted(warnings)), *problems]
        result += [*problems, *_unfinished_runs(kernel)]
        if not problems and any(kernel.numbers):
            equivalent.append(kernel)
    if comparison.reference and not difference_findings and len(equivalent) > 1:
        result.append(_agreement(comparison, equivalent))
    return result


def _lost_text(comparison: Comparison) -> list[Finding]:
    by_share: dict[float, list[Numbers]] = {}
    for numbers in (numbers for kernel in comparison.kernels for numbers in kernel.numbers if "val_lost" in numbers):
        by_share.setdefault(numbers["val_lost"], []).append(numbers)
    sentences = []
    for share, runs in by_share.items():
        which = "" if len(runs) == len(comparison.runs) else f" in {len(runs)} of {count_of(len(comparison.runs), 'run')}"
        withheld = "" if all("val_bpb" in numbers for numbers in runs) else ", and bits per byte are not reported"
        sentences.append(f"The tokenizer loses {100 * share:.3g} % of the validation text{which}: the losses exclude this part"
                         f"{withheld}.")
    return [Finding(NOTE, sentence) for sentence in sentences]


def _by_value(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} in {runs[0] if len(runs) == 1 else f'{len(runs)} runs'}" for value, runs in values.items())


def _largest_error_phrase(kernel: Kernel, result: str) -> str | None:
    """Returns a phrase on the largest error of a result, or None if every error is within the tolerance."""
    problems: list[tuple[float, str, Run]] = []
    for run, numbers in zip(kernel.runs, kernel.numbers, strict=True):
        for when in WHEN:
            error = numbers.get(column("err", when, result), 0.0)
            if error > run.tolerances(when).get(result, float("inf")):
                problems.append((error, when, run))
    if not problems:
        return None
    error, when, run = max(problems, key=lambda error: error[0])
    words = f"gradient of {result.removeprefix('grad ')}" if result.startswith("grad ") else f"output {result}"
    return f"the {words} is {error:.1e} at the {when} of {run.name} (the limit is {run.tolerances(when)[result]:.0e})"


def _deviations(kernel: Kernel, reference: str | None) -> list[Finding]:
    """Returns one finding for each run with early losses that differ from the reference's by more than rounding explains."""
    result = []
    for run, numbers in zip(kernel.runs, kernel.numbers, strict=True):
        limit = MAX_DISTANCE.get(run.measured.get("precision", "32-true"), MAX_DISTANCE_HALF)
        distance = numbers.get("difference_early", 0.0)
        if distance > limit:
            result.append(Finding(BAD, f"{run.name}: the loss deviates from that of {reference} by {distance:.2g} nats within "
                                       f"{EARLY} steps; equivalent kernels stay within {limit:g}."))
    return result


def _unfinished_runs(kernel: Kernel) -> list[Finding]:
    counts: dict[tuple[str, str | None], int] = {}
    for run in kernel.runs:
        counts[run.status, run.reason] = counts.get((run.status, run.reason), 0) + 1
    verbs = {"failed": "failed", "unavailable": "cannot run here"}
    return [Finding(BAD if status == "failed" else NOTE,
                    f"{kernel.label} {verbs.get(status, f'is {status}')} in {count} of {count_of(len(kernel.runs), 'run')}"
                    + (f": {reason}" if reason else ""))
            for (status, reason), count in counts.items() if status != "finished"]


def _agreement(comparison: Comparison, equivalent: list[Kernel]) -> Finding:
    """Returns the finding that these kernels agree. Only kernels with a reference run of the same seed are compared."""
    compared = [kernel for kernel in equivalent if kernel.values("difference_early")]
    sentence = "Only the kernel and the seed differ"
    if compared:
        early = max(max(kernel.values("difference_early")) for kernel in compared)
        largest = max(max(kernel.values("difference")) for kernel in compared)
        sentence += (f", and the losses of {', '.join(kernel.label for kernel in compared)} equal those of "
                     f"{comparison.reference} up to rounding: at most {units.small_number(early)} nats apart in the first "
                     f"{EARLY} steps, {units.small_number(largest)} in all")
    measured = [kernel.label for kernel in equivalent if kernel.values("err_end_y")]
    results = "outputs" if comparison.results == ["y"] else "outputs and gradients"
    errors = f" The {results} of {', '.join(measured)} are within the tests' tolerances." if measured else ""
    return Finding(GOOD, f"{sentence}.{errors}")
