"""What tests of several files share."""

import io
from collections.abc import Callable

import pytest


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """typed(b"...") -> that is what comes from standard input."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
