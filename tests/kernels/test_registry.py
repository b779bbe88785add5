"""Tests that operators follow what an implementation declares: they pad and crop, or refuse the input with one sentence."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stubs import stub
from torch import Tensor

from kernels import registry, timex
from kernels.compare import errors, misses
from kernels.registry import KernelUnavailable
from kernels.softmax import Softmax
from kernels.timex import TimeX, cases, formula
from kernels.wkv4 import WKV4
from kernels.wkv7 import WKV7

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def recording_stub(shapes: list[tuple[int, ...]]) -> dict[str, object]:
    """Returns the formula as an implementation that appends the shapes of its inputs to a list."""
    def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
        shapes.append(tuple(k.shape))
        assert w.is_contiguous()
        assert k.is_contiguous()
        assert not (w.requires_grad)
        assert not (k.requires_grad)
        return formula.forward(w, k, eps)

    def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(grad_out.shape))
        return formula.backward(w, k, grad_out)

    return {"forward": forward, "backward": backward}


@pytest.mark.parametrize(("shape", "padded"), [((3, 5, 11), (3, 5, 12)), ((8, 5, 12), (8, 5, 12)), ((1, 1, 1), (1, 1, 4))])
def test_steps_are_padded_to_the_declared_multiple(shape: tuple[int, ...], padded: tuple[int, ...]) -> None:
    shapes: list[tuple[int, ...]] = []
    w, k = cases.inputs(*shape)
    with stub(**recording_stub(shapes), T_multiple=4) as name:
        results = cases.results(TimeX(name), w, k, 0.25)
    assert shapes == [padded, padded]
    expected = cases.results(TimeX("formula"), w.double(), k.double(), 0.25)
    assert not misses(errors(results, expected), cases.tolerance(torch.float32))


def test_padding_inside_wkv() -> None:
    shapes: list[tuple[int, ...]] = []
    with stub(**recording_stub(shapes), T_multiple=16) as name:
        wkv = WKV4("timex", timex=name)
        inputs = torch.zeros(3), torch.zeros(3), torch.randn(1, 70, 3), torch.randn(1, 70, 3)
        y, _ = wkv(*inputs)
    assert shapes == [(2, 3, 64), (2, 3, 16)]
    torch.testing.assert_close(y, WKV4("reference")(*inputs)[0])


def test_unsupported_inputs_of_an_implementation_are_refused_in_one_sentence() -> None:
    """An implementation refuses a dtype that it does not support, and a use in WKV4 if it declares wkv=False."""
    with stub(**recording_stub([])) as name:
        assert_refused(lambda: TimeX(name)(*cases.inputs(2, 3, 4, dtype=torch.float64)), f"{name} does not compute in float64")
        wide = torch.zeros(3, dtype=torch.float64)
        assert_refused(lambda: WKV4("timex", timex=name)(wide, wide, *(torch.zeros(1, 2, 3),) * 2), "float64")
    with stub(**recording_stub([]), wkv=False) as name:
        assert_refused(lambda: WKV4("timex", timex=name), name)
    wide, narrow = (torch.zeros(1, 2, 3, 4, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert_refused(lambda: WKV7("reference")(narrow, *(wide,) * 5), "cast all inputs")
    assert_refused(lambda: WKV4("reference")(*(wide[0, 0, 0],) * 2, narrow[0], wide[0]), "cast all inputs")
    inputs = *(narrow[0, 0, 0],) * 2, narrow[0], narrow[0]
    assert_refused(lambda: WKV4("reference")(*inputs, (narrow[0, 0], narrow[0, 0])), "three tensors")      # type: ignore[arg-type]


def assert_refused(call: Callable[[], object], expected_text: str) -> None:
    with pytest.raises(ValueError) as error:                     # noqa: PT011  the subclasses differ
        call()
    assert expected_text in str(error.value)


MISTAKES = {
    "without_backward": ("from kernels.timex.formula import REQUIRES, forward\n", "must define backward"),
    "without_requires": ("from kernels.timex.formula import backward, forward\n", "must define REQUIRES"),
    "with_a_dict": ("REQUIRES = {}\n", "must define REQUIRES as a Requires"),
    "with_a_string": ("from kernels.registry import Requires\nREQUIRES = Requires(packages=('taichi'))\n",
                      "line 2: TypeError: packages must be a tuple"),
    "unreadable": ("def forward(:\n", "unreadable.py cannot be imported: line 1: invalid syntax"),
    "misspelt": ("from kernels.timex._tyles import TILE\n", "misspelt.py cannot be imported: line 1: ModuleNotFoundError"),
    "helped": ("from kernels.timex import _helper\n", "helped.py cannot be imported: _helper.py, line 2: invalid syntax"),
    "null": ("import torch\0\n", "null.py cannot be imported"),
    "latin": ('"""Caf\xe9."""\n', "latin.py cannot be imported"),
    "with-hyphen": ("from kernels.timex.formula import REQUIRES, backward, forward\n", "must have a name of letters"),
    "leaving": ("import sys\nsys.exit()\n", "line 2: SystemExit"),
    "stumbling": ("import torch\ntorch.tensr\n", "line 2: AttributeError"),
    "unbuilt": ("from kernels import native\nfrom kernels.timex.formula import REQUIRES, backward\n\n"
                "def forward(w, k, eps):\n    native.run('timex_unbuilt', 1)\n", "run make native")}
CALLS = """
import sys, torch
from kernels import registry
from kernels.timex import TimeX
for name in sys.argv[1:]:
    try:
        TimeX(name)(torch.ones(2, 3), torch.ones(1, 2, 3))
    except registry.KernelUnavailable as error:
        print(name, error)
"""


@pytest.mark.programs
def test_a_mistake_in_a_kernel_s_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """python -m kernels still lists all kernels."""
    shutil.copytree(Path(registry.__file__).parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (text, _) in {**MISTAKES, "_helper": ("\ndef forward(:\n", ""), ".#editor": ("", "")}.items():
        (tmp_path / "kernels" / "timex" / f"{name}.py").write_text(text, encoding="latin-1")
    process = subprocess.run([sys.executable, "-c", CALLS, *MISTAKES], cwd=tmp_path, capture_output=True, text=True, check=True)
    errors_by_name = dict(line.split(" ", 1) for line in process.stdout.splitlines())
    assert all(expected_text in errors_by_name[name] for name, (_, expected_text) in MISTAKES.items()), process.stdout
    listing = subprocess.run([sys.executable, "-m", "kernels"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert all(name in listing for name in (*MISTAKES, "formula"))
    assert "editor" not in listing


def test_the_error_names_the_kernels_that_compute_in_float64() -> None:
    """The error names only kernels of the same operator: softmax has no conv1d."""
    with stub("softmax") as narrow, pytest.raises(ValueError, match=narrow) as error:
        Softmax(narrow)(torch.zeros(2, 3, dtype=torch.float64))
    named = str(error.value).rpartition("use one of ")[2].split(", ")
    assert "formula" in named
    for name in named:
        assert Softmax(name)(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_a_missing_package_is_named_with_its_remedy() -> None:
    with stub(packages=("no_such_package",)) as name:
        assert registry.why_not("timex", name) == (
            f"{name} requires the package no_such_package, which is not installed (pip install no_such_package)")
        with pytest.raises(KernelUnavailable, match="no_such_package"):
            TimeX(name)(*cases.inputs(2, 3, 4))


def test_a_part_of_a_missing_package_is_named_with_its_remedy() -> None:
    """If the parent package is missing, the search for the part raises an exception."""
    with stub(packages=("no_such_package.part",)) as name:
        assert registry.why_not("timex", name) == (
            f"{name} requires the package no_such_package.part, which is not installed (pip install no_such_package.part)")


def test_a_wrong_device_is_named_before_a_missing_package() -> None:
    with stub(packages=("no_such_package",), devices=("cuda",)) as name:
        assert registry.why_not("timex", name, "cpu") == f"{name} runs on cuda, not on cpu"


def test_a_device_on_which_nothing_runs_is_named() -> None:
    with pytest.raises(KernelUnavailable, match=r"not on meta.*No implementation runs on meta"):
        TimeX("formula")(*(tensor.to("meta") for tensor in cases.inputs(2, 3, 4)))


def test_a_missing_device_is_named(without_gpu: None) -> None:
    with stub(devices=("cuda",)) as name:
        assert registry.why_not("timex", name, "cuda") == f"{name} on cuda requires a CUDA device, but torch finds none"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with stub(compiled=True) as name:
        for path in ("/bin/g++", None):
            monkeypatch.setattr(registry.shutil, "which", lambda compiler, path=path: path)
            monkeypatch.setattr(registry, "COMPILERS", {})
            registry.why_not.cache_clear()
            reason = registry.why_not("timex", name)
            assert reason is None if path else "g++ is not on the PATH" in str(reason)


def test_a_torch_that_does_not_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")
    with stub(scripted=True) as name:
        reason = registry.why_not("timex", name)
        assert reason.startswith(f"{name} requires torch.jit.script, which torch {torch.__version__} ")


def test_an_error_inside_an_implementation_is_not_taken_for_a_missing_package(tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ModuleNotFoundError means that a package is missing; every other error is reported as it is."""
    (tmp_path / "broken.py").write_text("import torch\nfrom torch import no_such_name\n")
    monkeypatch.setattr(timex, "__path__", [str(tmp_path)])
    monkeypatch.setattr(registry, "names", lambda op: ("broken",))
    with pytest.raises(KernelUnavailable, match="no_such_name"):
        registry.load("timex", "broken")
