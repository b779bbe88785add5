"""Tests kernels/select.py: the selection by name, the rules of `auto`, and the errors for names and devices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from stubs import stub

from kernels import registry, select
from kernels.bench.results import committed_reports, read
from kernels.machine import triton
from kernels.machine.hardware import ROOT
from kernels.registry import KernelUnavailable, UnknownKernel
from kernels.wkv4 import WKV4, cases

Fake = Callable[[tuple[int, int]], None]
NOISE = 1.1              # kernels whose times differ by at most this factor count as equally fast
TOO_OLD = "Triton requires a GPU of compute capability 8.0 or newer, but this GPU has 7.5"
WKV_RULES = {key: rule for key, rule in select.RULES.items() if key[0] == "wkv4"}


@pytest.fixture
def with_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets select find the stubs of a test."""
    monkeypatch.setattr(select, "names", lambda operator: registry.names(operator))


def runnable_here() -> list[str]:
    return [name for name in select.selectable("wkv4") if registry.why_not(select.folder("wkv4", name), name) is None]


def test_every_name_is_selectable_once() -> None:
    names = select.selectable("wkv4")
    assert len(names) == len(set(names))
    assert set(names) == {*registry.names("timex"), *registry.names("wkv4")} - {"timex", "fft"}
    assert select.AUTO not in names
    assert set(select.selectable("softmax")) == set(registry.names("softmax"))


@pytest.mark.parametrize("name", ["conv1d", "torch_scan"])
def test_a_selected_kernel_is_that_kernel(name: str) -> None:
    wkv = select.select("wkv4", name)
    assert isinstance(wkv, WKV4)
    assert wkv.name == name
    inputs = cases.inputs(2, 9, 3)
    torch.testing.assert_close(wkv(*inputs)[0], WKV4("reference")(*inputs)[0])


def test_a_convolution_that_is_unsound_in_a_quotient_is_refused(with_stubs: None) -> None:
    with pytest.raises(UnknownKernel):
        select.select("wkv4", "fft")
    with stub(wkv=False) as name:
        assert name not in select.selectable("wkv4")


def test_auto_selects_the_first_kernel_that_runs_and_says_why(without_gpu: None) -> None:
    """Without a GPU `auto` selects the last kernel of the order. float16 follows the rule of bfloat16."""
    (first, *_, last), measured, _ = select.RULES["wkv4", "cuda", "bfloat16"]
    away = registry.why_not("wkv4", first, "cuda")
    assert measured
    assert select.why_auto("wkv4", "cuda", torch.float16) == f"{last} (chosen by auto: {away})"


@pytest.mark.parametrize(("heads", "steps", "first"), [
    (96, 4096, "triton_v1"), (96, 1024, "triton_v1"), (12, 128, "triton_v1"), (1, 1, "triton_v1"), (160, 2048, "triton_v1"),
    (256, 4096, "cuda_v2"), (512, 4096, "cuda_v2"), (10_000, 8192, "cuda_v2")])
def test_auto_of_wkv7_follows_the_nearest_measured_size(heads: int, steps: int, first: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule depends on the size only for bfloat16 on a GPU, and its line names the measurement."""
    pytest.importorskip("triton")
    monkeypatch.setattr(select, "why_not", lambda *args: None)
    size = select.Size(heads, steps)
    assert select.resolve("wkv7", "auto", "cuda", torch.bfloat16, size) == first
    line = select.why_auto("wkv7", "cuda", torch.bfloat16, size)
    assert line.startswith(f"{first} (chosen by auto: {select.H200}wkv7-cuda-bfloat16.json, with ")
    assert select.resolve("wkv7", "auto", "cuda", torch.float32, size) == "cuda_v3"
    assert select.resolve("wkv7", "auto", "cuda", torch.float16, size) == "cuda_v3"
    assert select.resolve("wkv7", "auto", "cpu", torch.bfloat16, size) == "c_v0"


def test_auto_of_wkv7_skips_a_kernel_that_does_not_support_the_head_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(select, "why_not", lambda *args: None)
    size = select.Size(96, 1024, 512)
    assert select.resolve("wkv7", "auto", "cuda", torch.bfloat16, size) == "cuda_v3"
    assert select.why_auto("wkv7", "cuda", torch.bfloat16, size) == (
        "cuda_v3 (chosen by auto: triton_v1 supports heads of up to 256 channels)")


@pytest.fixture
def gpu_with_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    """Lets torch report a GPU of this capability, on a machine with gcc and Python's headers."""
    pytest.importorskip("triton")

    def fake(capability: tuple[int, int]) -> None:
        registry.why_not.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    monkeypatch.setattr(triton, "COMPILERS", ("python3", "python"))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(triton, "_headers", lambda: str(tmp_path))
    yield fake
    registry.why_not.cache_clear()


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), TOO_OLD), ((8, 0), None), ((12, 0), None)])
@pytest.mark.parametrize(("op", "name"), [("wkv7", "triton_v1"), ("wkv4", "triton_scan"), ("draw", "triton_v0")])
def test_triton_is_refused_on_gpus_before_ampere(op: str, name: str, capability: tuple[int, int], reason: str | None,
                                                 gpu_with_triton: Fake) -> None:
    gpu_with_triton(capability)
    assert registry.why_not(op, name, "cuda") == (reason and f"{name} cannot run: {reason}")
    assert triton.why_not(torch.device("cuda")) == reason


def test_triton_requires_a_compiler_and_pythons_headers(gpu_with_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_with_triton((9, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton, "COMPILERS", ("no-such-compiler",))
    assert "no no-such-compiler" in str(triton.why_not())
    monkeypatch.setenv("CC", "cc")
    assert triton.why_not() is None
    monkeypatch.setattr(triton, "_headers", lambda: "/nowhere")
    assert "Python.h" in str(triton.why_not())


def test_auto_names_a_measurement_that_is_committed() -> None:
    for key, rule in select.RULES.items():
        if rule.source:
            _, _, named = rule.source.rpartition(" ")
            (report,) = read([ROOT / named])
            assert (report["op"], report["device"], report["dtype"]) == key
            assert report["machine"]["gpu"].split(" 80GB")[0] in rule.source


def needs_a_compiler(name: str, operator: str = "wkv4") -> bool:
    try:
        return registry.load(select.folder(operator, name), name).REQUIRES.compiled
    except KernelUnavailable:
        return False


@pytest.mark.parametrize("rule", WKV_RULES.values(), ids=map(str, WKV_RULES))
def test_every_rule_ends_with_a_kernel_that_runs_everywhere_and_needs_no_compiler(rule: select.Rule) -> None:
    requires = registry.load("wkv4", rule.order[-1]).REQUIRES
    assert (requires.packages, set(requires.devices)) == ((), {"cpu", "cuda"})
    assert set(rule.order) <= set(select.selectable("wkv4")), "a rule names a kernel that there is no file for"
    assert not [*filter(needs_a_compiler, rule.order)]
    assert needs_a_compiler("torch_compile_scan")


@pytest.mark.parametrize("key", [key for key in select.RULES if key[0] in ("wkv4", "wkv7")], ids=str)
def test_the_rule_agrees_with_the_committed_results(key: tuple[str, str, str]) -> None:
    """At every measured shape the first kernel of the order is the fastest or within NOISE of it, both passes together.

    Older reports without this kernel do not count, and neither do kernels that need a C++ compiler, because `auto` must work on
    machines without one.
    """
    operator = key[0]
    reports = [report for report in read(committed_reports())
               if (report["op"], report["device"], report["dtype"]) == key
               and any(result["name"].split()[0] == select.RULES[key].order[0]
                       for shape in report["shapes"] for result in shape["results"])]
    assert select.RULES[key].measured == bool(reports)
    for measured in (measured for report in reports for measured in report["shapes"]):
        ms: dict[str, float] = {}
        for result in measured["results"]:
            name = result["name"].split()[0]             # "(prototype)" may follow the name
            ms[name] = ms.get(name, 0.0) + result["ms"]
        fastest = min(ms[name] for name in ms if not needs_a_compiler(name, operator))
        sizes = measured["shape"]
        size = select.Size(sizes["B"] * sizes["H"], sizes["T"]) if operator == "wkv7" else None
        assert ms[select.rule(*key, size).order[0]] <= NOISE * fastest, sizes


def test_the_rules_by_size_have_every_measured_size() -> None:
    for (op, device, dtype), orders in select.BY_SIZE.items():
        shapes = [measured["shape"] for report in read(committed_reports())
                  if (report["op"], report["device"], report["dtype"]) == (op, device, dtype) for measured in report["shapes"]]
        assert set(orders) == {select.Size(sizes["B"] * sizes["H"], sizes["T"]) for sizes in shapes}


def test_auto_chooses_a_kernel_that_runs_on_this_machine() -> None:
    assert select.select("wkv4", "auto").name == select.resolve("wkv4", "auto") in runnable_here()
    assert select.select("wkv4", "auto", "cpu", torch.float64).name == "torch_scan"
    assert select.resolve("wkv4", "formula") == "formula"
    assert select.why_auto("wkv4").startswith(f"{select.resolve('wkv4', 'auto')} (chosen by auto")


@pytest.mark.parametrize("name", ["nonsense", "timex", "torch_native"])
def test_an_unknown_kernel_lists_those_that_run_here(name: str) -> None:
    """`timex` is the file of the convolution form, and torch_native is a softmax, so WKV4 accepts neither."""
    with pytest.raises(UnknownKernel) as error:
        select.select("wkv4", name)
    assert str(error.value).split(": ")[1].split(", ") == ["auto", *runnable_here()]


@pytest.mark.parametrize("operator", ["softmax", "timex"])
def test_auto_is_unknown_without_a_rule(operator: str) -> None:
    with pytest.raises(UnknownKernel):
        select.select(operator, "auto")


def test_a_kernel_that_cannot_run_lists_those_that_do(with_stubs: None) -> None:
    with stub(devices=("cuda",)) as name, pytest.raises(KernelUnavailable) as error:
        select.select("wkv4", name, "cpu")
    assert error.value.reason == f"{name} runs on cuda, not on cpu"
    assert str(error.value) == f"{error.value.reason}. These kernels run on cpu: auto, {', '.join(runnable_here())}"


@pytest.mark.parametrize("name", ["auto", "conv1d", "torch_scan"])
def test_a_missing_gpu_is_reported_in_one_sentence(without_gpu: None, name: str) -> None:
    with pytest.raises(KernelUnavailable) as error:
        select.select("wkv4", name, "cuda")
    assert str(error.value) == error.value.reason
    assert "\n" not in error.value.reason
