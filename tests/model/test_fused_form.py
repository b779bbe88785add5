"""One question selects the fused form for tensors on any device; where there is none the formulas run, and a line says why."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from kernels import native
from rwkv.model import fused, fused_c, fused_form


@pytest.fixture
def asked_anew() -> Iterator[None]:
    fused_form.why_not.cache_clear()
    yield
    fused_form.why_not.cache_clear()


@pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
def test_a_cpu_has_c() -> None:
    x = torch.ones(1, 2, 6)
    assert fused_form.form_for(x, dtype=torch.bfloat16, N=3) is fused_c
    assert fused_form.form_for(x.double()) is None
    assert fused_form.form_for(x, x.double()) is None
    assert fused_form.loss_form_for(x[0]) is None
    assert fused_form.describe("cpu") == "in C"


def test_another_device_has_the_formulas() -> None:
    x = torch.ones(1, 2, 6, device="meta")
    assert fused_form.form_for(x) is None
    assert fused.squared_relu(x).shape == x.shape


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_has_triton_where_it_is_installed(installed: bool, asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    expected = "in Triton" if installed else "in PyTorch's operations: Triton is not installed (pip install -e '.[triton]')"
    assert fused_form.describe("cuda") == expected
    assert (fused_form.why_not("cuda") is None) == installed


def test_without_the_library_a_cpu_has_the_formulas(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "there is no library for this machine")
    x = torch.tensor([[[-1.0, 2.0]]])
    assert fused_form.form_for(x) is None
    assert fused.squared_relu(x).tolist() == [[[0.0, 4.0]]]
    assert "no library for this machine" in fused_form.describe("cpu")
