"""Makes pytest parameters of the implementations of an operator, with the mark that conftest.py reads.

Also caches reference results for all implementations that are compared with them.
"""

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import names
from kernels.select import folder, selectable


def implementation(operator: str, name: str, *values: Any) -> Any:
    """Returns a pytest parameter with `values`, by default the name, for tests of that implementation on the device of
    --device.
    """
    return pytest.param(*(values or (name,)), marks=pytest.mark.implementation(folder(operator, name), name),
                        id=name if not values else f"{operator}-{name}")


def implementations(operator: str) -> list[Any]:
    """Returns a parameter for every implementation in the operator's folder."""
    return [implementation(operator, name) for name in names(operator)]


def kernels(operator: str) -> list[Any]:
    """Returns a parameter for every name that select accepts for the operator.

    The names include kernels of another operator that the operator can use.
    """
    return [implementation(operator, name) for name in selectable(operator)]


def compiled_in_soak(parameters: list[Any], *more: str) -> list[Any]:
    """Returns the parameters, and marks some of them as soak.

    Marked are the parameters that torch.compile takes seconds to compile, and those with one of `more` in their name.
    """
    kinds = ("torch_compile", *more)
    return [one for each in parameters
            for one in (in_soak(each) if any(kind in str(each.values) for kind in kinds) else [each])]


def in_soak(*parameters: Any) -> list[Any]:
    return [pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.soak]) for each in parameters]


def cache_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the function's results by the values of its tensors. Callers must not write into a result."""
    known: dict[Any, Any] = {}

    @wraps(function)
    def call_cached(*arguments: Any) -> Any:
        key = _content(arguments)
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return call_cached


def _content(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_content, value))
    if not isinstance(value, Tensor):
        return value
    numbers = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return value.dtype, value.shape, value.device, hashlib.sha256(numbers).digest()
