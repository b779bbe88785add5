"""What a reader must know before the numbers: what failed, what is wrong, and what differs beside the kernel and the seed."""

from typing import NamedTuple

from rwkv.report.numbers import EARLY, RESULTS, WHEN, Comparison, Kernel, allowed

APART = {"32-true": 1e-3}                # nats in the first EARLY steps, a hundred times what rounding alone gives
APART_IN_HALF = 0.1
BAD, NOTE, GOOD = "bad", "note", "good"


class Finding(NamedTuple):
    """kind: bad, note or good."""

    kind: str
    text: str


def findings(comparison: Comparison) -> list[Finding]:
    found = [*_options(comparison), *_machines(comparison), *_damaged(comparison)]
    for kernel in comparison.kernels:
        found += [*_errors(kernel), *_apart(kernel, comparison.reference), *_missing(kernel)]
    bad = any(finding.kind == BAD for finding in found)
    return found + ([] if bad or not comparison.reference else [_all_well(comparison)])


def _options(comparison: Comparison) -> list[Finding]:
    return [Finding(BAD, f"Not only the kernel and the seed differ: {key} is {_by_value(values)}.")
            for key, values in comparison.options.items()]


def _machines(comparison: Comparison) -> list[Finding]:
    return [Finding(BAD, f"The runs were not all made on the same: {key} is {_by_value(values)}.")
            for key, values in comparison.machines.items()]


def _damaged(comparison: Comparison) -> list[Finding]:
    return [Finding(BAD, f"{run.name}: {said}.") for run in comparison.runs for said in run.damaged]


def _by_value(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} in {names[0] if len(names) == 1 else f'{len(names)} runs'}" for value, names in values.items())


def _errors(kernel: Kernel) -> list[Finding]:
    """All that a kernel has wrong in one."""
    wrong = [said for result in RESULTS if (said := _worst(kernel, result))]
    return [Finding(BAD, f"{kernel.label} is wrong: the error of {'; of '.join(wrong)}")] if wrong else []


def _worst(kernel: Kernel, result: str) -> str | None:
    """Of the runs in which it is more than is allowed, the one with the largest error."""
    name = result.replace(" ", "_")
    wrong = [(numbers[f"err_{when}_{name}"], when, run) for run, numbers in zip(kernel.runs, kernel.numbers, strict=True)
             for when in WHEN if numbers.get(f"err_{when}_{name}", 0.0) > allowed(run, when).get(result, float("inf"))]
    if not wrong:
        return None
    error, when, run = max(wrong, key=lambda one: one[0])
    return f"its {_in_words(result)} is {error:.1e} at the {when} of {run.name} ({allowed(run, when)[result]:.0e} is allowed)"


def _in_words(result: str) -> str:
    return f"gradient of {result.removeprefix('grad ')}" if result.startswith("grad ") else f"output {result}"


def _apart(kernel: Kernel, reference: str | None) -> list[Finding]:
    found = []
    for run, numbers in zip(kernel.runs, kernel.numbers, strict=True):
        limit = APART.get(run.measured.get("precision", "32-true"), APART_IN_HALF)
        if numbers.get("difference_early", 0.0) > limit:
            distance = numbers["difference_early"]
            found.append(Finding(BAD, f"{run.name}: its loss leaves that of {reference} by {distance:.2g} nats within {EARLY} "
                                      f"steps; kernels that compute the same stay within {limit:g}."))
    return found


def _missing(kernel: Kernel) -> list[Finding]:
    """Once for each reason."""
    found: dict[tuple[str, str | None], int] = {}
    for run in kernel.runs:
        found[run.status, run.reason] = found.get((run.status, run.reason), 0) + 1
    return [Finding(BAD if status == "failed" else NOTE,
                    f"{kernel.label} {_became(status)} in {count} of {len(kernel.runs)} runs{f': {reason}' if reason else ''}")
            for (status, reason), count in found.items() if status != "finished"]


def _became(status: str) -> str:
    return {"failed": "failed", "unavailable": "cannot run here"}.get(status, f"is {status}")


def _all_well(comparison: Comparison) -> Finding:
    measured = [kernel.label for kernel in comparison.kernels if any("err_end_y" in numbers for numbers in kernel.numbers)]
    errors = f" The outputs and gradients of {', '.join(measured)} are within what the tests allow." if measured else ""
    return Finding(GOOD, f"Only the kernel and the seed differ, and the losses are those of {comparison.reference} as far as "
                         f"rounding lets them be.{errors}")
