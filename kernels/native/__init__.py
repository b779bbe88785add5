"""The C kernels: one shared library for each system, in lib/, which comes with the package. Users need no compiler.

    run("wkv4_forward_float32", threads, B, T, C, ...)

calls a C function with a struct of 64-bit numbers and addresses. Each function is in the library once for each of LEVELS, sets
of vector instructions; `level` is the best that this CPU has. `python -m kernels.native.build` makes the libraries.
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

if TYPE_CHECKING:                        # build.py runs in an environment without torch
    from torch import Tensor

FOLDER = Path(__file__).parent / "lib"
LEVELS = {"x86_64": ("avx2", "avx512", "avx512bf16"), "aarch64": ("neon", "neondot")}     # the best last, from 1 in levels.c
SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
CALLED = re.compile(r'\brun\(\s*f?"(\w+)')         # a function's name, or its beginning before a {
SUFFIXES = {"linux": "so", "macos": "dylib", "windows": "dll"}


class Target(NamedTuple):
    """What a library is for: a machine of LEVELS and a system of SUFFIXES."""

    machine: str
    system: str

    @property
    def path(self) -> Path:
        return FOLDER / f"timemix.{self.machine}-{self.system}.{SUFFIXES[self.system]}"


TARGETS = (Target("x86_64", "linux"), Target("aarch64", "linux"), Target("aarch64", "macos"), Target("x86_64", "macos"),
           Target("x86_64", "windows"))


def why_not() -> str | None:
    """None where the C kernels run, otherwise the reason in one sentence."""
    library = _library()
    return library if isinstance(library, str) else None if level() else (
        f"the C kernels need a CPU with {LEVELS[_here().machine][0].upper()}, which this one lacks (use another kernel)")


@cache
def levels() -> tuple[str, ...]:
    """Those of LEVELS whose instructions this CPU has, the best last; none where there is no library."""
    library = _library()
    return () if isinstance(library, str) else LEVELS[_here().machine][:library.timemix_level()]


def level() -> str | None:
    """The best of levels(); None where there is none."""
    return levels()[-1] if levels() else None


def run(name: str, threads: int, *arguments: "int | float | Tensor | None") -> None:
    """Calls the C function of that name for this CPU, on up to `threads` threads. arguments: as its struct call lists them, a
    float as a double; a tensor is the address of its first number, None the null address. Raises KernelUnavailable where the
    library has no such function, and ValueError for a tensor that is not in the CPU's memory."""
    of_level = level()
    assert of_level is not None, why_not()
    call = (ctypes.c_int64 * len(arguments))(*map(number, arguments))
    _function(name, of_level)(call, threads)


def threads_for(tasks: int) -> int:
    """As many threads as torch uses, and at most one for each task."""
    import torch

    return min(tasks, torch.get_num_threads())


def number(argument: "int | float | Tensor | None") -> int:
    """The argument as a 64-bit number: an address, the bits of a double, or the integer itself.

    Raises ValueError for a tensor that is not dense in the CPU's memory.
    """
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<d", argument), "little", signed=True)
    if argument is None or isinstance(argument, int):
        return argument or 0
    if not argument.is_cpu or str(argument.layout) != "torch.strided":
        raise ValueError(f"C reads dense tensors on the CPU; got one on {argument.device}, {argument.layout}")
    return argument.data_ptr()


def not_built(file: Path) -> str | None:
    """The first function that a kernel's file calls with native.run and that this system's library does not contain."""
    names = CALLED.findall(file.read_text(encoding="utf-8"))
    try:
        library = _here().path.read_bytes()
    except OSError:
        return None                      # why_not() says so
    return next((name for name in names if name.encode() not in library), None)


@cache
def _function(name: str, of_level: str) -> Callable[[Any, int], None]:
    try:
        function = getattr(_library(), f"{name}_{of_level}")
    except AttributeError:               # an author's, who has written the C and not built it
        raise KernelUnavailable(f"the C library has no function {name} for {of_level}: name it ENTRY({name}) in a file in a "
                                "csrc folder, and run make native") from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    function.restype = None
    return function


def _here() -> Target:
    return Target(MACHINES.get(platform.machine().lower(), platform.machine()), SYSTEMS.get(sys.platform, sys.platform))


@cache
def _library() -> Any:
    """The opened library, or the reason why there is none."""
    here = _here()
    if here not in TARGETS:
        there_are = ", ".join(f"{target.system} on {target.machine}" for target in TARGETS)
        return f"the C kernels are made for {there_are}, not for {here.system} on {here.machine} (use another kernel)"
    try:
        return ctypes.CDLL(str(here.path))
    except OSError as error:
        return f"the C kernels cannot be opened ({error}): use another kernel"
