"""The one place that compiles CUDA C++: with NVRTC, through cuda.core. Neither nvcc nor a host compiler is needed.

    SOURCE = Source(__file__, "csrc/v1.cu", TILE=128)        # a file, and the macros to compile it with
    SOURCE.launch("forward", grid, block, w, k, out, T, eps)

Importing compiles nothing. The first launch compiles the file for the device's architecture, or reads the cubin from the
user's cache folder. Every launch is on torch's current stream of the device of its first tensor.

A kernel is an `extern "C" __global__ void NAME(...)`. Arguments are passed in order: a tensor as a pointer, an int as `int`, a
float as `float`. Sizes are therefore 32-bit; a kernel that needs longer indices computes them. A file may include files beside
it.
"""

import contextlib
import ctypes
import hashlib
import importlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.registry import KernelUnavailable

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
SHARED_DEFAULT = 48 * 1024           # bytes of shared memory that a block may have without asking for more
VECTOR_BYTES = 16                    # alignment of a float4 load
Size = int | tuple[int, ...]


class Source:
    """A .cu file beside `python_file`, with its macros. It is compiled at the first launch, once per device and process."""

    def __init__(self, python_file: str, name: str, **macros: int) -> None:
        self.path = Path(python_file).parent / name
        self.macros = macros
        self._variants: dict[tuple[int, ...], Source] = {}

    def variant(self, **macros: int) -> "Source":
        """The same file with other values of some macros: one object, and one compilation, for each set of values."""
        values = self.macros | macros
        key = tuple(values.values())
        if key not in self._variants:
            self._variants[key] = Source(str(self.path), self.path.name, **values)
        return self._variants[key]

    def launch(self, kernel: str, grid: Size, block: Size, *args: Tensor | int | float, shared: int = 0) -> None:
        """Runs `kernel` on `grid` blocks of `block` threads, each with `shared` bytes of dynamic shared memory.

        Raises KernelUnavailable if NVRTC is missing or cannot compile the file for the device, RuntimeError if the launch
        fails, OverflowError for an int beyond 32 bits.
        """
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.cuda.device(device):
            function = _function(self, kernel, device.index, shared)
            stream = torch.cuda.current_stream().cuda_stream
            (error,) = _driver().cuLaunchKernel(function, *_three(grid), *_three(block), shared, stream, _parameters(args), 0)
        if error:
            raise RuntimeError(f"{error.name}: cuda:{device.index} did not run {kernel} of {self.path.name}, or failed in a "
                               "kernel before it")

    def texts(self) -> Iterator[tuple[str, str]]:
        """(name, text) of the file and of every file that it includes, directly or not, each once."""
        waiting = [self.path]
        seen = {self.path}
        while waiting:
            path = waiting.pop()
            text = path.read_text(encoding="utf-8")
            yield path.name, text
            included = {path.parent / name for name in INCLUDE.findall(text)} - seen
            waiting += sorted(included)
            seen |= included

    def __repr__(self) -> str:
        return f"Source({self.path.name}{''.join(f', {name}={value}' for name, value in self.macros.items())})"


def compile_cubin(source: Source, arch: str) -> tuple[bytes, str]:
    """(cubin, ptxas's report) of `source` for `arch`, such as "sm_90". Needs no device and queries none.

    Raises KernelUnavailable with the compiler's log if the file does not compile, and if there is no compiler.
    """
    macros = [(name, str(value)) for name, value in source.macros.items()]
    options = _core().ProgramOptions(std="c++17", arch=arch, name=source.path.name, include_path=str(source.path.parent),
                                     define_macro=macros or None, ptxas_options=["-v"])
    text = source.path.read_text(encoding="utf-8")
    report = io.StringIO()
    with _compiler_errors(source, arch):
        program = _core().Program(text, "c++", options)
        return bytes(program.compile("cubin", logs=report).code), report.getvalue()


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it if its address is not aligned for float4 loads (a view into a larger buffer)."""
    return tensor if tensor.data_ptr() % VECTOR_BYTES == 0 else tensor.clone()


@cache
def _core() -> ModuleType:
    """The module cuda.core, or cuda.core.experimental before version 1.0. Raises KernelUnavailable if a part is missing."""
    try:
        module = importlib.import_module("cuda.core")
        return module if hasattr(module, "launch") else importlib.import_module("cuda.core.experimental")
    except ImportError as error:
        raise KernelUnavailable(f"CUDA kernels need cuda-core, and it does not start ({error}): "
                                "pip install -e '.[cuda]'") from error


@contextlib.contextmanager
def _compiler_errors(source: Source, arch: str) -> Iterator[None]:
    """Turns cuda.core's errors, which have no common class, into KernelUnavailable: a missing library or a compiler error."""
    try:
        yield
    except Exception as error:
        log = str(error).rstrip("\n \0")
        raise KernelUnavailable(f"NVRTC could not compile {source.path.name} for {arch}: {log}") from error


def _function(source: Source, name: str, device: int, shared: int) -> Any:
    """The kernel's handle. A thread without a context, such as a new one of autograd's, first gets the device's."""
    driver = _driver()
    _, context = driver.cuCtxGetCurrent()
    if not int(context):
        _core().Device(device).set_current()
    function, _ = _kernel(source, name, device, shared)
    return function


@cache
def _kernel(source: Source, name: str, device: int, shared: int) -> tuple[Any, Any]:
    """The kernel's handle on one device, and its library: without that the handle is not valid.

    The kernel's limit of dynamic shared memory is raised to `shared` bytes if needed.
    """
    driver = _driver()
    library = _library(source, device)
    kernel = driver.CUkernel(int(library.get_kernel(name).handle))
    if shared > SHARED_DEFAULT:
        _allow_shared(kernel, device, shared)
    error, function = driver.cuKernelGetFunction(kernel)
    if error:
        raise KernelUnavailable(f"cuda:{device} does not load {name} of {source.path.name}: {error.name}")
    return function, library


@cache
def _library(source: Source, device: int) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    return _core().ObjectCode.from_cubin(_cubin(source, f"sm_{major}{minor}"))


@cache
def _driver() -> ModuleType:
    """CUDA's driver. Its functions return an error code, which is false where there is none, and then what else they return."""
    _core()                              # its error names the packages and how to install them
    return importlib.import_module("cuda.bindings.driver")


def _allow_shared(kernel: Any, device: int, shared: int) -> None:
    """Raises the kernel's limit of shared memory to `shared` bytes; never lowers it, as another launch may need more."""
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    gpu = driver.CUdevice(device)
    _, before = driver.cuKernelGetAttribute(attribute, kernel, gpu)
    (error,) = driver.cuKernelSetAttribute(attribute, max(shared, before), kernel, gpu)
    if error:
        raise KernelUnavailable(f"a block of this kernel needs {shared} bytes of shared memory, and cuda:{device} has less")


def _three(size: Size) -> tuple[int, ...]:
    """A size of a grid or block in all three directions."""
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, *(1,) * (3 - len(sizes)))


def _parameters(args: tuple[Tensor | int | float, ...]) -> tuple[tuple[int | float, ...], tuple[type, ...]]:
    """The arguments' values and C types, as the driver takes them."""
    values: list[int | float] = []
    types: list[type] = []
    for arg in args:
        if isinstance(arg, Tensor):
            values.append(arg.data_ptr())
            types.append(ctypes.c_void_p)
        elif isinstance(arg, int):
            if not -2**31 <= arg < 2**31:
                raise OverflowError(f"a CUDA kernel's int has 32 bits, got {arg}")
            values.append(arg)
            types.append(ctypes.c_int)
        else:
            values.append(arg)
            types.append(ctypes.c_float)
    return tuple(values), tuple(types)


@cache
def _cubin(source: Source, arch: str) -> bytes:
    """The compiled source, read from the cache folder, or compiled and written there."""
    path = cache_folder() / f"{_key(source, arch)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin, _ = compile_cubin(source, arch)
        _write(path, cubin)
    return cubin


def cache_folder() -> Path:
    """~/.cache/timemix/cuda. Without a home directory: a path that cannot be used, since others can write into /tmp."""
    try:
        return Path.home() / ".cache" / "timemix" / "cuda"
    except RuntimeError:
        return Path(os.devnull) / "timemix"


def _key(source: Source, arch: str) -> str:
    """A hash of everything that a cubin depends on."""
    parts = [arch, compiler_version(), repr(source.macros), *(text for pair in source.texts() for text in pair)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compiler_version() -> str:
    """NVRTC's version, such as "13.0". Raises KernelUnavailable if it is not installed."""
    try:
        from cuda.bindings import nvrtc

        return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    except (ImportError, RuntimeError) as error:
        raise KernelUnavailable(f"CUDA kernels need NVRTC, and it is not there ({str(error).splitlines()[0]}): "
                                "pip install nvidia-cuda-nvrtc") from error


def _read(path: Path) -> bytes | None:
    """The cubin in the file, after its SHA-256; None if the file is missing, unreadable or does not match its hash."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest = content[:32]
    cubin = content[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Writes the file atomically, since other processes may write it too. Does nothing if the folder cannot be used."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(file.name).replace(path)
