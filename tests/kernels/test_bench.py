"""Tests the programs in kernels/: the benchmark, the listing, the tables and the figures. A new kernel needs one file only."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stubs import selectable_stub, stub

from kernels import __main__ as listing
from kernels import registry
from kernels.bench import __main__, plot, tables, timing
from kernels.bench.case import case_of
from kernels.bench.profiler import extra_bytes, launches
from kernels.bench.results import FOLDER, UnusableFile, exit_status, save
from kernels.bench.wkv4 import Case as WKVCase
from kernels.compare import err_ratio, misses
from kernels.machine import hardware
from kernels.timex import TimeX, conv1d, formula
from kernels.timex import cases as timex_cases
from kernels.wkv4 import reference
from kernels.wkv7 import reference as wkv7_reference

ROOT = hardware.ROOT


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((timing, "MAX_ROUNDS", 2), (hardware, "MATMUL_N", {"cpu": 64}),
                                (hardware, "COPY_BYTES", {"cpu": 2**16}),
                                (__main__, "keep_large_blocks", lambda: True)):      # the function would affect later tests
        monkeypatch.setattr(module, name, value)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, dict]:
    """Runs the benchmark and returns its exit status, its standard output and the JSON that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        code = __main__.main([*args, "--json", str(file)])
        return code, capsys.readouterr().out, json.loads(file.read_text())


# The benchmark


@pytest.mark.programs
@pytest.mark.parametrize(("op", "shapes", "names"), [
    ("timex", ("2,9,16", "3,1,5"), ["conv1d", "formula"]),
    ("wkv4", ("2,9,16", "3,1,5"), ["conv1d in one block", "formula", "reference"]),
    ("wkv7", ("3,4,8,20", "1,1,4,3"), ["reference", "torch_chunk"])])
def test_a_benchmark_prints_a_table_and_writes_json(op: str, shapes: tuple[str, ...], names: list[str],
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    code, out, report = run(capsys, op, "--shape", *shapes, "--only", ",".join(names))
    assert code == 0
    assert '"shapes"' not in out
    assert tuple(",".join(map(str, measured["shape"].values())) for measured in report["shapes"]) == shapes
    for measured in report["shapes"]:
        assert list(dict.fromkeys(result["name"] for result in measured["results"])) == names
        assert all(result["ms"] > 0 and result["err_ratio"] <= 1e-5 for result in measured["results"])
        assert [result["vs_baseline"] for result in measured["results"][:2]] == [1.0, 1.0]
        assert measured["limits"]["matmul_gflops"] > 0
        for result in measured["results"]:
            assert result["copies"] * measured["limits"]["copy_one_ms"] == pytest.approx(result["ms"])
            if result["gflops"]:
                assert result["x_limit"] * result["gflops"] == pytest.approx(measured["limits"]["matmul_gflops"])
    assert max(map(len, out.splitlines())) <= 128
    assert {"cpu", "threads", "torch", "python", "commit", "date"} <= set(report["machine"])
    assert (report["dtype"], report["malloc"], report["sweep"]) == ("float32", "tuned", [])


def test_a_result_is_printed_where_its_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnusableFile):
        save({"op": "timex"}, tmp_path)
    assert json.loads(capsys.readouterr().out) == {"op": "timex"}


def test_the_plan_comes_first() -> None:
    """The plan names the kernels that run here and all shapes. Its duration is twice --seconds for each pass and each limit."""
    options = "--only", "torch_native,triton_v0", "--shape", "3,5", "--sweep", "7,9", "--seconds", "4"
    plan = __main__._plan(__main__._arguments(["softmax", *options]))
    assert plan.splitlines()[0] == "softmax on cpu in float32, rows,columns = 3,5 3,7 3,9: torch_native"
    passes, limits, shapes = 2, 4, 3
    assert f"up to {2 * 4 * (passes + limits) * shapes / 60:.0f} minutes, --seconds 4 for each pass" in plan


@pytest.mark.programs
def test_a_sweep_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, report = run(capsys, "wkv4", "--shape", "2,9,16", "--sweep", "8,16,24", "--only", "conv1d", "--dtype", "bfloat16")
    assert code == 0
    assert report["dtype"] == "bfloat16"
    assert [measured["shape"]["T"] for measured in report["sweep"]] == [8, 24], "16 is measured already"
    assert all(1e-4 < result["err_ratio"] < 2e-2 for measured in report["sweep"] for result in measured["results"])


@pytest.mark.thorough
def test_a_kernel_of_wkv7_that_mixes_up_rows_of_the_batch_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark notices the mistake although every row holds the same few heads."""
    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = wkv7_reference.forward(*inputs)
        return y.roll(1, 0), state

    with selectable_stub("wkv7", forward, wkv7_reference.backward) as name:
        code, _, report = run(capsys, "wkv7", "--shape", "2,12,8,5", "--only", name)
    assert code == 1
    assert "y" in report["shapes"][0]["wrong"][name]


@pytest.mark.parametrize(("op", "shape", "name", "forward", "backward"), [
    ("timex", (2, 3, 16), "conv1d", (2 * 3 * 16 * 17, 48 + 2 * 96), (2 * 2 * 3 * 16 * 17, 2 * 48 + 3 * 96)),
    ("wkv4", (2, 3, 5), "reference", (0, 3 * 30), (0, 5 * 30)),
    ("wkv7", (3, 4, 8, 20), "torch_chunk", (10 * 20 * 768, 7 * 1920 + 768), (32 * 20 * 768, 13 * 1920))])
def test_flop_and_numbers_moved_equal_the_formula(op: str, shape: tuple[int, ...], name: str, forward: tuple[int, int],
                                                  backward: tuple[int, int]) -> None:
    passes = case_of(op)(*shape, "cpu").passes(name)[:2]
    assert [(part.flop, part.bytes / 4) for part in passes] == [forward, backward]


def test_backward_is_timed_alone() -> None:
    calls = []

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("forward")
        return reference.forward(*inputs)

    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("backward")
        return reference.backward(*inputs)

    with selectable_stub("wkv4", forward, backward) as name:
        first, second = WKVCase(2, 3, 5, "cpu").passes(name)
        for part in (first, second, second):
            part.run()
    assert calls[1:] == ["forward", "backward", "backward"], "the first forward pass makes the graph that is kept"


def test_a_gradient_with_a_separate_function_is_timed_alone() -> None:
    with stub("timex", conv1d.forward, conv1d.backward, T_multiple=4) as name:
        vars(registry.load("timex", name))["grad_w"] = conv1d.grad_w
        passes = case_of("timex")(2, 3, 15, "cpu").passes(name)
        passes[2].run()
    assert [part.name for part in passes] == ["forward", "backward", "grad_w"]


def test_extra_memory_is_the_peak_less_the_result() -> None:
    x = torch.zeros(1000, 100)

    def three_at_once() -> torch.Tensor:
        a = x.clone()
        b = a.clone()
        del a
        return b.clone()                     # b still exists, but a does not

    assert extra_bytes(x.clone, "cpu") == 0
    assert extra_bytes(lambda: (x.clone(), x.clone()), "cpu") == 0
    assert extra_bytes(lambda: x[0], "cpu") == 0
    assert extra_bytes(three_at_once, "cpu") == x.nbytes


def test_launches_are_the_operators_that_compute() -> None:
    """Views, allocations and contiguous() of a contiguous tensor count as 0.

    A registered operator of kernels/ counts as the operators that it calls, or as 1 if it calls none that count.
    """
    w, k = timex_cases.inputs(2, 3, 16)
    assert launches(lambda: (w.t().contiguous() + 1).exp(), "cpu") == 3
    assert launches(lambda: torch.zeros(3, 4).view(4, 3).contiguous(), "cpu") == 1
    with stub(forward=lambda w, k, eps: k.new_empty(k.shape)) as name:
        assert launches(lambda: TimeX(name)(w, k), "cpu") == 1
    assert launches(lambda: TimeX("conv1d")(w, k), "cpu") > 1


# Kernels that are wrong, missing or slow


def wrong_in_the_last_channel(w: torch.Tensor, k: torch.Tensor, eps: float) -> torch.Tensor:
    out = formula.forward(w, k, eps)
    out[-1, -1, -1] += 1e-2
    return out


def raises(w: torch.Tensor, k: torch.Tensor, eps: float) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(("forward", "reason"), [(wrong_in_the_last_channel, "out"), (raises, "ZeroDivisionError")])
def test_a_wrong_kernel_is_not_timed(forward: object, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stub("timex", forward, formula.backward) as name:
        code, out, report = run(capsys, "timex", "--shape", "2,20,16", "--only", name)
    measured = report["shapes"][0]
    assert code == 1
    assert list(measured["wrong"]) == [name]
    assert reason in measured["wrong"][name]
    assert {result["name"] for result in measured["results"]} == {"conv1d"}, "the others are timed"
    assert name in out.splitlines()[-1]


@pytest.mark.parametrize(("op", "shapes"), [("softmax", [(1, 2), (1, 3), (2, 3), (1, 16)]), ("timex", [(1, 1, 2), (1, 2, 3)]),
                                            ("wkv4", [(1, 1, 2), (1, 2, 3)]), ("wkv7", [(1, 1, 2, 3), (1, 1, 1, 2)])])
def test_a_correct_kernel_passes_at_a_tiny_shape(op: str, shapes: list[tuple[int, ...]]) -> None:
    name = "formula" if op in ("softmax", "timex") else "reference"
    for shape in shapes:
        assert not case_of(op)(*shape, "cpu", torch.float32).errors(name)[1], shape


def test_a_wrong_gradient_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad * 1.001 for grad in reference.backward(*inputs))

    with selectable_stub("wkv4", reference.forward, backward) as name:
        code, _, report = run(capsys, "wkv4", "--shape", "2,9,16", "--only", name)
    assert code == 1
    assert "grad k" in report["shapes"][0]["wrong"][name]


def test_a_kernel_that_cannot_run_here_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(devices=("cuda",)) as first, stub(devices=("cuda",)) as second:
        code, out, report = run(capsys, "timex", "--shape", "2,3,16", "--only", f"{first},conv1d,{second}")
    assert code == 0
    assert {name: name in reason for name, reason in report["shapes"][0]["skipped"].items()} == {first: True, second: True}
    assert f"{first}, {second}:" in out, "one line for one reason"


def test_a_selection_in_which_no_kernel_can_run_is_refused(monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Timing the baseline alone would end with exit status 0."""
    with stub(devices=("cuda",)) as first, stub(packages=("no_such_package",)) as second:
        error = usage_error(["timex", "--only", f"{first},{second}"], monkeypatch, capsys)
    assert f"{first} runs on cuda" in error
    assert "no_such_package" in error
    assert "int4" in usage_error(["matvec", "--dtype", "int4", "--only", "torch_linear"], monkeypatch, capsys)


def test_err_ratio() -> None:
    ones = torch.ones(2, 2)
    assert err_ratio(1.5 * ones, ones) == 0.5
    assert err_ratio(ones[:0], ones[:0]) == 0.0
    assert err_ratio(0 * ones, 0 * ones) == 0.0
    assert err_ratio(ones, 0 * ones) == float("inf")
    assert err_ratio(ones * float("nan"), ones) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        err_ratio(ones, ones[0])
    assert misses({"out": float("nan")}, {"out": 1.0})


# A user's mistakes


@pytest.mark.parametrize(("args", "expected_word"), [
    ("convolution", "convolution"), ("timex --shape 2,3", "--shape"), ("timex --shape 2,0,3", "--shape"),
    ("timex --shape a,b,c", "--shape"), ("timex --seconds -1", "--seconds"), ("timex --sweep 8,0", "--sweep"),
    ("timex --dtype uint8", "--dtype"), ("timex --only nonsense", "nonsense"),
    ("wkv4 --only fft", "fft"), ("timex --json .", "--json"), ("timex --json FILE/new.json", "FILE"),
    ("timex --plot FILE/new", "FILE"),
])
def test_a_wrong_option_is_refused_before_anything_is_measured(
        args: str, expected_word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("not a folder")
    error = usage_error(args.split(), monkeypatch, capsys)
    assert expected_word in error


@pytest.mark.skipif(hardware.free_bytes("cpu") is None, reason="this system does not report its free memory")
@pytest.mark.parametrize("op", registry.operators())
@pytest.mark.parametrize("option", ["--shape", "--sweep"])
def test_a_shape_beyond_memory_is_refused_before_anything_is_measured(op: str, option: str, monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["100000"] * len(case_of(op).AXES) if option == "--shape" else [str(10**13)]
    usage_error([op, option, ",".join(sizes)], monkeypatch, capsys)


@pytest.mark.parametrize("argument", ["dtype=bfloat16", "--dtpe=bfloat16", "dtype"])
def test_an_unknown_argument_is_refused_with_the_nearest_option(argument: str, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dtype" in usage_error(["timex", argument], monkeypatch, capsys).partition(argument)[2]


def usage_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(__main__, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit) as status:
        __main__.main(arguments)
    error = capsys.readouterr().err
    assert (status.value.code, error.count("\n")) == (2, 1)
    return error


@pytest.mark.parametrize("program", [tables.main, lambda files: plot.main(["figures", *files])], ids=["tables", "plot"])
@pytest.mark.parametrize("file", ["missing.json", "text.json"])
def test_a_file_that_is_missing_or_not_json_is_reported_in_one_sentence(program, file: str, monkeypatch: pytest.MonkeyPatch,
                                                                        tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("{")
    assert exit_status(lambda: program([file])) == 2
    error = capsys.readouterr().err
    assert file in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("mistake", [registry.UnknownKernel("a"), registry.KernelUnavailable("a"), FileNotFoundError("a")])
def test_a_mistake_ends_a_program_with_its_sentence(mistake: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise mistake

    assert exit_status(main) == 2
    assert capsys.readouterr().err == "a\n"


def test_a_program_may_be_started_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)             # as with >&- in a shell
    assert exit_status(lambda: 0) == 0
    monkeypatch.setattr(listing, "show", lambda: None)
    listing.main()


@pytest.mark.programs
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
@pytest.mark.parametrize("command", [
    "kernels", pytest.param("kernels.bench pad --shape 1,2,2,1,1,1 --only torch_strips --seconds 0.001",
                            marks=pytest.mark.soak)])
def test_a_closed_pipe_is_not_an_error(command: str) -> None:
    with subprocess.Popen([sys.executable, "-m", *command.split()], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()           # the program has written nothing yet
        assert process.stderr.read() == b""


# The listing


def test_the_listing_names_everything_and_fits_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main()
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for op in registry.operators() for name in registry.names(op))
    assert max(map(len, out.splitlines())) < 128


def test_every_implementation_has_a_different_idea() -> None:
    """Kernels of different back ends may share an idea, but kernels of one back end may not."""
    ideas = {(op, name): listing.idea(op, name) for op in registry.operators() for name in registry.names(op)}
    assert all(10 < len(idea) < 200 and idea.endswith(".") for idea in ideas.values()), ideas
    assert len({(op, name.partition("_")[0], idea) for (op, name), idea in ideas.items()}) == len(ideas)


# Tables and figures


def test_the_tables_match_the_committed_results() -> None:
    """Each operator's README is what python -m kernels.bench.tables writes."""
    reports = tables.read(tables.committed_reports())
    assert {report["op"] for report in reports} == set(registry.operators())
    for op in registry.operators():
        text = (ROOT / "kernels" / op / "README.md").read_text(encoding="utf-8")
        assert text == tables.rewrite_sections(text, reports)
        assert text.count(f"<!-- {op}: measured -->") == text.count(f"<!-- end of {op}: measured -->") == 1


@pytest.mark.thorough
def test_figures_from_a_report(tmp_path: Path) -> None:
    report, = tables.read([FOLDER / "timex-cpu.json"])
    files = plot.draw(tmp_path / "new", [report])
    assert [file.name for file in files] == ["timex-cpu-time.png"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    forward, _ = plot.time_against_size(report).axes
    assert {text.get_text() for text in forward.texts} == {
        result["name"] for measured in report["sweep"] for result in measured["results"]}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15).map(sorted))
def test_names_beside_curves_do_not_overlap(heights: list[float]) -> None:
    apart = plot.spread_apart(heights, 0.05)
    assert all(above - below >= 0.05 - 1e-9 for below, above in pairwise(apart))
    assert sum(apart) == pytest.approx(sum(heights), abs=1e-6)
    assert plot.spread_apart([0.0, 1.0], 0.05) == [0.0, 1.0]


# A new kernel is one file


USE = """
from kernels import __main__ as listing
from kernels.bench import __main__ as bench, tables
from kernels.machine import hardware
hardware.MATMUL_N, hardware.COPY_BYTES = {"cpu": 64}, {"cpu": 2**16}
listing.main()
for op in ("timex", "wkv4"):
    file = f"benchmarks/results/{op}-cpu.json"
    assert bench.main([op, "--shape", "2,3,16", "--only", "dummy_v0", "--seconds", "0.01", "--json", file]) == 0
assert not tables.main([])
"""


@pytest.mark.programs
def test_a_new_kernel_is_one_file(tmp_path: Path) -> None:
    """A file that is added to a copy of kernels/ is listed, selected by name, verified, timed and written into the tables.

    The conformance tests and the option kernel= take their names from the same registry.
    """
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    formula_py = (ROOT / "kernels" / "timex" / "formula.py").read_text(encoding="utf-8")
    kernel = '"""The formula again, as an example."""\n\n' + formula_py[formula_py.index("import torch"):]
    (tmp_path / "kernels" / "timex" / "dummy_v0.py").write_text(kernel, encoding="utf-8")
    process = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "The formula again, as an example." in process.stdout
    for op in ("timex", "wkv4"):
        assert "| dummy_v0 | " in (tmp_path / "kernels" / op / "README.md").read_text(encoding="utf-8")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.org", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_clone_and_its_index_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may be committing at the same time. An installed package may be inside another project's repository."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("text")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "message")
    os.utime(tmp_path / "file", (1, 1))                  # git would refresh the time in its index
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    assert hardware.commit() == git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert (tmp_path / ".git" / "index").read_bytes() == before
    (tmp_path / "file").write_text("changed")
    assert str(hardware.commit()).endswith("+")
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(hardware, "ROOT", tmp_path / "inside")
    assert hardware.commit() is None
