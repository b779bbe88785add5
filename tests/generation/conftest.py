"""Fixtures that several test files of this folder share."""

import io
from collections.abc import Callable

import pytest


@pytest.fixture
def set_stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Returns a function that makes bytes the standard input: set_stdin(b"...")."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
