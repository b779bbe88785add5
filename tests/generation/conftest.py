"""Fixtures for several test files."""

import io
from collections.abc import Callable

import pytest


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """A function that makes these bytes the standard input: typed(b"...")."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
