"""What tests of several files share."""

import pytest

from kernels import native
from rwkv.model import quantized


@pytest.fixture(params=[*(pytest.param(lower, marks=pytest.mark.thorough) for lower in native.levels()[:-1]),
                        *native.levels()[-1:]])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU with the instructions of that level alone."""
    monkeypatch.setattr(native, "level", lambda: request.param)
    if not request.param.startswith("avx512"):           # PyTorch's products in int8 then take 7 bits of an input
        monkeypatch.setattr(quantized, "multiplies", lambda dtype: False)
    return str(request.param)
