"""The programs beside the kernels: the benchmark, the listing, the READMEs' tables, the check of a GPU machine."""

import json
import sys
from pathlib import Path

import pytest
import torch
from stubs import stub

from kernels import __main__ as listing
from kernels import _machine, _subjects, _timing, bench, gpu_check, registry, tables
from kernels.compare import err_ratio, misses
from kernels.timex import conv1d, formula
from kernels.wkv import reference


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timing, "MAX_ROUNDS", 2)
    monkeypatch.setattr(_machine, "MATMUL_N", {"cpu": 64})
    monkeypatch.setattr(_machine, "COPY_BYTES", {"cpu": 2**16})


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
    assert max(map(len, out.splitlines()[:-1])) <= 128
    assert {"cpu", "threads", "torch", "python", "commit", "date"} <= set(report["machine"])


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
        patch.setattr(_subjects, "selectable", lambda: [name])
        code, _, report = run(capsys, "wkv", "--shape", "2,9,16")
    assert code == 1
    assert "grad k is off by 1.0e-03" in report["shapes"][0]["wrong"][name]


def test_what_cannot_run_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(devices=("cuda",)) as name:
        code, out, report = run(capsys, "timex", "--shape", "2,3,16", "--only", name)
    assert code == 0
    assert report["shapes"][0]["skipped"] == {name: f"{name} runs on cuda, not on cpu"}
    assert f"not measured: {name} runs on cuda, not on cpu" in out


def test_what_takes_too_long_is_measured_only_when_named(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_subjects, "LONGEST_S", 0)
    monkeypatch.setattr(registry, "names", lambda op: ("conv1d", "formula"))
    _, _, report = run(capsys, "timex", "--shape", "2,3,16")
    assert report["shapes"][0]["skipped"] == {
        "formula": "formula takes over 0 s a pass at this shape; --only formula measures it"}
    _, _, report = run(capsys, "timex", "--shape", "2,3,16", "--only", "formula")
    assert {result["name"] for result in report["shapes"][0]["results"]} == {"conv1d", "formula"}


def test_a_gradient_with_a_function_of_its_own_is_timed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with stub("timex", conv1d.forward, conv1d.backward, T_multiple=4) as name:
        vars(registry.load("timex", name))["grad_w"] = conv1d.grad_w
        _, _, report = run(capsys, "timex", "--shape", "2,3,15", "--only", name)
    passes = [result["pass"] for result in report["shapes"][0]["results"] if result["name"] == name]
    assert passes == ["forward", "backward", "grad_w"]


@pytest.mark.parametrize(("args", "sentence"), [
    (["timex", "--shape", "2,3"], "invalid _shape value: '2,3'"), (["timex", "--shape", "2,0,3"], "invalid _shape value"),
    (["softmax"], "invalid choice: 'softmax'"), (["timex", "--only", "nonsense"], "unknown timex implementation 'nonsense'"),
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
    assert all(f"  {name} " in out for op in ("timex", "wkv") for name in registry.names(op))
    assert max(map(len, out.splitlines())) < 128
    assert "F.conv1d with one group per channel" in out


def test_the_listing_says_why_not_here() -> None:
    with stub(packages=("no_such_package",)) as name:
        assert listing.here("timex", name, ["cpu"]) == "no"
        reason = registry.why_not("timex", name)
    assert "needs the package no_such_package" in reason


def test_every_implementation_has_an_idea() -> None:
    ideas = {name: listing.idea(op, name) for op in ("timex", "wkv") for name in registry.names(op)}
    assert all(10 < len(idea) < 200 and idea.endswith(".") for idea in ideas.values()), ideas
    assert len(set(ideas.values())) == len(ideas), "two implementations say the same of themselves"


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


@pytest.mark.parametrize(("readme", "op"), [("timex", "timex"), ("wkv", "wkv")])
def test_the_readmes_have_a_place_for_their_numbers(readme: str, op: str) -> None:
    text = (tables.ROOT / "kernels" / readme / "README.md").read_text(encoding="utf-8")
    assert text.count(f"<!-- {op}: measured -->") == text.count(f"<!-- end of {op}: measured -->") == 1


def test_tables_without_results_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main([]) == 1
    assert "no results" in capsys.readouterr().err


def part(name: str, code: str, limit_s: float = 60) -> gpu_check.Part:
    return gpu_check.Part(name, [sys.executable, "-c", code], limit_s)


def test_gpu_check_collects_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    some = [part("good", "print('fine')"), part("bad", "print(1); raise SystemExit(3)"),
            part("slow", "import time; time.sleep(60)", 1)]
    monkeypatch.setattr(gpu_check, "parts", lambda *args: iter(some))
    assert gpu_check.main([str(tmp_path / "out"), "--device", "cpu"]) == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["ok"] is False
    assert [(part["part"], part["ok"], part["status"]) for part in summary["parts"]] == [
        ("good", True, "ok"), ("bad", False, "failed with status 3"), ("slow", False, "stopped after 1 s")]
    assert summary["parts"][0]["output"] == ["fine"]
    assert "=== good: " in (tmp_path / "out" / "log.txt").read_text()
    assert "NOT all well" in capsys.readouterr().out


def test_gpu_check_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.startswith("gpu-check needs a CUDA device, and torch sees none")
    assert not (tmp_path / "out").exists()


def test_gpu_check_has_a_part_for_everything(tmp_path: Path) -> None:
    names = [part.name for part in gpu_check.parts("cpu", tmp_path, tmp_path, 5)]
    assert names[:3] == ["tests", "bench-timex", "bench-wkv"]
    assert {"train-conv1d", "train-formula", "train-reference"} <= set(names)
    assert len([name for name in names if gpu_check._asked(name, ["bench", "train-conv1d"])]) == 3
