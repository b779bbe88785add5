"""Registers implementations that exist for one test.

Each implementation is a module in sys.modules that the registry finds, without a file.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from kernels import registry

_numbers = itertools.count()         # a torch operator is registered once per process and name


@contextmanager
def stub(op: str = "timex", forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None,
         **requires: Any) -> Iterator[str]:
    """Registers an implementation of `op` with these functions for the duration of the block, and yields its name."""
    name = f"stub_{next(_numbers)}"
    module = ModuleType(f"kernels.{op}.{name}", "A stub for a test.")
    vars(module).update(REQUIRES=registry.Requires(**requires), forward=forward, backward=backward)
    names = registry.names

    def with_stub(operator: str) -> tuple[str, ...]:
        return (*names(operator), name) if operator == op else names(operator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(registry, "names", with_stub)
        yield name
    registry.load.cache_clear()
    registry.why_not.cache_clear()


@contextmanager
def selectable_stub(op: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Iterator[str]:
    """Registers a stub that kernels/select.py also accepts, and yields its name."""
    with stub(op, forward, backward) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.select.names", registry.names)
        yield name
