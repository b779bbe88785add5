"""States the result of a sweep in sentences: which kernel is fastest, by how much, and how certain the ranking is."""

import math

from rwkv.report import units
from rwkv.report.numbers import Comparison, Kernel, unit_of_loss

SPEED = "tok_per_sec"
LOSS = "val_loss"


def verdict(comparison: Comparison) -> list[str]:
    """Returns sentences on the finished runs, or [] for a single kernel or without measurements.

    Runs that differ in more than kernel and seed were made to compare losses, so a sentence on the loss then comes first.
    """
    if len(comparison.kernels) < 2:
        return []
    sentences = [_lowest_loss(comparison)] if comparison.options else []
    return [sentence for sentence in (*sentences, _fastest(comparison)) if sentence]


def _fastest(comparison: Comparison) -> str:
    ranked = _rank(comparison, SPEED)
    if len(ranked) < 2:
        return ""
    best, *others = reversed(ranked)
    speed = best.median(SPEED)
    sentence = f"{best.label} is the fastest: {units.count(speed or 0.0)} tokens/s"
    ratio = speed_ratio(best, comparison)
    if best.runs[0].kernel != comparison.reference and ratio:
        sentence += f", {ratio:.2f} times as many as with {comparison.reference}"
    else:
        sentence += f"; the next, {others[0].label}, has {units.count(others[0].median(SPEED) or 0.0)}"
    return f"{sentence}. {_certainty(best, others)}"


def _certainty(best: Kernel, others: list[Kernel]) -> str:
    """Returns a sentence on how certain the ranking by speed is, judging by the spread over a kernel's runs."""
    if min(len(kernel.values(SPEED)) for kernel in (best, *others)) < 2:
        return "At least one kernel has only one run, so the variation of the speed is unknown."
    close = [kernel.label for kernel in others if max(kernel.values(SPEED)) >= min(best.values(SPEED))]
    if close:
        return f"The speeds of this kernel overlap with those of {' and '.join(close)}, which may be equally fast."
    return "The slowest run of this kernel is faster than every run of the other kernels."


def _lowest_loss(comparison: Comparison) -> str:
    ranked = _rank(comparison, LOSS)
    if len(ranked) < 2:
        return ""
    best, *others = ranked
    unit = " per ".join(unit_of_loss(comparison.runs))
    return (f"{best.label} has the lowest validation loss: {best.median(LOSS):.4f} {unit}; the next, "
            f"{others[0].label}, has {others[0].median(LOSS):.4f}.")


def _rank(comparison: Comparison, name: str) -> list[Kernel]:
    """Returns the kernels that have the number `name`, each with only finished runs. The smallest median comes first."""
    medians = [(kernel.only_finished().median(name), kernel.only_finished()) for kernel in comparison.kernels]
    measured = [(median, kernel) for median, kernel in medians if median is not None and math.isfinite(median)]
    return [kernel for _, kernel in sorted(measured, key=lambda pair: pair[0])]


def speed_ratio(kernel: Kernel, comparison: Comparison) -> float | None:
    """Returns the kernel's throughput divided by that of the reference with the same options, or None if either is missing."""
    label = f"{comparison.reference}{kernel.label.removeprefix(kernel.runs[0].kernel)}"
    reference = next((candidate for candidate in comparison.kernels if candidate.label == label), None)
    speed = kernel.median(SPEED)
    reference_speed = reference.only_finished().median(SPEED) if reference else None
    return speed / reference_speed if speed and reference_speed else None
