"""Every implementation of an operator as a parameter of tests, with the mark by which conftest.py knows it."""

from typing import Any

import pytest

from kernels.registry import names
from kernels.select import folder, selectable


def implementation(operator: str, name: str, *values: Any) -> Any:
    """The parameter `values`, by default the name, for tests of that implementation on the device of --device."""
    return pytest.param(*(values or (name,)), marks=pytest.mark.implementation(folder(operator, name), name),
                        id=name if not values else f"{operator}-{name}")


def implementations(operator: str) -> list[Any]:
    """Every file of the operator's folder."""
    return [implementation(operator, name) for name in names(operator)]


def kernels(operator: str) -> list[Any]:
    """Every name that select takes for the operator: with files of another folder that it is made of."""
    return [implementation(operator, name) for name in selectable(operator)]


def compiled_in_soak(parameters: list[Any], *more: str) -> list[Any]:
    """The parameters; those that torch.compile makes, or of more kinds, take seconds to be made, and wait for make soak."""
    return [one for each in parameters for one in (in_soak(each) if is_compiled(each, more) else [each])]


def in_soak(*parameters: Any) -> list[Any]:
    return [pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.soak]) for each in parameters]


def is_compiled(parameter: Any, kinds: tuple[str, ...]) -> bool:
    return any(kind in str(value) for value in parameter.values for kind in ("torch_compile", *kinds))
