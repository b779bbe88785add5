"""kernels/select.py: names to operators, the rule of `auto`, and the errors for names and devices."""

import pytest
import torch
from stubs import stub

from kernels import registry, select
from kernels.bench.results import committed, read
from kernels.registry import KernelUnavailable, UnknownKernel
from kernels.wkv4 import WKV4, cases

NOISE = 1.1              # two kernels this close to each other are equally fast
WKV_RULES = {key: rule for key, rule in select.RULES.items() if key[0] == "wkv4"}


@pytest.fixture
def with_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """select finds stubs made in the test."""
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


def test_auto_takes_the_first_that_runs_and_says_what_is_away_and_not_measured(without_gpu: None) -> None:
    """Here nothing does, and it is the last. float16 has bfloat16's rule."""
    first, *_, last = select.RULES["wkv4", "cuda", "bfloat16"].order
    away = registry.why_not("wkv4", first, "cuda")
    assert select.why_auto("wkv4", "cuda", torch.float16) == f"{last} (chosen by auto: {away}; not measured on cuda yet)"


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
    """At every measured shape the first of the order, both passes together, is the fastest or within NOISE of it.

    Reports without it, of before it was written, do not count. Compared with kernels that need no C++ compiler:
    auto is for machines without one.
    """
    operator = key[0]
    reports = [report for report in read(committed())
               if (report["op"], report["device"], report["dtype"]) == key
               and select.RULES[key].order[0] in [result["name"] for shape in report["shapes"] for result in shape["results"]]]
    assert select.RULES[key].measured == bool(reports)
    for measured in (measured for report in reports for measured in report["shapes"]):
        ms: dict[str, float] = {}
        for result in measured["results"]:
            ms[result["name"]] = ms.get(result["name"], 0.0) + result["ms"]
        fastest = min(ms[name] for name in ms if not needs_a_compiler(name.split()[0], operator))
        assert ms[select.RULES[key].order[0]] <= NOISE * fastest, measured["shape"]


def test_auto_runs_here() -> None:
    assert select.select("wkv4", "auto").name == select.resolve("wkv4", "auto") in runnable_here()
    assert select.select("wkv4", "auto", "cpu", torch.float64).name == "torch_scan"
    assert select.resolve("wkv4", "formula") == "formula"
    assert select.why_auto("wkv4").startswith(f"{select.resolve('wkv4', 'auto')} (chosen by auto")


@pytest.mark.parametrize("name", ["nonsense", "timex", "torch_native"])
def test_an_unknown_kernel_lists_those_that_run_here(name: str) -> None:
    """`timex` is the file of the convolution form, torch_native a softmax."""
    with pytest.raises(UnknownKernel) as error:
        select.select("wkv4", name)
    assert str(error.value).split(": ")[1].split(", ") == ["auto", *runnable_here()]


@pytest.mark.parametrize("operator", ["softmax", "timex"])
def test_auto_is_unknown_where_there_is_no_rule(operator: str) -> None:
    with pytest.raises(UnknownKernel):
        select.select(operator, "auto")


def test_a_kernel_that_cannot_run_lists_those_that_do(with_stubs: None) -> None:
    with stub(devices=("cuda",)) as name, pytest.raises(KernelUnavailable) as error:
        select.select("wkv4", name, "cpu")
    assert error.value.reason == f"{name} runs on cuda, not on cpu"
    assert str(error.value) == f"{error.value.reason}; on cpu there are: auto, {', '.join(runnable_here())}"


@pytest.mark.parametrize("name", ["auto", "conv1d", "torch_scan"])
def test_a_missing_gpu_is_one_sentence(without_gpu: None, name: str) -> None:
    with pytest.raises(KernelUnavailable) as error:
        select.select("wkv4", name, "cuda")
    assert str(error.value) == error.value.reason
    assert "\n" not in error.value.reason
