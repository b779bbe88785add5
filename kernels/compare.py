"""Compares an implementation's results with the operator's float64 reference, for tests and benchmarks.

An operator's cases.py has two functions. `results` runs the operator forward and backward, and returns all results by name.
`tolerance` returns the tolerances of the results by name. In this module, `errors` compares two dictionaries of results, and
`misses` returns the results outside their tolerances.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LOG_SIZE = "p + log b"                # log of WKV's denominator, which is equal for all (a, b, p) that represent the same state
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}       # err_ratio caused by rounding a result once


def loss(out: Tensor) -> Tensor:
    """Returns sum(y^2 - tanh y), a scalar loss whose gradient differs from element to element, for tests of gradients."""
    return (out.square() - out.tanh()).sum()


def err_ratio(actual: Tensor, reference: Tensor) -> float:
    """Returns RMS(actual - reference) / RMS(reference).

    The result is 0 if both tensors are empty or zero, and infinite if `actual` is not finite or only `reference` is zero.
    """
    error = rms(actual, reference)
    size = rms(reference, torch.zeros_like(reference))
    return error / size if size else float("inf") if error else 0.0


def rms(actual: Tensor, reference: Tensor) -> float:
    """Returns RMS(actual - reference), which is 0 if both tensors are empty, and infinite if `actual` is not finite."""
    if actual.shape != reference.shape:
        raise ValueError(f"tensors must have the same shape; got {tuple(actual.shape)} and {tuple(reference.shape)}")
    difference = actual.detach().double() - reference.detach().double()
    if not difference.isfinite().all():
        return float("inf")
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0


def errors(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the error of each result by name, which is err_ratio for all results but LOG_SIZE.

    The error of LOG_SIZE is the RMS error, because a logarithm's error is the relative error of its argument.
    """
    return {name: (rms if name == LOG_SIZE else err_ratio)(actual[name], reference[name]) for name in reference}


def misses(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> dict[str, str]:
    """Returns a text with the error and the tolerance for each result whose error exceeds the tolerance, by name."""
    return {name: f"{error:.1e}, but at most {tolerance[name]:.1e} is allowed"
            for name, error in errors.items() if not error <= tolerance[name]}


def tolerance(operator: Any, dtype: torch.dtype) -> dict[str, float]:
    """Returns the largest allowed errors of an Operator's results for inputs of `dtype`, by name.

    Errors may be larger for the dtypes in Requires.rounded.
    """
    cases = importlib.import_module(f"kernels.{operator.folder}.cases")
    rounded = {"rounded": True} if dtype in operator.requires.rounded else {}
    allowed: dict[str, float] = cases.tolerance(dtype, **rounded)
    return allowed
