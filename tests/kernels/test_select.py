"""A kernel's name becomes an operator in one place, and what cannot run says why and what can."""

import pytest
import torch
from stubs import stub

from kernels import registry, select
from kernels.bench.results import committed, read
from kernels.registry import KernelUnavailable
from kernels.wkv4 import WKV, cases, reference

NOISE = 1.1              # two kernels this close to each other are equally fast


def runnable_here() -> list[str]:
    return [name for op in ("timex", "wkv4") for name in registry.runnable(op) if name in select.selectable()]


def test_every_name_is_selectable_once() -> None:
    names = select.selectable()
    assert len(names) == len(set(names))
    assert set(names) == {*registry.names("timex"), *registry.names("wkv4")} - {"timex", "fft"}
    assert select.AUTO not in names


@pytest.mark.parametrize("name", runnable_here())
def test_a_selected_kernel_is_that_kernel(name: str) -> None:
    wkv = select.select(name)
    assert isinstance(wkv, WKV)
    assert wkv.name == name
    inputs = cases.inputs(2, 9, 3)
    torch.testing.assert_close(wkv(*inputs)[0], WKV("reference")(*inputs)[0])


def test_a_stub_in_the_folder_is_selectable() -> None:
    with stub("wkv4", reference.forward, reference.backward) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "names", registry.names)
        assert select.select(name).name == name


def test_what_is_unsound_in_a_quotient_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"^fft cannot be used inside WKV: its error is relative to .* choose another kernel$"):
        select.select("fft")
    with stub(wkv=False) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "names", registry.names)
        assert name not in select.selectable()


def test_what_cannot_be_asked_for_want_of_its_package_is_selectable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is known, and selecting it says what to install."""
    def missing(op: str, name: str) -> None:
        raise KernelUnavailable(f"{name} needs the package away")

    with monkeypatch.context() as patch:
        patch.setattr(select, "load", missing)
        assert set(registry.names("timex")) <= set(select.selectable())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_takes_the_first_of_its_order_that_runs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(select.RULES, ("cpu", torch.float32), select.Rule(("taichi_scan", "torch_scan"), measured=True))
    monkeypatch.setitem(select.RULES, ("cpu", torch.bfloat16), select.Rule(("taichi_scan", "torch_scan"), measured=True))
    for missing, chosen in (("", "taichi_scan"), ("taichi_scan", "torch_scan")):
        reasons = {missing: "it is away"}
        monkeypatch.setattr(select, "why_not", lambda op, name, device, reasons=reasons: reasons.get(name))
        assert select.resolve("auto", "cpu", dtype) == chosen
        expected = f"{chosen} (chosen by auto: it is away)" if missing else f"{chosen} (chosen by auto)"
        assert select.why_auto("cpu", dtype) == expected


def test_auto_says_what_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not", lambda op, name, device: "it is away" if name == "triton_scan" else None)
    monkeypatch.setitem(select.RULES, ("cuda", torch.bfloat16), select.Rule(("triton_scan", "taichi_scan"), measured=False))
    assert select.why_auto("cuda", torch.bfloat16) == "taichi_scan (chosen by auto: it is away; not measured on cuda yet)"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_auto_means_computes_in_that_dtype(dtype: torch.dtype) -> None:
    time_decay, time_first, k, v, _ = cases.inputs(2, 9, 3, dtype=dtype)
    assert select.select("auto", "cpu", dtype)(time_decay, time_first, k, v)[0].dtype == dtype


@pytest.mark.parametrize("rule", select.RULES.values(), ids=map(str, select.RULES))
def test_the_last_resort_of_every_rule_runs_everywhere(rule: select.Rule) -> None:
    requires = registry.load("wkv4", rule.order[-1]).REQUIRES
    assert (requires.packages, set(requires.devices)) == ((), {"cpu", "cuda"})
    assert set(rule.order) <= set(select.selectable()), "a rule names a kernel that there is no file for"


def needs_a_compiler(name: str) -> bool:
    try:
        return registry.load("wkv4" if name in registry.names("wkv4") else "timex", name).REQUIRES.compiled
    except KernelUnavailable:
        return False


@pytest.mark.parametrize("rule", [*select.RULES.values(), select.IN_FLOAT64], ids=str)
def test_auto_needs_no_compiler(rule: select.Rule) -> None:
    assert not [*filter(needs_a_compiler, rule.order)]
    assert needs_a_compiler("torch_compile_scan")


@pytest.mark.parametrize("key", select.RULES, ids=str)
def test_the_rule_is_what_the_committed_results_say(key: tuple[str, torch.dtype]) -> None:
    """At every shape that was measured, the first of the order, both passes together, is the fastest or as good as that.

    Of those that need no C++ compiler: auto is for whoever has none.
    """
    device, dtype = key
    reports = [report for report in read(committed())
               if (report["op"], report["device"], f"torch.{report['dtype']}") == ("wkv4", device, str(dtype))]
    assert select.RULES[key].measured == bool(reports)
    for measured in (measured for report in reports for measured in report["shapes"]):
        ms: dict[str, float] = {}
        for result in measured["results"]:
            ms[result["name"]] = ms.get(result["name"], 0.0) + result["ms"]
        fastest = min(ms[name] for name in ms if not needs_a_compiler(name.split()[0]))
        assert ms[select.RULES[key].order[0]] <= NOISE * fastest, measured["shape"]


def test_auto_runs_here() -> None:
    assert select.select("auto").name == select.resolve("auto") in runnable_here()
    assert select.select("auto", "cpu", torch.float64).name == "torch_scan"
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
