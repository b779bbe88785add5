"""Tests which fused implementation each device gets; without one the formulas run, and a line states the reason."""

from collections.abc import Iterator

import pytest
import torch

from kernels import native
from kernels.machine import triton
from rwkv.model import fused
from rwkv.model.fused import backend as fused_backend
from rwkv.model.fused import c as fused_c


@pytest.fixture
def uncached_reasons() -> Iterator[None]:
    fused_backend.why_not.cache_clear()
    yield
    fused_backend.why_not.cache_clear()


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_a_cpu_gets_c() -> None:
    x = torch.ones(1, 2, 6)
    assert fused_backend.backend_for(x, dtype=torch.bfloat16, N=3) is fused_c
    assert fused_backend.backend_for(x.double()) is None
    assert fused_backend.backend_for(x, x.double()) is None
    assert fused_backend.loss_backend_for(x[0]) is None
    assert fused_backend.describe("cpu") == "in C"


def test_another_device_gets_the_formulas() -> None:
    x = torch.ones(1, 2, 6, device="meta")
    assert fused_backend.backend_for(x) is None
    assert fused.squared_relu(x).shape == x.shape


@pytest.mark.parametrize("reason", [None, "Triton is not installed (pip install -e '.[triton]')"])
def test_a_gpu_gets_triton_if_triton_can_run(reason: str | None, uncached_reasons: None,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "why_not", lambda: reason)
    assert fused_backend.describe("cuda") == ("in Triton" if reason is None else f"in PyTorch's operations: {reason}")
    assert fused_backend.why_not("cuda") == reason


def test_without_the_library_a_cpu_gets_the_formulas(uncached_reasons: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "there is no library for this machine")
    x = torch.tensor([[[-1.0, 2.0]]])
    assert fused_backend.backend_for(x) is None
    assert fused.squared_relu(x).tolist() == [[[0.0, 4.0]]]
    assert "no library for this machine" in fused_backend.describe("cpu")
