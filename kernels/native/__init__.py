"""Calls the C kernels, in a prebuilt shared library for each system, so that users need no compiler.

    run("wkv4_forward_float32", threads, B, T, C, ...)

calls a C function with a struct of 64-bit numbers and addresses. A level is a set of vector instructions. A library
contains every function once for each level, and `run` calls the function for the highest level that this CPU supports.
`python -m kernels.native.build` builds the libraries, which are in lib/.
"""

import ctypes
import platform
import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels.registry import KernelUnavailable

if TYPE_CHECKING:                        # build.py runs without torch
    from torch import Tensor

FOLDER = Path(__file__).parent / "lib"
LEVELS = {"x86_64": ("avx2", "avxvnni", "avx512", "avx512bf16"), "aarch64": ("neon", "neondot")}  # ascending, as in levels.c
SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
CALL = re.compile(r'\brun\(\s*f?"(\w+)')           # matches a function's name, or, in an f-string, its part before {
SUFFIXES = {"linux": "so", "macos": "dylib", "windows": "dll"}


class Target(NamedTuple):
    """The platform of a library. `machine` is a key of LEVELS, and `system` is a key of SUFFIXES."""

    machine: str
    system: str

    @property
    def path(self) -> Path:
        return FOLDER / f"timemix.{self.machine}-{self.system}.{SUFFIXES[self.system]}"


TARGETS = (Target("x86_64", "linux"), Target("aarch64", "linux"), Target("aarch64", "macos"), Target("x86_64", "macos"),
           Target("x86_64", "windows"))


def why_not() -> str | None:
    """Returns one sentence that states why the C kernels cannot run here, or None."""
    library = _library()
    return library if isinstance(library, str) else None if level() else (
        f"the C kernels require a CPU with {LEVELS[_here().machine][0].upper()} (use another kernel)")


@cache
def levels() -> tuple[str, ...]:
    """Returns the levels that this CPU supports, in ascending order, or () if there is no library."""
    library = _library()
    supported = 0 if isinstance(library, str) else library.timemix_levels()              # a bit mask
    return tuple(name for i, name in enumerate(LEVELS.get(_here().machine, ())) if supported >> i & 1)


def level() -> str | None:
    """Returns the highest level that this CPU supports, or None."""
    return levels()[-1] if levels() else None


def has_amx() -> bool:
    """Returns True if int8 products use AMX: on Linux, on a CPU with AMX, at the highest level."""
    function = getattr(_library(), "timemix_has_amx", None)
    return function is not None and level() == LEVELS["x86_64"][-1] and bool(function())


def run(name: str, threads: int, *arguments: "int | float | Tensor | None") -> None:
    """Calls a C function, which may use up to `threads` threads.

    `arguments` are the fields of the function's struct, in order. A float is passed as a double, a tensor as the address of the
    first number, and None as a null pointer. Raises KernelUnavailable if the library does not contain the function, ValueError
    if a tensor is not in CPU memory, and AssertionError if the struct has a different number of fields.
    """
    call = (ctypes.c_int64 * len(arguments))(*map(number, arguments))
    function = _function(name, _required_level())
    require_size(name, len(arguments))
    function(call, threads)


def size_of(name: str) -> int:
    """Returns the size of a C struct in bytes. Raises KernelUnavailable if the library does not export the size.

    `name` is that of a struct exported with EXPORT_SIZE(name, ...), or of a function, which has an argument struct.
    """
    return _size(name, _required_level())


def require_size(name: str, numbers: int) -> None:
    """Raises AssertionError unless the C struct `name` has the size of `numbers` 64-bit numbers."""
    size = size_of(name)
    assert size == 8 * numbers, (f"the struct of {name} must have the same fields in C and in Python; "
                                 f"got {size} bytes in C, {8 * numbers} in Python")


def threads_for(tasks: int) -> int:
    """Returns the number of threads for a loop over `tasks`, which is torch's number, but at most one per task."""
    import torch

    return min(tasks, torch.get_num_threads())


def number(argument: "int | float | Tensor | None") -> int:
    """Returns the argument as a 64-bit integer: a tensor's address, the bits of a double, or the integer itself.

    Raises ValueError unless a tensor is dense and in CPU memory.
    """
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<d", argument), "little", signed=True)
    if argument is None or isinstance(argument, int):
        return argument or 0
    if not argument.is_cpu or str(argument.layout) != "torch.strided":
        raise ValueError(f"C kernels require dense tensors on the CPU; got {argument.layout} on {argument.device}")
    address = argument.data_ptr()
    if address == 0 and argument.numel():            # a subclass such as FakeTensor
        raise ValueError(f"C kernels require tensors with memory of their own; got a {type(argument).__name__}")
    return address


def not_built(file: Path) -> str | None:
    """Returns the first function that a file calls with native.run but this system's library lacks, or None."""
    names = CALL.findall(file.read_text(encoding="utf-8"))
    try:
        library = _here().path.read_bytes()
    except OSError:
        return None                      # why_not() reports the error
    return next((name for name in names if name.encode() not in library), None)


@cache
def _function(name: str, level: str) -> Callable[[Any, int], None]:
    try:
        function = getattr(_library(), f"{name}_{level}")
    except AttributeError:               # the library was not rebuilt after a change of C
        raise KernelUnavailable(f"the C library has no function {name} for {level}: define ENTRY({name}, struct call) in a "
                                "csrc folder, and run make native") from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    function.restype = None
    return function


@cache
def _size(name: str, level: str) -> int:
    try:
        return ctypes.c_int64.in_dll(_library(), f"size_of_{name}_{level}").value
    except ValueError:
        raise KernelUnavailable(f"the C library has no size of {name}: export the size with EXPORT_SIZE({name}, struct ...), "
                                "and run make native") from None


def _required_level() -> str:
    required = level()
    assert required is not None, why_not()
    return required


def _here() -> Target:
    return Target(MACHINES.get(platform.machine().lower(), platform.machine()), SYSTEMS.get(sys.platform, sys.platform))


@cache
def _library() -> Any:
    """Returns the loaded library or, as a text, the reason why there is no library."""
    here = _here()
    if here not in TARGETS:
        supported = ", ".join(f"{target.system} on {target.machine}" for target in TARGETS)
        return f"the C kernels do not support {here.system} on {here.machine}, only {supported} (use another kernel)"
    try:
        return ctypes.CDLL(str(here.path))
    except OSError as error:
        return f"the C kernels cannot be loaded ({error}): use another kernel"
