"""Tests without a GPU that every CUDA source compiles, and that it takes no more resources than cuda_resources.txt states.

make test compiles for sm_90; make soak compiles for sm_80 and sm_120, for wide heads, and with nvcc. The launches and the
cache of kernels/backends/cuda.py are tested as well.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_resources import ROOT, TABLE, is_wide, measure, name_of, read_table, sources

from kernels.backends import cuda
from kernels.backends.cuda import Source, compile_cubin, compiler_version
from kernels.registry import KernelUnavailable

NVCC = shutil.which("nvcc") if shutil.which("g++") else None         # nvcc requires a host compiler
pytestmark = pytest.mark.compiles
WRITE = f"PYTHONPATH=. python tests/cuda_resources.py > tests/{TABLE.name}"


@pytest.fixture(scope="module")
def nvrtc() -> str:
    """Returns the version of NVRTC, or skips the test if NVRTC is not installed."""
    try:
        return compiler_version()
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Returns a source file that has two kernels, a header and a macro."""
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


@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.soak) for arch in ("sm_80", "sm_120"))])
@pytest.mark.parametrize("source", [
    pytest.param(source, id=name_of(source), marks=[pytest.mark.soak] * (is_wide(source) or source.macros.get("BFLOAT16") == 0))
    for source in sources()])
def test_registers_shared_memory_and_spills(source: Source, arch: str, nvrtc: str) -> None:
    """A kernel takes no more than the table states for this compiler version; kernels not in the table spill nothing."""
    version, table = read_table()
    for kernel, resources in measure(source, arch).items():
        allowed = table.get(kernel)
        if allowed is None:
            assert resources.spilled == 0, f"{kernel} spills: write the reason into the source, and the table by {WRITE}"
        elif version == nvrtc:
            exceeds = [now > before for now, before in zip(resources, allowed, strict=True)]
            assert not any(exceeds), f"{kernel} takes {resources}, more than {allowed}; if that is meant: {WRITE}"


def test_the_table_has_only_kernels_that_exist() -> None:
    known = {name_of(source) for source in sources()}
    assert {kernel.source for kernel in read_table()[1]} <= known, WRITE


@pytest.mark.soak
@pytest.mark.skipif(not NVCC, reason="needs nvcc and g++")
@pytest.mark.parametrize("source", sources(), ids=name_of)
def test_nvcc_agrees(source: Source, tmp_path: Path) -> None:
    """nvcc accepts every source without a warning, so that a user with a CUDA toolkit can profile and debug it."""
    assert NVCC
    macros = [f"-D{name}={value}" for name, value in source.macros.items()]
    process = subprocess.run([NVCC, "-arch=sm_80", "-cubin", "-std=c++17", "-Werror", "all-warnings", *macros,
                              "-o", str(tmp_path / "cubin"), str(source.path)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_a_cubin_is_compiled_once(source: Source, cache: Path, nvrtc: str) -> None:
    cubin = cuda._cached_cubin.__wrapped__(source, "sm_80")
    assert cubin.startswith(b"\x7fELF")
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    assert cuda._cached_cubin.__wrapped__(source, "sm_80") == cubin
    assert [(path.suffix, path.stat().st_mtime_ns) for path in cache.iterdir()] == [(".cubin", written)]


def test_an_incomplete_cubin_is_compiled_again(source: Source, cache: Path, nvrtc: str) -> None:
    cubin = cuda._cached_cubin.__wrapped__(source, "sm_80")
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert cuda._cached_cubin.__wrapped__(source, "sm_80") == cubin == path.read_bytes()[32:]


def test_a_cache_folder_that_cannot_be_used_is_not_an_error(source: Source, cache: Path, nvrtc: str) -> None:
    cache.write_text("a file where the folder should be")
    assert cuda._cached_cubin.__wrapped__(source, "sm_80").startswith(b"\x7fELF")


def test_a_user_without_a_home_compiles_each_time(source: Source, nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cuda._cached_cubin.__wrapped__(source, "sm_80").startswith(b"\x7fELF")
    assert not cuda.cache_folder().exists()


def test_the_key_depends_on_everything_that_determines_the_cubin(source: Source, nvrtc: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    other_macro = Source(str(source.path.parent / "small.py"), "small.cu", N=4)
    keys = [cuda._cache_key(source, "sm_80"), cuda._cache_key(source, "sm_90"), cuda._cache_key(other_macro, "sm_80")]
    header = source.path.parent / "twice.cuh"
    header.write_text(header.read_text().replace("2", "2.0f"))
    keys.append(cuda._cache_key(source, "sm_80"))
    monkeypatch.setattr(cuda, "compiler_version", lambda: "1.0")
    keys.append(cuda._cache_key(source, "sm_80"))
    assert len(set(keys)) == len(keys)


def test_compiler_errors_are_shown(source: Source, nvrtc: str) -> None:
    with pytest.raises(KernelUnavailable, match=r"(?s)small\.cu for sm_30: .*gpu-architecture"):
        compile_cubin(source, "sm_30")
    source.path.write_text('extern "C" __global__ void broken(float* x) { x[0] = y; }')
    with pytest.raises(KernelUnavailable, match=r'(?s)small\.cu for sm_80: .*identifier "y" is undefined'):
        compile_cubin(source, "sm_80")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("capability", "words"), [((5, 2), "this GPU has 5.2: .* an earlier"), ((99, 0), "99.0: .* a later")])
def test_a_gpu_that_nvrtc_does_not_know_leaves_auto_another_kernel(capability: tuple[int, int], words: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """If auto chose a CUDA kernel, the run would fail when the kernel is compiled."""
    monkeypatch.setattr(cuda, "_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert cuda.why_not() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert re.search(words, cuda.why_not() or "")


def test_without_nvrtc_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda._nvrtc.cache_clear()
    monkeypatch.setattr(cuda, "_nvrtc_files", list)
    monkeypatch.setattr(cuda, "NVRTC_NAMES", ("libno_such_nvrtc.so",))
    try:
        assert "pip install nvidia-cuda-nvrtc" in (cuda.why_not() or "")
    finally:
        cuda._nvrtc.cache_clear()


FAKE_DRIVER = r'''
#include <stdio.h>
#include <string.h>
// A driver whose one kernel is `void second(float* x, int i, float y) { x[i] = y; }`, run at the launch
static void *current = 0;
static int limit = 49152, fail = 0;
static char log_[4096];
#define LOG(...) snprintf(log_ + strlen(log_), sizeof log_ - strlen(log_), __VA_ARGS__)
const char *fake_log(void) { return log_; }
void fake_fail(int error) { fail = error; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; LOG("context %p;", context); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    LOG("retain %d;", device); *context = (void *)0x500000001; return 0; }
int cuLibraryLoadData(void **library, const char *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    LOG("load %.3s %d;", code + 1, !a && !b && !n && !c && !d && !m); *library = (void *)0x700000002; return 0; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    LOG("kernel %p %s;", library, name); *kernel = (void *)0x800000003; return strcmp(name, "second") ? 500 : 0; }
int cuKernelGetFunction(void **function, void *kernel) {
    LOG("function %p;", kernel); *function = (void *)0x900000004; return 0; }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = limit; return attribute != 8; }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    LOG("shared %d;", value); if (value > 101376) return 1; limit = value; return attribute != 8; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **p, void **extra) {
    LOG("launch %p %u,%u,%u %u,%u,%u %u %p %d;", function, gx, gy, gz, bx, by, bz, shared, stream, extra == 0);
    if (!fail) (*(float **)p[0])[*(int *)p[1]] = *(float *)p[2];
    return fail; }
int cuGetErrorName(int error, const char **name) {
    *name = error == 500 ? "CUDA_ERROR_NOT_FOUND" : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : 0; return 0; }
'''


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Replaces NVIDIA's driver with one that records its calls; the device has capability 8.0, and its memory is the CPU's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "driver.so", tmp_path / "driver.c"], check=True)
    library = ctypes.CDLL(str(tmp_path / "driver.so"))
    library.fake_log.restype = ctypes.c_char_p
    caches = (cuda._driver, cuda._primary_context, cuda._kernel, cuda._library)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(cuda, "DRIVER_NAMES", (str(tmp_path / "driver.so"),))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x600000005))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    yield library
    for cached in caches:
        cached.cache_clear()


def test_a_launch(source: Source, cache: Path, nvrtc: str, driver: ctypes.CDLL) -> None:
    """Two launches retain the context once and load the cubin once. The driver receives all handles and numbers unchanged."""
    x = torch.zeros(3)
    source.launch("second", (5, 2), 32, x, 2, 0.5)
    source.launch("second", 7, (8, 4, 2), x, -3 + 4, -1.5, shared=64)
    assert x.tolist() == [0.0, -1.5, 0.5]
    assert driver.fake_log().decode().split(";")[:-1] == [
        "retain 0", "context 0x500000001", "load ELF 1", "kernel 0x700000002 second", "function 0x800000003",
        "launch 0x900000004 5,2,1 32,1,1 0 0x600000005 1", "kernel 0x700000002 second", "function 0x800000003",
        "launch 0x900000004 7,1,1 8,4,2 64 0x600000005 1"]


def test_the_limit_on_shared_memory_is_raised_but_never_lowered(source: Source, cache: Path, nvrtc: str,
                                                                driver: ctypes.CDLL) -> None:
    x = torch.zeros(1)
    for shared in (49152, 60000, 50000):
        source.launch("second", 1, 1, x, 0, 1.0, shared=shared)
    assert [call for call in driver.fake_log().decode().split(";") if call.startswith("shared")] == ["shared 60000"] * 2
    with pytest.raises(KernelUnavailable, match="requires 200000 bytes of shared memory, but cuda:0 has less"):
        source.launch("second", 1, 1, x, 0, 1.0, shared=200000)


def test_an_error_of_the_driver_is_named(source: Source, cache: Path, nvrtc: str, driver: ctypes.CDLL) -> None:
    x = torch.zeros(1)
    with pytest.raises(KernelUnavailable, match=r"cuda:0 could not load first of small\.cu: CUDA_ERROR_NOT_FOUND"):
        source.launch("first", 1, 1, x)
    driver.fake_fail(700)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS: cuda:0 could not run second of small\.cu"):
        source.launch("second", 1, 1, x, 0, 1.0)
    driver.fake_fail(12345)
    with pytest.raises(RuntimeError, match="CUDA error 12345"):
        source.launch("second", 1, 1, x, 0, 1.0)
    with pytest.raises(OverflowError):
        source.launch("second", 1, 1, x, 2**31, 1.0)
