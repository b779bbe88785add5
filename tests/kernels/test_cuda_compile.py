"""Every CUDA source compiles for sm_80 and sm_90 and uses what cuda_resources.txt says (kernels/backends/cuda.py). No GPU.

For sm_80, and by nvcc, in make soak."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cuda_resources import ROOT, TABLE, measure, name_of, read_table, sources

from kernels.backends import cuda
from kernels.backends.cuda import Source, compile_cubin, compiler_version
from kernels.registry import KernelUnavailable

NVCC = shutil.which("nvcc") if shutil.which("g++") else None         # it does nothing without a host compiler
pytestmark = pytest.mark.compiles
WRITE = f"PYTHONPATH=. python tests/cuda_resources.py > tests/{TABLE.name}"


@pytest.fixture(scope="module")
def nvrtc() -> str:
    """Its version; skips where it, or cuda-core, is not installed."""
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install -e '.[cuda]'")
    try:
        return compiler_version()
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A file of two kernels and a header, with a macro."""
    (tmp_path / "twice.cuh").write_text("static __device__ float twice(float x) { return 2 * x; }\n")
    (tmp_path / "small.cu").write_text('#include "twice.cuh"\n'
                                       'extern "C" __global__ void first(float* x) { x[0] = twice(x[N]); }\n'
                                       'extern "C" __global__ void second(float* x, int i, float y) { x[i] = y; }\n')
    return Source(str(tmp_path / "small.py"), "small.cu", N=3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(cuda, "cache_folder", lambda: folder)
    return folder


def test_every_file_belongs_to_an_implementation() -> None:
    assert {source.path for source in sources()} == set(ROOT.glob("kernels/*/csrc/*.cu"))


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.soak), "sm_90"])
@pytest.mark.parametrize("source", sources(), ids=name_of)
def test_registers_shared_memory_and_spills(source: Source, arch: str, nvrtc: str) -> None:
    """No more than the table's, by the compiler that wrote it; what is not in it spills nothing."""
    version, table = read_table()
    for kernel, taken in measure(source, arch).items():
        allowed = table.get(kernel)
        if allowed is None:
            assert taken.spilled == 0, f"{kernel} spills: write the reason into the source, and the table by {WRITE}"
        elif version == nvrtc:
            more = [is_ > was for is_, was in zip(taken, allowed, strict=True)]
            assert not any(more), f"{kernel} takes {taken}, more than {allowed}; if that is meant: {WRITE}"


def test_the_table_has_no_kernel_that_is_not_there() -> None:
    known = {name_of(source) for source in sources()}
    assert {kernel.source for kernel in read_table()[1]} <= known, WRITE


@pytest.mark.soak
@pytest.mark.skipif(not NVCC, reason="needs nvcc and g++")
@pytest.mark.parametrize("source", sources(), ids=name_of)
def test_nvcc_agrees(source: Source, tmp_path: Path) -> None:
    """The other front end, with its warnings: what it takes, a user with a toolkit can profile and debug."""
    assert NVCC
    macros = [f"-D{name}={value}" for name, value in source.macros.items()]
    done = subprocess.run([NVCC, "-arch=sm_80", "-cubin", "-std=c++17", "-Werror", "all-warnings", *macros,
                           "-o", str(tmp_path / "cubin"), str(source.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cubin_is_compiled_once(source: Source, cache: Path, nvrtc: str) -> None:
    cubin = cuda._cubin.__wrapped__(source, "sm_80")
    assert cubin.startswith(b"\x7fELF")
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    assert cuda._cubin.__wrapped__(source, "sm_80") == cubin
    assert [(path.suffix, path.stat().st_mtime_ns) for path in cache.iterdir()] == [(".cubin", written)]


def test_an_incomplete_cubin_is_compiled_again(source: Source, cache: Path, nvrtc: str) -> None:
    cubin = cuda._cubin.__wrapped__(source, "sm_80")
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert cuda._cubin.__wrapped__(source, "sm_80") == cubin == path.read_bytes()[32:]


def test_a_cache_folder_that_cannot_be_used_is_no_error(source: Source, cache: Path, nvrtc: str) -> None:
    cache.write_text("a file where the folder should be")
    assert cuda._cubin.__wrapped__(source, "sm_80").startswith(b"\x7fELF")


def test_a_user_without_a_home_compiles_each_time(source: Source, nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cuda._cubin.__wrapped__(source, "sm_80").startswith(b"\x7fELF")
    assert not cuda.cache_folder().exists()


def test_the_key_depends_on_all_that_a_cubin_depends_on(source: Source, nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other_macro = Source(str(source.path.parent / "small.py"), "small.cu", N=4)
    keys = [cuda._key(source, "sm_80"), cuda._key(source, "sm_90"), cuda._key(other_macro, "sm_80")]
    header = source.path.parent / "twice.cuh"
    header.write_text(header.read_text().replace("2", "2.0f"))
    keys.append(cuda._key(source, "sm_80"))
    monkeypatch.setattr(cuda, "compiler_version", lambda: "1.0")
    keys.append(cuda._key(source, "sm_80"))
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_compiled_is_shown(source: Source, nvrtc: str) -> None:
    with pytest.raises(KernelUnavailable, match=r"(?s)small\.cu for sm_30: .*gpu-architecture"):
        compile_cubin(source, "sm_30")
    source.path.write_text('extern "C" __global__ void broken(float* x) { x[0] = y; }')
    with pytest.raises(KernelUnavailable, match=r'(?s)small\.cu for sm_80: .*identifier "y" is undefined'):
        compile_cubin(source, "sm_80")


def test_what_a_launch_hands_over(nvrtc: str) -> None:
    """The sizes, and the arguments in the types that a kernel's parameters have."""
    x = torch.zeros(3)
    assert cuda._parameters((x, 7, 0.5)) == ((x.data_ptr(), 7, 0.5), (ctypes.c_void_p, ctypes.c_int, ctypes.c_float))
    assert (cuda._three(5), cuda._three((32, 2))) == ((5, 1, 1), (32, 2, 1))
    with pytest.raises(OverflowError):
        cuda._parameters((x, 2**31))
