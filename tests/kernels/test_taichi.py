"""Tests that Taichi starts with the same settings whatever its environment variables and its cache folder, without a crash."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import ROOT, Forked

from kernels.registry import why_not

pytestmark = [pytest.mark.programs, pytest.mark.compiles,
              pytest.mark.skipif(why_not("softmax", "taichi_v0") is not None, reason=str(why_not("softmax", "taichi_v0")))]

CODE = """
import torch
{before}
from kernels.select import select
from kernels.registry import KernelUnavailable
x = torch.randn(3, 5)
try:
    assert torch.allclose(select("softmax", "taichi_v0")(x), x.softmax(-1))
except KernelUnavailable:
    print("refused")
"""


def softmax(folder: Path, before: str = "", apart: bool = False, **variables: str) -> str:
    """Computes a softmax in a process with these environment variables, and returns what the process prints.

    By default the process is forked. With `apart` it is a new interpreter, at whose exit Taichi's own clean-up runs.
    """
    if apart:
        done = subprocess.run([sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout
    process = Forked(folder, ("-c", CODE.format(before=before)), {**os.environ, **variables})
    output, error = process.communicate(100)
    assert (process.returncode, error) == (0, "")
    return output


@pytest.mark.parametrize("variables", [
    {"TI_DEFAULT_FP": "64", "TI_ARCH": "none", "TI_LOG_LEVEL": "loud", "TI_ENABLE_TORCH": "0", "TI_OFFLINE_CACHE": "perhaps",
     "TI_DEFAULT_IP": "64", "TI_CPU_MAX_NUM_THREADS": "many", "TI_DEBUG": "1", "TI_UNKNOWN": "1"},
    pytest.param({"TI_DEFAULT_FP": "f64", "TI_KERNEL_PROFILER": "1", "TI_FAST_MATH": "0", "TI_REAL_MATRIX_SCALARIZE": "1"},
                 marks=pytest.mark.soak)], ids=str)
def test_taichis_variables_change_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    """The process has no home folder either, and ends without an error."""
    homeless = "import os\nfor name in ('HOME', 'XDG_CACHE_HOME'): os.environ.pop(name, None)"
    assert softmax(tmp_path, homeless, apart=True, **variables) == ""


@pytest.mark.parametrize("names", [pytest.param(("TI_OFFLINE_CACHE_FILE_PATH",), marks=pytest.mark.soak),
                                   ("HOME", "XDG_CACHE_HOME")], ids=str)
@pytest.mark.parametrize("folder", [pytest.param("/proc/no", marks=pytest.mark.soak), "/proc/self",
                                    pytest.param("/dev/null", marks=pytest.mark.soak)])
def test_a_cache_folder_that_cannot_be_written_is_not_used(folder: str, names: tuple[str, ...], tmp_path: Path) -> None:
    assert softmax(tmp_path, **dict.fromkeys(names, folder)) == ""


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


@pytest.mark.parametrize("make", [
    pytest.param(folder_with_a_file, id="folder", marks=pytest.mark.soak), pytest.param(os.mkfifo, id="fifo"),
    pytest.param(lambda path: path.symlink_to("/no/such/file"), id="dangling", marks=pytest.mark.soak)])
def test_a_cache_whose_list_is_not_a_file_is_not_used(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """With such a cache Taichi itself would abort or wait for ever."""
    cache = tmp_path / "cache"
    cache.mkdir()
    make(cache / "ticache.tcb")
    assert softmax(tmp_path, TI_OFFLINE_CACHE_FILE_PATH=str(cache)) == ""
    assert len(list(cache.iterdir())) == 1


def test_the_cache_is_where_taichis_variable_says(tmp_path: Path) -> None:
    assert softmax(tmp_path, apart=True, TI_OFFLINE_CACHE_FILE_PATH=str(tmp_path / "new")) == ""
    assert list((tmp_path / "new").iterdir())
    assert softmax(tmp_path, TI_OFFLINE_CACHE_FILE_PATH=str(tmp_path / "none"), TI_OFFLINE_CACHE="0") == ""
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("option", [pytest.param("default_fp=ti.f64", marks=pytest.mark.soak), "default_ip=ti.i64"])
def test_a_taichi_with_other_default_types_is_refused(option: str, tmp_path: Path) -> None:
    """Other code may have started Taichi with 64-bit defaults, and compiling for 64-bit integers would abort the process."""
    start = f"import taichi as ti\nti.init(arch=ti.cpu, {option}, log_level=ti.ERROR, offline_cache=False)"
    assert softmax(tmp_path, start).splitlines()[-1] == "refused"
