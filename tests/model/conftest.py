"""Fixtures for several test files."""

import pytest

from kernels import native
from rwkv.model import quantized


@pytest.fixture(params=[*(pytest.param(lower, marks=pytest.mark.thorough) for lower in native.levels()[:-1]),
                        *native.levels()[-1:]])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulates a CPU that has only the instructions of one level, and returns the level."""
    monkeypatch.setattr(native, "level", lambda: request.param)
    if not request.param.startswith("avx512"):           # on such a CPU PyTorch's int8 products use 7 bits of an input
        monkeypatch.setattr(quantized, "multiplies_natively", lambda dtype: False)
    return str(request.param)
