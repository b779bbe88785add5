"""A kernel's name becomes an operator in one place, and what cannot run says why and what can."""

import pytest
import torch
from stubs import stub

from kernels import registry, select
from kernels.registry import KernelUnavailable
from kernels.wkv import WKV, cases, reference


def runnable_here() -> list[str]:
    return [name for op in ("timex", "wkv") for name in registry.runnable(op) if name in select.selectable()]


def test_every_name_is_selectable_once() -> None:
    names = select.selectable()
    assert len(names) == len(set(names)) == len(registry.names("timex")) + len(registry.names("wkv")) - 1
    assert "timex" not in names
    assert select.AUTO not in names


@pytest.mark.parametrize("name", runnable_here())
def test_a_selected_kernel_is_that_kernel(name: str) -> None:
    wkv = select.select(name)
    assert isinstance(wkv, WKV)
    assert wkv.name == name
    inputs = cases.inputs(2, 9, 3)
    torch.testing.assert_close(wkv(*inputs)[0], WKV("reference")(*inputs)[0])


def test_a_stub_in_the_folder_is_selectable() -> None:
    with stub("wkv", reference.forward, reference.backward) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "names", registry.names)
        assert select.select(name).name == name


def test_auto_takes_the_first_preferred_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, chosen in (("", "taichi_scan"), ("taichi_scan", "conv1d")):
        reasons = {missing: "it is away"}
        monkeypatch.setattr(select, "why_not", lambda op, name, device, reasons=reasons: reasons.get(name))
        assert select.resolve("auto") == chosen
        assert select.why_auto() == (f"{chosen} (chosen by auto: it is away)" if missing else f"{chosen} (chosen by auto)")


def test_auto_runs_here() -> None:
    assert select.select("auto").name == select.resolve("auto") in runnable_here()
    assert select.resolve("formula") == "formula"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["auto", "conv1d", "taichi_v3"])
def test_a_device_that_is_not_there_is_a_sentence(name: str) -> None:
    with pytest.raises(KernelUnavailable, match=r"on cuda needs a CUDA device, and torch sees none$"):
        select.select(name, "cuda")


def test_an_unknown_kernel_lists_those_that_run_here() -> None:
    with pytest.raises(ValueError, match=r"^unknown kernel 'nonsense'; on cpu there are: auto, conv1d, .*reference") as error:
        select.select("nonsense")
    assert str(error.value).split(": ")[1].split(", ") == ["auto", *runnable_here()]


def test_the_folder_of_the_convolution_form_is_no_kernel() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'timex'"):
        select.select("timex")


def test_a_kernel_that_cannot_run_says_why_and_lists_those_that_do() -> None:
    with stub(devices=("cuda",)) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "names", registry.names)
        with pytest.raises(KernelUnavailable) as error:
            select.select(name, "cpu")
    assert str(error.value) == f"{name} runs on cuda, not on cpu; on cpu there are: auto, {', '.join(runnable_here())}"


def test_a_missing_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.why_not.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        with pytest.raises(KernelUnavailable, match="conv1d on cuda needs a CUDA device, and torch sees none") as error:
            select.select("conv1d", "cuda")
    finally:
        registry.why_not.cache_clear()
    assert "\n" not in str(error.value)
