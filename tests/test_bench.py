"""The programs beside the kernels: benchmark, listing, tables, figures, verdicts, the check of a GPU; and adding a kernel."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stubs import stub

from kernels import __main__ as listing
from kernels import _launches, _machine, _memory, _subjects, _timing, bench, gpu_check, plot, registry, tables, verdicts
from kernels.compare import err_ratio, misses
from kernels.timex import TimeX, conv1d, formula
from kernels.timex import cases as timex_cases
from kernels.wkv import reference
from kernels.wkv.subject import Subject as WKVSubject


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timing, "MAX_ROUNDS", 2)
    monkeypatch.setattr(_machine, "MATMUL_N", {"cpu": 64})
    monkeypatch.setattr(_machine, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(bench, "keep_large_blocks", lambda: True)      # it holds for the rest of the process


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, dict]:
    """Exit status, what was printed, and the last line as data."""
    code = bench.main(list(args))
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(("op", "names"), [("timex", ["conv1d", "formula"]),
                                           ("wkv", ["conv1d in one block", "formula", "reference"])])
def test_a_benchmark_prints_a_table_and_ends_in_json(op: str, names: list[str], capsys: pytest.CaptureFixture[str],
                                                     tmp_path: Path) -> None:
    file = tmp_path / "new" / "result.json"
    code, out, report = run(capsys, op, "--shape", "2,9,16", "3,1,5", "--only", ",".join(names), "--json", str(file))
    assert code == 0
    assert json.loads(file.read_text()) == report
    assert [measured["shape"] for measured in report["shapes"]] == [{"B": 2, "C": 9, "T": 16}, {"B": 3, "C": 1, "T": 5}]
    for measured in report["shapes"]:
        assert list(dict.fromkeys(result["name"] for result in measured["results"])) == names
        assert all(result["ms"] > 0 and result["err_ratio"] <= 1e-5 for result in measured["results"])
        assert [result["vs_baseline"] for result in measured["results"][:2]] == [1.0, 1.0]
        assert measured["limits"]["matmul_gflops"] > 0
        for result in measured["results"]:
            assert result["copies"] * measured["limits"]["copy_one_ms"] == pytest.approx(result["ms"])
    assert max(map(len, out.splitlines()[:-1])) <= 128
    assert {"cpu", "threads", "torch", "python", "commit", "date"} <= set(report["machine"])
    assert (report["dtype"], report["malloc"], report["sweep"]) == ("float32", "tuned", [])


@pytest.mark.parametrize("op", ["timex", "wkv"])
def test_a_sweep_in_half_precision_with_the_allocator_as_it_comes(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, report = run(capsys, op, "--shape", "2,9,16", "--sweep", "8,16,24", "--only", "conv1d", "--dtype", "bfloat16",
                            "--malloc", "default")
    assert code == 0
    assert (report["dtype"], report["malloc"]) == ("bfloat16", "default")
    assert [measured["shape"]["T"] for measured in report["sweep"]] == [8, 24], "16 is measured already"
    assert all(1e-4 < result["err_ratio"] < 2e-2 for measured in report["sweep"] for result in measured["results"])
    assert f"{op} B=2 C=9 T=24 bfloat16 on cpu, malloc default" in out


def test_backward_is_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("forward")
        return reference.forward(*inputs)

    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("backward")
        return reference.backward(*inputs)

    with stub("wkv", forward, backward) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.select.names", registry.names)
        first, second = WKVSubject(2, 3, 5, "cpu").passes(name)
        for part in (first, second, second):
            part.run()
    assert calls[1:] == ["forward", "backward", "backward"], "the first forward pass makes the graph that is kept"
    assert (first.bytes, second.bytes) == (3 * 4 * 2 * 3 * 5, 5 * 4 * 2 * 3 * 5)


def test_extra_memory_is_the_peak_less_what_is_returned() -> None:
    x = torch.zeros(1000, 100)

    def three_at_once() -> torch.Tensor:
        a = x.clone()
        b = a.clone()
        del a
        return b.clone()                     # beside b; a is gone

    assert _memory.extra_bytes(x.clone, "cpu") == 0
    assert _memory.extra_bytes(lambda: (x.clone(), x.clone()), "cpu") == 0
    assert _memory.extra_bytes(lambda: x[0], "cpu") == 0
    assert _memory.extra_bytes(three_at_once, "cpu") == x.nbytes


def test_what_a_forward_pass_saves_is_extra_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """conv1d pads k to 2T - 1 in both passes; the reference's backward pass keeps the states of every step."""
    _, _, report = run(capsys, "wkv", "--shape", "4,32,64", "4,32,128", "--only", "reference")
    at = [{result["pass"]: result["extra_mb"] for result in measured["results"] if result["name"] == "reference"}
          for measured in report["shapes"]]
    states = 3 * 4 * 4 * 32 * 64 / 1e6
    assert states < at[0]["backward"] < 1.5 * states
    assert 2 * states < at[1]["backward"] < 3 * states
    assert at[0]["forward"] < 0.1 * states


def test_launches_are_the_operators_that_compute() -> None:
    """A view, an allocation, and a copy that is none compute nothing; an operator of ours is what it calls, or one."""
    w, k = timex_cases.inputs(2, 3, 16)
    assert _launches.launches(lambda: (w.t().contiguous() + 1).exp(), "cpu") == 3
    assert _launches.launches(lambda: torch.zeros(3, 4).view(4, 3).contiguous(), "cpu") == 1
    with stub(forward=lambda w, k, eps: k.new_empty(k.shape)) as name:
        assert _launches.launches(lambda: TimeX(name)(w, k), "cpu") == 1
    assert _launches.launches(lambda: TimeX("conv1d")(w, k), "cpu") > 1


def test_flop_and_traffic_are_those_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, report = run(capsys, "timex", "--shape", "2,3,16", "--only", "conv1d")
    forward, backward = report["shapes"][0]["results"][:2]
    assert forward["gflops"] * forward["ms"] * 1e6 == pytest.approx(2 * 3 * 16 * 17)
    assert backward["gflops"] * backward["ms"] * 1e6 == pytest.approx(2 * 2 * 3 * 16 * 17)
    assert forward["gbs"] * forward["ms"] * 1e6 == pytest.approx(4 * (3 * 16 + 2 * 2 * 3 * 16))
    assert backward["gbs"] * backward["ms"] * 1e6 == pytest.approx(4 * (2 * 3 * 16 + 3 * 2 * 3 * 16))


def wrong_in_the_last_channel(w: torch.Tensor, k: torch.Tensor, eps: float) -> torch.Tensor:
    out = formula.forward(w, k, eps)
    out[-1, -1, -1] += 1e-2
    return out


def test_what_is_wrong_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with stub("timex", wrong_in_the_last_channel, formula.backward) as name:
        code, out, report = run(capsys, "timex", "--shape", "2,20,16", "--only", name)
    measured = report["shapes"][0]
    assert code == 1
    assert list(measured["wrong"]) == [name]
    assert "out is off by" in measured["wrong"][name]
    assert {result["name"] for result in measured["results"]} == {"conv1d"}
    assert f"WRONG, not timed: {name}: out is off by" in out


def test_a_kernel_that_raises_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(w: torch.Tensor, k: torch.Tensor, eps: float) -> torch.Tensor:
        raise ZeroDivisionError("two\nlines")

    with stub("timex", forward, formula.backward) as name:
        code, _, report = run(capsys, "timex", "--shape", "2,3,16", "--only", name)
    assert code == 1
    assert report["shapes"][0]["wrong"] == {name: "ZeroDivisionError: two lines"}


def test_a_wrong_wkv_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad * 1.001 for grad in reference.backward(*inputs))

    with stub("wkv", reference.forward, backward) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.select.names", registry.names)
        patch.setattr("kernels.wkv.subject.selectable", lambda: [name])
        code, _, report = run(capsys, "wkv", "--shape", "2,9,16")
    assert code == 1
    assert "grad k is off by 1.0e-03" in report["shapes"][0]["wrong"][name]


def test_what_cannot_run_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(devices=("cuda",)) as name:
        code, out, report = run(capsys, "timex", "--shape", "2,3,16", "--only", name)
    assert code == 0
    assert report["shapes"][0]["skipped"] == {name: f"{name} runs on cuda, not on cpu"}
    assert f"not measured: {name} runs on cuda, not on cpu" in out
    assert bench._grouped({"a": "a is away", "b": "b is slow", "c": "c is away"}) == ["a, c: is away", "b is slow"]


def test_what_takes_too_long_is_measured_only_when_named(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "LONGEST_S", 0)
    monkeypatch.setattr(registry, "names", lambda op: ("conv1d", "formula"))
    _, _, report = run(capsys, "timex", "--shape", "2,3,16")
    assert report["shapes"][0]["skipped"]["formula"] == (
        "formula takes over 0 s forward and backward at this shape; --only 'formula' measures it")
    _, _, report = run(capsys, "timex", "--shape", "2,3,16", "--only", "formula")
    assert {result["name"] for result in report["shapes"][0]["results"]} == {"formula"}, "the baseline is slow too"


def test_the_time_of_one_block_is_foretold_by_the_square_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timing, "seconds", lambda function, device, repeats=1: 1.0)
    subject = WKVSubject(1, 3, 50, "cpu")
    assert (subject.foretold("conv1d").seconds, subject.foretold(subject.baseline).seconds) == (8.0, 64.0)
    assert bench._too_much(_subjects.Costs(1.0, 3e9), 2) == "2 GB beside inputs and outputs"
    assert bench._too_much(_subjects.Costs(7.0, 3e9), 2) == "6 s forward and backward"
    assert bench._too_much(_subjects.Costs(1.0, 1e9), 2) is None


def test_a_gradient_with_a_function_of_its_own_is_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with stub("timex", conv1d.forward, conv1d.backward, T_multiple=4) as name:
        vars(registry.load("timex", name))["grad_w"] = conv1d.grad_w
        _, _, report = run(capsys, "timex", "--shape", "2,3,15", "--only", name)
    passes = [result["pass"] for result in report["shapes"][0]["results"] if result["name"] == name]
    assert passes == ["forward", "backward", "grad_w"]


@pytest.mark.parametrize(("args", "sentence"), [
    (["timex", "--shape", "2,3"], "--shape of timex is B,C,T, got 2,3"), (["convolution"], "invalid choice: 'convolution'"),
    (["timex", "--dtype", "uint8"], "--dtype of timex is float32 or bfloat16, got uint8"),
    (["timex", "--only", "nonsense"], "unknown timex implementation 'nonsense'"),
    (["timex", "--shape", "2,0,3"], "invalid _sizes value"),
    (["wkv", "--only", "fft"], "unknown wkv implementation 'fft'"), (["timex", "--sweep", "8,0"], "invalid _sizes value"),
])
def test_wrong_arguments_are_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        bench.main(args)
    assert status.value.code == 2
    assert sentence in capsys.readouterr().err


def test_err_ratio() -> None:
    ones = torch.ones(2, 2)
    assert err_ratio(1.5 * ones, ones) == 0.5
    assert err_ratio(ones[:0], ones[:0]) == 0.0
    assert err_ratio(0 * ones, 0 * ones) == 0.0
    assert err_ratio(ones, 0 * ones) == float("inf")
    assert err_ratio(ones * float("nan"), ones) == float("inf")
    with pytest.raises(ValueError, match="one shape"):
        err_ratio(ones, ones[0])
    assert misses({"out": float("nan")}, {"out": 1.0})


def test_everyone_gets_a_sample_and_the_slow_no_more_than_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timing, "MAX_ROUNDS", 5)
    monkeypatch.setattr(_timing, "seconds", lambda function, device, repeats=1: function())
    samples = _timing.interleaved({"slow": lambda: 10.0, "middle": lambda: 0.5, "fast": lambda: 0.01}, "cpu", budget_s=1.0)
    assert {key: len(taken) for key, taken in samples.items()} == {"slow": 1, "middle": 2, "fast": 5}


def test_the_listing_names_everything_and_fits_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main()
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for op in registry.operators() for name in registry.names(op))
    assert max(map(len, out.splitlines())) < 128
    assert "F.conv1d with one group per channel" in out


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
def test_a_listing_that_nobody_reads_to_its_end_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-m", "kernels"], cwd=tables.ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()           # before it has written anything
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_listing_says_why_not_here() -> None:
    with stub(packages=("no_such_package",)) as name:
        assert listing.here("timex", name, ["cpu"]) == "no"
        reason = registry.why_not("timex", name)
    assert "needs the package no_such_package" in reason


def test_every_implementation_has_an_idea() -> None:
    """Of its own, though a rung's idea may be the same in each back end."""
    ideas = {(op, name): listing.idea(op, name) for op in registry.operators() for name in registry.names(op)}
    assert all(10 < len(idea) < 200 and idea.endswith(".") for idea in ideas.values()), ideas
    said = {(op, name.partition("_")[0], idea) for (op, name), idea in ideas.items()}
    assert len(said) == len(ideas), "two implementations of one back end say the same of themselves"


def test_tables_rewrite_what_is_between_the_markers(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, report = run(capsys, "timex", "--shape", "2,3,16", "--only", "conv1d,formula")
    text = "before\n<!-- timex: measured -->\nold\n<!-- end of timex: measured -->\nafter\n"
    once = tables.rewritten(text, [report])
    assert once.startswith("before\n<!-- timex: measured -->\n")
    assert once.endswith("<!-- end of timex: measured -->\nafter\n")
    assert "old" not in once
    assert "| conv1d | " in once
    assert "B = 2, C = 3, T = 16. In the same run: matrix product" in once
    assert tables.rewritten(once, [report]) == once
    assert tables.rewritten("no markers\n", [report]) == "no markers\n"


@pytest.mark.parametrize("op", registry.operators())
def test_the_readmes_have_a_place_for_their_numbers(op: str) -> None:
    text = (tables.ROOT / "kernels" / op / "README.md").read_text(encoding="utf-8")
    assert text.count(f"<!-- {op}: measured -->") == text.count(f"<!-- end of {op}: measured -->") == 1


def test_tables_without_results_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parity.json").write_text("[]")
    assert tables.main([str(tmp_path / "parity.json")]) == 1
    assert "no results" in capsys.readouterr().err


def result(name: str, part: str, ms: float, **more: float) -> dict:
    """A row of a report, of which a copy of one tensor takes 1 ms."""
    return {"name": name, "pass": part, "ms": ms, "gflops": None, "of_matmul": None, "gbs": 10.0, "of_copy": 0.5, "copies": ms,
            "vs_baseline": None, "launches": None, "extra_mb": 0.0, "err_ratio": 0.0, **more}


def report_of(op: str, device: str, *shapes: tuple[tuple[int, ...], list[dict]], axes: Sequence[str] = "BCT") -> dict:
    machine = {"cpu": "a CPU", "threads": 2, "torch": "2", "commit": "abc", "date": "2026-01-01T00"}
    return {"op": op, "device": device, "dtype": "float32", "malloc": "tuned", "sweep": [],
            "machine": machine | ({"gpu": "NVIDIA H200"} if device == "cuda" else {}),
            "shapes": [{"shape": dict(zip(axes, shape, strict=True)), "baseline": results[0]["name"],
                        "skipped": {}, "wrong": {},
                        "limits": {"matmul_gflops": 5e4, "copy_gbs": 20.0, "copy_one_ms": 1.0}, "results": results}
                       for shape, results in shapes]}


def scan(name: str, forward: float, backward: float, **more: float) -> list[dict]:
    return [result(name, "forward", forward, **more), result(name, "backward", backward, **more)]


def test_tables_show_every_machine_and_what_more_steps_cost() -> None:
    short, long = scan("taichi_scan", 6, 12, extra_mb=3.0), scan("taichi_scan", 48, 97.2, extra_mb=24.0)
    reports = [report_of("wkv", "cpu", ((8, 768, 1024), short), ((8, 768, 8192), long)),        # the same B and C: compared
               report_of("wkv", "cuda", ((8, 768, 1024), short))]
    text = tables.rewritten("<!-- wkv: measured -->\n<!-- end of wkv: measured -->\n", reports)
    assert text.index("a CPU, 2 threads, malloc tuned; torch 2;") < text.index("NVIDIA H200; torch 2;")
    assert "| taichi_scan | 6 | 12 | 6.0, 12 | 3.0, 3.0 |" in text
    reports[0]["shapes"][1]["skipped"] = {"conv1d": "conv1d takes over 6 s", "cuda_v0": "cuda_v0 runs on cuda, not on cpu"}
    assert "Not measured, for the time or the memory that it takes at this shape: conv1d." in tables.section(reports[0])
    assert "From T = 1024 to T = 8192, 8 times the steps" in text
    assert "| taichi_scan | x 8.0 | x 8.1 | 3.0 to 24 | 3.0 to 24 |" in text
    half = copy.deepcopy(reports[0]) | {"dtype": "bfloat16"}
    assert [len(report["shapes"]) for report in tables.front([*reports, half])] == [1, 1]


def test_verdicts_on_a_cpu() -> None:
    rows = [*scan("taichi_scan", 5, 17), *scan("torch_scan", 50, 100), *scan("conv1d in one block", 240, 900)]
    longer = [*scan("taichi_scan", 40, 140), *scan("torch_scan", 400, 800, extra_mb=1.0)]
    found = verdicts.verdicts([report_of("wkv", "cpu", ((8, 768, 1024), rows), ((8, 768, 8192), longer))])
    assert {one.what for one in found if not one.ok} == {
        "taichi_scan / copy of one tensor, backward", "torch_scan / conv1d in one block, forward",
        "taichi_scan, time at T=8192 / T=1024, backward, cpu", "torch_scan, extra MB at T=8192, forward, cpu",
        "torch_scan, extra MB at T=8192, backward, cpu"}
    assert {one.what for one in found if one.ok} >= {
        "taichi_scan / copy of one tensor, forward", "torch_scan, time at T=8192 / T=1024, backward, cpu"}
    assert "6 of 11 as asked" in verdicts.text(found)


def test_verdicts_on_a_gpu() -> None:
    timex = [*scan("taichi_v3", 0.5, 1.2), *scan("cuda_v3", 0.5, 1.0), *scan("cuda_v4", 0.2, 1.0), *scan("fft", 0.1, 0.1)]
    wkv = [*scan("cuda_scan", 1, 1), *scan("reference", 1, 1)]
    reports = [report_of("timex", "cuda", ((32, 768, 768), timex)), report_of("wkv", "cuda", ((32, 768, 768), wkv))]
    found = {one.what: (one.found, one.limit, one.ok) for one in verdicts.verdicts(reports, peer_ms=(0.6, 0.9))}
    flop = 32 * 768 * 768 * 769
    assert found == {
        "taichi_v3 / cuda_v3, forward": (1.0, 1.1, True), "taichi_v3 / cuda_v3, backward": (1.2, 1.1, False),
        "ms of cuda_v4, the best TimeX forward; measured FMA floor": (0.2, pytest.approx(flop / 5e13 * 1e3), True),
        "ms of cuda_v4, the best TimeX forward; nominal FMA floor": (0.2, pytest.approx(0.2166, abs=1e-4), True),
        "ms of cuda_v3, forward; the peer's": (0.5, 0.6, True), "ms of cuda_v3, backward; the peer's": (1.0, 0.9, False),
        "cuda_scan / memory floor, forward": (2.0, 1.5, False), "cuda_scan / memory floor, backward": (2.0, 2.0, True)}


def softmax_report(device: str, ours: float) -> dict:
    rows = [*scan("torch_own", 10, 20, launches=1), *scan("torch_compile", 1, 2, launches=1),
            *scan("formula", 1, 2, launches=5), *scan("cuda_v0", ours, 2 * ours, vs_baseline=0.9, launches=1),
            *scan("taichi_v0", 2 * ours, 4 * ours, launches=1)]
    smaller = scan("torch_own", 1, 2, launches=1)
    return report_of("softmax", device, ((4096, 4096), rows), ((4096, 128), smaller), axes=("rows", "columns"))


def test_verdicts_on_softmax() -> None:
    """The best of ours beside torch's own, not beside what torch compiles; on a GPU beside the copy limit too."""
    on_cpu, on_gpu = (verdicts.verdicts([softmax_report(device, 12)]) for device in ("cpu", "cuda"))
    assert [(one.what, one.found, one.limit) for one in on_cpu] == [
        ("softmax: cuda_v0 / torch_own, forward, cpu", 1.2, 1.1), ("softmax: cuda_v0 / torch_own, backward, cpu", 1.2, 1.1)]
    assert [(one.found, one.limit) for one in on_gpu] == [(1.2, 1.1), (2.0, 1.3)] * 2
    assert all(one.ok for one in verdicts.verdicts([softmax_report("cpu", 11)]))


def test_verdicts_on_pad() -> None:
    rows = [result("torch_index", "forward", 30), result("taichi_v0", "forward", 2)]
    found = verdicts.verdicts([report_of("pad", "cpu", ((32, 48), rows), axes="HW")])
    assert [(one.what, one.found, one.ok) for one in found] == [
        ("pad: taichi_v0 / torch_index", 2 / 30, False), ("pad: taichi_v0 / copy of the output", 2, True)]


def test_an_operator_without_products_has_a_table_and_a_figure_of_its_bandwidth(tmp_path: Path) -> None:
    report = softmax_report("cpu", 11)
    text = tables.rewritten("<!-- softmax: measured -->\n<!-- end of softmax: measured -->\n", [report])
    assert "| | forward | backward | launches | extra MB |" in text.replace("|  |", "| |")
    assert "| torch_own | 10 (10 GB/s, 50%) | 20 (10 GB/s, 50%) | 1, 1 | 0.0, 0.0 |" in text
    assert "| cuda_v0 | 11 (10 GB/s, 50%, 0.9x) | 22 (10 GB/s, 50%, 0.9x) | 1, 1 | 0.0, 0.0 |" in text
    assert "rows = 4096, columns = 4096. In the same run:" in text
    assert [file.name for file in plot.draw(tmp_path, [report])] == ["softmax-cpu-time.png"]
    forward, _ = plot.time_against_size(report).axes
    assert forward.get_xlabel() == "columns"
    assert [line.get_label() for line in forward.lines][:1] == ["memory floor"]


def test_figures_from_a_report(tmp_path: Path) -> None:
    rungs = [row for index in range(4) for row in scan(f"taichi_v{index}", 400 - 90 * index, 900 - 150 * index)]
    report = report_of("timex", "cpu", *(((32, 768, T), [*scan("conv1d", T / 4, T / 2), *rungs]) for T in (128, 768)))
    files = plot.draw(tmp_path / "new", [report])
    assert [file.name for file in files] == ["timex-cpu-time.png", "timex-cpu-ladder.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000 for file in files)
    forward, _ = plot.time_against_size(report).axes
    assert {text.get_text() for text in forward.texts} == {"conv1d", "taichi_v0", "taichi_v1", "taichi_v2", "taichi_v3"}
    assert {line.get_label() for line in forward.lines} >= {"memory floor", "FMA floor"}
    assert "CUDA C++: not measured here" in [text.get_text() for text in plot.ladder(report).axes[0].get_legend().get_texts()]


@pytest.mark.parametrize("op", ["timex", "wkv"])
def test_a_figure_is_drawn_over_a_sweep(op: str, tmp_path: Path) -> None:
    T, folder = {"timex": 2048, "wkv": 512}[op], str(tmp_path)
    assert (8, 768, T) in bench._arguments([op, "--plot", folder]).sweep
    assert bench._arguments([op, "--plot", folder, "--shape", "1,2,3", "--sweep", "4,5"]).sweep == [(1, 2, 4), (1, 2, 5)]
    assert bench._arguments([op]).sweep == []


def test_a_figure_that_cannot_be_drawn_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.draw(tmp_path, [report_of("timex", "cpu", ((8, 768, 1024), scan("conv1d", 1, 2)))]) == []
    assert capsys.readouterr().err == (
        "timex-cpu: no time figure, because fewer than two sizes were measured (--sweep)\n"
        "timex-cpu: no ladder figure, because B=32 C=768 T=768 was not measured\n")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["timex", "--plot", str(tmp_path)])
    assert "matplotlib, which is not installed (pip install matplotlib)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_a_sentence_before_anything_is_measured(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = str(tmp_path / "file" / "figures")
    assert plot.main([folder]) == 1
    error = capsys.readouterr().err
    assert folder in error
    assert error.count("\n") == 1
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit):
        bench.main(["timex", "--plot", folder])
    assert folder in capsys.readouterr().err


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15).map(sorted))
def test_names_beside_curves_do_not_overlap(heights: list[float]) -> None:
    apart = plot.spread(heights, 0.05)
    assert all(above - below >= 0.05 - 1e-9 for below, above in pairwise(apart))
    assert sum(apart) == pytest.approx(sum(heights), abs=1e-6)
    assert plot.spread([0.0, 1.0], 0.05) == [0.0, 1.0]


def part(name: str, code: str, limit_s: float = 60) -> gpu_check.Part:
    return gpu_check.Part(name, [sys.executable, "-c", code], limit_s)


def test_gpu_check_collects_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    some = [part("good", "print('fine')"), part("bad", "print(1); raise SystemExit(3)"),
            part("slow", "import time; time.sleep(60)", 1)]
    monkeypatch.setattr(gpu_check, "parts", lambda *args: iter(some))
    out = tmp_path / "out"
    out.mkdir()
    report = report_of("timex", "cuda", ((32, 768, 768), scan("cuda_v3", 0.5, 1.0)))
    (out / "timex.json").write_text(json.dumps(report))
    assert gpu_check.main([str(out), "--device", "cpu", "--peer-ms", "0.4,2"]) == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ok"] is False
    assert {one["what"]: one["ok"] for one in summary["verdicts"]}["ms of cuda_v3, forward; the peer's"] is False
    assert [(part["part"], part["ok"], part["status"]) for part in summary["parts"]] == [
        ("good", True, "ok"), ("bad", False, "failed with status 3"), ("slow", False, "stopped after 1 s")]
    assert summary["parts"][0]["output"] == ["fine"]
    assert "=== good: " in (out / "log.txt").read_text()
    assert "NOT all well" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "parts", lambda *args: iter([part("bad", ""), part("slow", "")]))
    assert gpu_check.main([str(out), "--device", "cpu"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [(part["part"], part["ok"]) for part in summary["parts"]] == [("good", True), ("bad", True), ("slow", True)]


def test_gpu_check_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.startswith("gpu-check needs a CUDA device, and torch sees none")
    assert not (tmp_path / "out").exists()


def test_gpu_check_has_a_part_for_everything(tmp_path: Path) -> None:
    names = [part.name for part in gpu_check.parts("cpu", tmp_path, tmp_path, 5)]
    benches = [f"bench-{op}" for op in registry.operators()]
    assert names[:1 + len(benches)] == ["tests", *benches]
    assert {"train-conv1d", "train-formula", "train-reference"} <= set(names)
    assert len([name for name in names if gpu_check._asked(name, ["bench", "train-conv1d"])]) == len(benches) + 1


USE = """
from kernels import __main__, bench, tables
__main__.main()
assert bench.main("timex --shape 2,3,16 --only dummy_v0 --seconds 0.01 --json benchmarks/results/timex-cpu.json".split()) == 0
assert bench.main("wkv --shape 2,3,16 --only dummy_v0 --seconds 0.01 --json benchmarks/results/wkv-cpu.json".split()) == 0
assert tables.main([]) == 0
"""


def test_a_new_kernel_is_two_files(tmp_path: Path) -> None:
    """kernels/README.md taken at its word in a copy of this tree: listed, tested, timed and in the tables by being there."""
    for name in ("kernels", "configs", "rwkv", "tests"):
        shutil.copytree(tables.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "train.py", "generate.py"):
        shutil.copy(tables.ROOT / name, tmp_path)
    formula_py = (tables.ROOT / "kernels" / "timex" / "formula.py").read_text(encoding="utf-8")
    kernel = '"""The formula again, as an example."""\n\n' + formula_py[formula_py.index("import torch"):]
    (tmp_path / "kernels" / "timex" / "dummy_v0.py").write_text(kernel, encoding="utf-8")
    (tmp_path / "configs" / "kernel" / "dummy_v0.yaml").write_text("name: dummy_v0\n", encoding="utf-8")

    listed = python(tmp_path, "-c", USE)
    assert "The formula again, as an example." in listed
    for readme in ("README.md", "kernels/timex/README.md", "kernels/wkv/README.md"):
        assert "| dummy_v0 | " in (tmp_path / readme).read_text(encoding="utf-8")
    some = "dummy_v0 and (output_and_gradients or gradcheck or command_line)"
    tested = python(tmp_path, "-m", "pytest", "-k", some, "tests/test_timex.py", "tests/test_layout.py")
    assert int(re.search(r"(\d+) passed", tested)[1]) == len(["gradcheck", "yaml"]) + 3 * len(timex_cases.SHAPES)


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
