"""Compiles and launches CUDA C++ with NVRTC and the CUDA driver. torch uses both too, so nothing else has to be installed.

    SOURCE = Source(__file__, "csrc/v1.cu", TILE=128)        # a file, and the macros to compile it with
    SOURCE.launch("forward", grid, block, w, k, out, T, eps)

Importing this module compiles nothing. The first launch compiles the file for the device's architecture, or reads the compiled
file (cubin) from the user's cache folder. A launch runs on torch's current stream, on the device of its first tensor argument.

A kernel is an `extern "C" __global__ void NAME(...)`. Arguments are passed in order: a tensor as a pointer, an int as `int`, a
float as `float`. Sizes are therefore 32-bit, and a kernel computes 64-bit indices if necessary. A file may include files in
the same folder.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.registry import KernelUnavailable

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
SHARED_DEFAULT = 48 * 1024           # bytes of shared memory per block, unless a kernel opts in to more
VECTOR_BYTES = 16                    # alignment that a float4 load requires
MAX_DYNAMIC_SHARED = 8               # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DRIVER_NAMES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
NVRTC_FILES = ("nvrtc64_*.dll",) if sys.platform == "win32" else ("libnvrtc.so*", "libnvrtc-*.so*")
NVRTC_NAMES = () if sys.platform == "win32" else ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
Size = int | tuple[int, ...]


class Source:
    """A .cu file beside `python_file`, and macros. The file is compiled at the first launch, once per device and process."""

    def __init__(self, python_file: str, name: str, **macros: int) -> None:
        self.path = Path(python_file).parent / name
        self.macros = macros
        self._variants: dict[tuple[int, ...], Source] = {}

    def variant(self, **macros: int) -> "Source":
        """Returns the Source of the same file with different values of some macros. Each set of values is compiled once."""
        values = self.macros | macros
        key = tuple(values.values())
        if key not in self._variants:
            self._variants[key] = Source(str(self.path), self.path.name, **values)
        return self._variants[key]

    def launch(self, kernel: str, grid: Size, block: Size, *args: Tensor | int | float, shared: int = 0) -> None:
        """Runs `kernel` on `grid` blocks of `block` threads, each with `shared` bytes of dynamic shared memory.

        Raises KernelUnavailable if NVRTC is missing or cannot compile the file for the device, RuntimeError if the launch
        fails, and OverflowError if an int does not fit into 32 bits.
        """
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        index = device.index or 0
        with torch.cuda.device(device):
            function = _function(self, kernel, index, shared)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            values = [_parameter(arg) for arg in args]
            addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            error = _driver().cuLaunchKernel(function, *_dims(grid), *_dims(block), shared, stream, addresses, None)
        if error:
            raise RuntimeError(f"{_error_name(error)}: cuda:{index} could not run {kernel} of {self.path.name}, or an earlier "
                               "kernel failed")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) once for the file and for each file that is included, directly or indirectly."""
        waiting = [self.path]
        visited = {self.path}
        while waiting:
            path = waiting.pop()
            text = path.read_text(encoding="utf-8")
            yield path.name, text
            included = {path.parent / name for name in INCLUDE.findall(text)} - visited
            waiting += sorted(included)
            visited |= included

    def __repr__(self) -> str:
        return f"Source({self.path.name}{''.join(f', {name}={value}' for name, value in self.macros.items())})"


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """Compiles `source` for `arch`, such as "sm_90", without a device, and returns (cubin, ptxas's report).

    Raises KernelUnavailable if there is no compiler, or, with the compiler's log, if the file does not compile.
    """
    nvrtc = _nvrtc()
    options = ["--std=c++17", f"--gpu-architecture={arch}", f"--include-path={source.path.parent}", "--ptxas-options=-v",
               *(f"--define-macro={name}={value}" for name, value in source.macros.items())]
    program = ctypes.c_void_p()
    text = source.path.read_text(encoding="utf-8").encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.path.name.encode(), 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        error = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _content(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        report = log.decode(errors="replace").rstrip("\n \0")
        if error:
            reason = nvrtc.nvrtcGetErrorString(error).decode()
            raise KernelUnavailable(f"NVRTC could not compile {source.path.name} for {arch}: {reason}\n{report}".rstrip())
        return _content(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), report
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def why_not() -> str | None:
    """Returns the reason and the remedy if NVRTC or the driver cannot be loaded, or NVRTC does not support the GPU."""
    try:
        _nvrtc()
        _driver()
    except KernelUnavailable as error:
        return error.reason
    return _why_unknown(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _why_unknown(major: int, minor: int) -> str | None:
    """Returns why NVRTC cannot compile for a GPU of this compute capability, or None."""
    number = ctypes.c_int()
    _nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(number))
    supported = (ctypes.c_int * number.value)()
    _nvrtc().nvrtcGetSupportedArchs(supported)
    arch = 10 * major + minor
    if arch in supported:
        return None
    return (f"NVRTC {compiler_version()} compiles for compute capabilities {min(supported) / 10} to {max(supported) / 10}, but "
            f"this GPU has {arch / 10}: install nvidia-cuda-nvrtc of {'an earlier' if arch < min(supported) else 'a later'} "
            "CUDA version")


def align(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy if the address is not aligned for float4 loads, as in a view into a larger buffer."""
    return tensor if tensor.data_ptr() % VECTOR_BYTES == 0 else tensor.clone()


def _content(program: ctypes.c_void_p, size_of: Any, read: Any) -> bytes:
    """Returns the log or the cubin of an NVRTC program.

    Args:
        size_of: the NVRTC function that returns the size.
        read: the NVRTC function that copies the bytes.
    """
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    """Returns the first NVRTC library that can be loaded: torch's, an NVIDIA package's, or the system's.

    Raises KernelUnavailable if no library can be loaded.
    """
    for file in (*_nvrtc_files(), *NVRTC_NAMES):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(file))
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise KernelUnavailable("CUDA kernels require NVRTC, but libnvrtc is not installed: run pip install nvidia-cuda-nvrtc")


def _nvrtc_files() -> list[Path]:
    """Returns the files of NVRTC in torch's folder and NVIDIA's packages, beginning with those of torch's CUDA version."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    folders = [Path(torch.__file__).parent / "lib"]
    folders += [folder for package in packages for part in ("lib", "bin", "bin/x86_64") for folder in package.glob(f"*/{part}")]
    files = sorted(file for folder in folders for pattern in NVRTC_FILES for file in folder.glob(pattern)
                   if "builtins" not in file.name)
    own = torch.version.cuda.partition(".")[0] if torch.version.cuda else ""
    return sorted(files, key=lambda file: re.search(rf"(\.so\.|64_){own}", file.name) is None)


@cache
def _driver() -> ctypes.CDLL:
    for name in DRIVER_NAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise KernelUnavailable("CUDA kernels require NVIDIA's driver, but libcuda is not installed: install the driver")


def _error_name(error: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(error, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {error}"


def _check(error: int, action: str) -> None:
    if error:
        raise KernelUnavailable(f"{action}: {_error_name(error)}")


def _function(source: Source, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """Returns the kernel's handle, after giving the device's context to a thread without one, such as an autograd thread."""
    context = ctypes.c_void_p()
    driver = _driver()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check(driver.cuCtxSetCurrent(_primary_context(device)), f"cuda:{device} has no context")
    return _kernel(source, name, device, shared)


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"cuda:{device} has no context")
    return context


@cache
def _kernel(source: Source, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """Returns the kernel's handle on a device. Raises the limit of dynamic shared memory to `shared` bytes if necessary."""
    driver = _driver()
    kernel = ctypes.c_void_p()
    function = ctypes.c_void_p()
    failed = f"cuda:{device} could not load {name} of {source.path.name}"
    _check(driver.cuLibraryGetKernel(ctypes.byref(kernel), _library(source, device), name.encode()), failed)
    if shared > SHARED_DEFAULT:
        _allow_shared(kernel, device, shared)
    _check(driver.cuKernelGetFunction(ctypes.byref(function), kernel), failed)
    return function


@cache
def _library(source: Source, device: int) -> ctypes.c_void_p:
    """Returns the loaded cubin, which is never unloaded, because the handles of the kernels are cached."""
    major, minor = torch.cuda.get_device_capability(device)
    library = ctypes.c_void_p()
    cubin = _cached_cubin(source, f"sm_{major}{minor}")
    _check(_driver().cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0),
           f"cuda:{device} could not load {source.path.name}")
    return library


def _allow_shared(kernel: ctypes.c_void_p, device: int, shared: int) -> None:
    """Raises the kernel's limit of shared memory to `shared` bytes. Never lowers it, because other launches may need more."""
    driver = _driver()
    before = ctypes.c_int()
    driver.cuKernelGetAttribute(ctypes.byref(before), MAX_DYNAMIC_SHARED, kernel, device)
    if driver.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, max(shared, before.value), kernel, device):
        raise KernelUnavailable(f"a block of this kernel requires {shared} bytes of shared memory, but cuda:{device} has less")


def _dims(size: Size) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, *(1,) * (3 - len(sizes)))


def _parameter(arg: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    if not -2**31 <= arg < 2**31:
        raise OverflowError(f"an int argument of a CUDA kernel must fit into 32 bits; got {arg}")
    return ctypes.c_int(arg)


@cache
def _cached_cubin(source: Source, arch: str) -> bytes:
    path = cache_folder() / f"{_cache_key(source, arch)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin, _ = compile_cubin(source, arch)
        _write(path, cubin)
    return cubin


def cache_folder() -> Path:
    """Returns ~/.cache/timemix/cuda, or a path that cannot exist if the user has no home directory.

    Without a home directory there is no cache, because other users could replace files in /tmp.
    """
    try:
        return Path.home() / ".cache" / "timemix" / "cuda"
    except RuntimeError:
        return Path(os.devnull) / "timemix"


def _cache_key(source: Source, arch: str) -> str:
    parts = [arch, compiler_version(), repr(source.macros), *(text for pair in source.texts() for text in pair)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compiler_version() -> str:
    """Returns NVRTC's version, such as "13.0". Raises KernelUnavailable if NVRTC is not installed."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _read(path: Path) -> bytes | None:
    """Returns the cubin after its SHA-256 in the file, or None if the file is unreadable or the hash does not match."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest = content[:32]
    cubin = content[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Writes the file atomically, because other processes may write the same file. Ignores a folder that is not writable."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(file.name).replace(path)
