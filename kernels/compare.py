"""Errors of an implementation relative to its operator's float64 reference, for the tests and the benchmark.

An operator's cases.py has `results`, which runs it forward and backward and returns everything that it computes, by name, and
`tolerance`; `errors` compares two such dictionaries, and `misses` returns the results outside their tolerances.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LOG_SIZE = "p + log b"                # the log of a state's denominator: the same for all triples of one state
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}       # err_ratio of rounding a result once


def loss(out: Tensor) -> Tensor:
    """A scalar whose gradient differs at every element: sum(y^2 - tanh y)."""
    return (out.square() - out.tanh()).sum()


def err_ratio(actual: Tensor, reference: Tensor) -> float:
    """RMS(actual - reference) / RMS(reference): 0 where both are empty or zero, infinite where actual is not finite."""
    error = rms(actual, reference)
    size = rms(reference, torch.zeros_like(reference))
    return error / size if size else float("inf") if error else 0.0


def rms(actual: Tensor, reference: Tensor) -> float:
    """RMS(actual - reference): 0 where both are empty, infinite where actual is not finite."""
    if actual.shape != reference.shape:
        raise ValueError(f"tensors must have one shape; got {tuple(actual.shape)} and {tuple(reference.shape)}")
    difference = actual.detach().double() - reference.detach().double()
    if not difference.isfinite().all():
        return float("inf")
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0


def errors(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """The err_ratio of each result, by name; of a logarithm the RMS error, which is the err_ratio of its argument."""
    return {name: (rms if name == LOG_SIZE else err_ratio)(actual[name], reference[name]) for name in reference}


def misses(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> dict[str, str]:
    """The results whose error exceeds their tolerance, each with both numbers; empty if none."""
    return {name: f"{error:.1e}, allowed are {tolerance[name]:.1e}"
            for name, error in errors.items() if not error <= tolerance[name]}


def tolerance(operator: Any, dtype: torch.dtype) -> dict[str, float]:
    """The largest allowed error of each result of an Operator, for inputs of `dtype` (Requires.rounded allows more)."""
    cases = importlib.import_module(f"kernels.{operator.folder}.cases")
    rounded = {"rounded": True} if dtype in operator.requires.rounded else {}
    allowed: dict[str, float] = cases.tolerance(dtype, **rounded)
    return allowed
