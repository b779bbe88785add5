"""Times several functions on one device alternately, so that their ratios are valid even on a shared machine."""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import quantiles
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

SHORTEST_S = 0.004       # minimum seconds per sample; a shorter function is repeated
MAX_ROUNDS = 21
SPINNING_S = 0.015       # maximum time that idle OpenMP threads spin (libgomp: 300,000 iterations)


def time_alternately(work: Mapping[Key, Callable[[], Any]], device: str, budget_s: float = 1.0) -> dict[Key, list[float]]:
    """Times the functions in turn until each has spent its time budget. Returns samples of each function's seconds per call.

    Before each sample the function is called untimed, unless a call takes more than a tenth of the budget.
    """
    once = {key: _seconds_warm(function, device, budget_s) for key, function in work.items()}
    samples: dict[Key, list[float]] = {key: [] for key in work}          # the first calls do not count, because they map memory
    repeats = {key: max(1, math.ceil(SHORTEST_S / first)) for key, first in once.items()}
    for _ in range(MAX_ROUNDS):
        for key, function in work.items():
            if sum(samples[key]) * repeats[key] < budget_s:
                if device == "cpu":
                    time.sleep(SPINNING_S)       # waits until the previous function's threads stop spinning
                if once[key] < budget_s / 10:
                    function()           # fills the caches with the function's own data
                samples[key].append(seconds(function, device, repeats[key]))
    return samples


def spread(samples: Sequence[float]) -> float:
    """Returns the distance between the quartiles of several runs, as a fraction of their median; 0 for a single run."""
    if len(samples) < 2:
        return 0.0
    lower, middle, upper = quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / middle


def seconds(function: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Returns the mean seconds of `repeats` calls, including all work that the calls launch on the device."""
    return (_seconds_cuda if device == "cuda" else _seconds_cpu)(function, repeats) / repeats


def _seconds_warm(function: Callable[[], Any], device: str, budget_s: float) -> float:
    """Times a second call, because the first may compile. If the first call exceeds the budget, returns its seconds."""
    once = seconds(function, device)
    return seconds(function, device) if once < budget_s else once


def _seconds_cpu(function: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return time.perf_counter() - start


def _seconds_cuda(function: Callable[[], Any], repeats: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
