"""Finds the implementations of operators. The implementation NAME of the operator OP is the file kernels/OP/NAME.py.

Back ends are imported only when an implementation is loaded, and devices are queried only when one is selected.
"""

import importlib
import importlib.util
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:                        # kernels can be listed without torch
    import torch

NOT_IMPLEMENTATIONS = {"__init__", "cases"}
COMPOSED = {"wkv4": "timex"}             # operator -> the operator from which it can also be composed
LAST_PYTHON = {"taichi": (3, 13)}        # package -> the newest Python for which it has wheels
COMPILERS = {"darwin": "clang++", "win32": "cl"}     # torch.compile's default C++ compilers; on other systems g++


class UnknownKernel(ValueError):
    """Raised if the operator has no implementation of this name."""


class KernelUnavailable(RuntimeError):
    """Raised if an implementation cannot run here.

    Args:
        reason: the cause and the remedy, which begin the message.
        instead: a sentence about the implementations that can run here, which ends the message.
    """

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(f"{reason}. {instead}" if instead else reason)
        self.reason = reason


def _float32() -> "tuple[torch.dtype, ...]":
    import torch

    return (torch.float32,)


@dataclass(frozen=True)
class Requires:
    """The requirements of an implementation. Operators pad, cast or reject their inputs accordingly.

    Attributes:
        packages: the required packages besides torch.
        devices: the supported torch device types.
        dtypes: the supported dtypes. Inputs of other floating-point dtypes are cast to float32, and the results are cast back.
        formats: the supported packed formats (matvec).
        rounded: the input dtypes to which the implementation also rounds intermediate results, including states. The operator's
            cases.py has larger tolerances for these dtypes.
        T_multiple, N_multiple: callers pad T and N to multiples of these numbers.
        N_sizes: all supported N in ascending order. Callers pad N to the next supported size.
        wkv: whether the quotient of two convolutions is numerically sound, so that WKV can be composed of the kernel (timex).
        compiled: whether the implementation uses torch.compile, which requires a C++ compiler, and on CUDA also Triton.
        scripted: whether the implementation uses torch.jit.script, which torch has deprecated.
        why_not: a function that returns the reason why this machine cannot run the implementation, with the remedy, or None.
    """

    packages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: "tuple[torch.dtype, ...]" = field(default_factory=_float32)
    formats: tuple[str, ...] = ()
    rounded: "tuple[torch.dtype, ...]" = ()
    T_multiple: int = 1
    N_multiple: int = 1
    N_sizes: tuple[int, ...] = ()
    wkv: bool = True
    compiled: bool = False
    scripted: bool = False
    why_not: "Callable[[], str | None] | None" = None

    def __post_init__(self) -> None:
        for name in ("packages", "devices", "dtypes", "formats", "rounded", "N_sizes"):
            if not isinstance(getattr(self, name), tuple):           # ("taichi") is a string
                raise TypeError(f"{name} must be a tuple, such as (x,); got {getattr(self, name)!r}")


@cache
def operators() -> tuple[str, ...]:
    """Returns the names of all operators.

    An operator is a folder beside this file with an __init__.py (the interface) and a cases.py (shapes and tolerances).
    """
    folders = (path.parent for path in sorted(Path(__file__).parent.glob("*/cases.py")))
    return tuple(folder.name for folder in folders if (folder / "__init__.py").exists())


@cache
def names(op: str) -> tuple[str, ...]:
    """Returns the names of all implementations of `op` ("timex", "wkv4", ...), whether or not they can run here."""
    folder = Path(__file__).parent / op
    stems = (path.stem for path in sorted(folder.glob("*.py")))
    return tuple(stem for stem in stems if stem not in NOT_IMPLEMENTATIONS and not stem.startswith(("_", ".")))


def all_names(op: str) -> set[str]:
    """Returns the names of the implementations of `op`, and of the operator of which `op` can be composed, if any.

    kernels.select may reject some names of the other operator. The file that composes the two, wkv4/timex.py, is not included.
    """
    inner = COMPOSED.get(op)
    return {*names(op), *(names(inner) if inner else ())} - {inner}


@cache
def load(op: str, name: str) -> ModuleType:
    """Returns the module kernels/OP/NAME.py. Raises UnknownKernel if the file does not exist.

    Raises KernelUnavailable if a package is missing, if the file cannot be imported, or if the file lacks a function that the
    operator requires.
    """
    if name not in names(op):
        raise UnknownKernel(f"{op} has no implementation {name!r}: choose one of {', '.join(names(op))}")
    if not name.isidentifier():          # the name is part of a torch operator's name
        raise KernelUnavailable(f"kernels/{op}/{name}.py must have a name of letters, digits and underscores")
    try:
        module = importlib.import_module(f"kernels.{op}.{name}")
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "kernels":
            raise KernelUnavailable(_package_missing(name, error.name)) from error
        raise KernelUnavailable(f"kernels/{op}/{name}.py cannot be imported: {_error_line(error, f'{name}.py')}") from error
    if not isinstance(getattr(module, "REQUIRES", None), Requires | None):
        raise KernelUnavailable(f"kernels/{op}/{name}.py must define REQUIRES as a Requires of kernels/registry.py")
    operator = getattr(sys.modules[f"kernels.{op}"], "OPERATOR", None)
    sets: tuple[tuple[str, ...], ...] = operator.parts if operator else ((op,),)         # draw has no class Operator
    missing = min(([part for part in ("REQUIRES", *functions) if not hasattr(module, part)] for functions in sets), key=len)
    if missing:
        raise KernelUnavailable(f"kernels/{op}/{name}.py must define {' and '.join(missing)}: kernels/README.md has an example")
    return module


def _error_line(error: BaseException, file: str) -> str:
    """Returns the error in one line, which begins with the number of the line in `file` that raised the error.

    For a syntax error in another file, which `file` imports, the name of that file precedes the number.
    """
    if isinstance(error, SyntaxError):
        other = Path(error.filename or file).name
        place = ["" if other == file else other, f"line {error.lineno}" if error.lineno else ""]
        return ": ".join(filter(None, [", ".join(filter(None, place)), error.msg]))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


@cache
def why_not(op: str, name: str, device: str = "cpu") -> str | None:
    """Returns one sentence that states why `name` cannot run on the device type `device`, with the remedy, or None."""
    try:
        requires = load(op, name).REQUIRES
    except KernelUnavailable as error:
        return str(error)
    reason = _device_missing(name, requires, device)
    packages = (*requires.packages, *(["triton"] if requires.compiled and device == "cuda" else []))
    missing = [package for package in packages if not _is_installed(package)]
    reason = reason or (_package_missing(name, missing[0]) if missing else _compiler_missing(name, requires))
    missing_requirement = _missing_requirement(requires, packages, device) if reason is None else None
    return f"{name} cannot run: {missing_requirement}" if missing_requirement else reason


def check(op: str, name: str, device: "torch.device") -> None:
    """Raises KernelUnavailable if `name` cannot run on `device`. The message states the reason, the remedy and alternatives."""
    reason = why_not(op, name, device.type)
    if reason:
        others = ", ".join(runnable(op, device.type))
        raise KernelUnavailable(reason, f"These implementations run on {device.type}: {others}" if others else
                                f"No implementation runs on {device.type}: move the tensors to another device")


def check_dtype(op: str, name: str, requires: Requires, *dtypes: "torch.dtype") -> None:
    """Raises ValueError if an input is float64 and the implementation would silently compute in float32."""
    import torch

    if torch.float64 in dtypes and torch.float64 not in requires.dtypes:
        kernels = [other for other in runnable(op) if torch.float64 in load(op, other).REQUIRES.dtypes]
        raise ValueError(f"{name} does not compute in float64: cast the inputs to float32, or use one of {', '.join(kernels)}")


def runnable(op: str, device: str = "cpu") -> list[str]:
    return [name for name in names(op) if why_not(op, name, device) is None]


def _missing_requirement(requires: Requires, packages: tuple[str, ...], device: str) -> str | None:
    if "triton" in packages and device == "cuda":
        from kernels.machine import triton  # imported here, because the module imports torch

        if reason := triton.why_not():
            return reason
    return None if requires.why_not is None else requires.why_not()


def missing_compiler() -> str | None:
    """Returns the name of torch.compile's C++ compiler if the compiler is missing from the PATH, otherwise None."""
    compiler = COMPILERS.get(sys.platform, "g++")
    return None if shutil.which(compiler) else compiler


def _is_installed(package: str) -> bool:
    """Returns True if the package can be imported. find_spec raises an error for a dotted name without a parent."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _package_missing(name: str, package: str) -> str:
    last = LAST_PYTHON.get(package, sys.version_info[:2])
    if sys.version_info[:2] > last:
        return f"{name} requires the package {package}, which supports Python up to {last[0]}.{last[1]} (use an earlier Python)"
    return f"{name} requires the package {package}, which is not installed (pip install {package})"


def _compiler_missing(name: str, requires: Requires) -> str | None:
    import torch

    if requires.scripted and not hasattr(torch.jit, "script"):
        return f"{name} requires torch.jit.script, which torch {torch.__version__} does not have (install an earlier torch)"
    if requires.scripted and sys.version_info >= (3, 14):
        return f"{name} requires torch.jit.script, which does not support Python 3.14 (use an earlier Python)"
    compiler = missing_compiler()
    if not requires.compiled or compiler is None:
        return None
    return f"{name} requires a C++ compiler for torch.compile, but {compiler} is not on the PATH (install the compiler)"


def _device_missing(name: str, requires: Requires, device: str) -> str | None:
    import torch

    if device not in requires.devices:
        return f"{name} runs on {' or '.join(requires.devices)}, not on {device}"
    if device == "cuda" and not torch.cuda.is_available():
        return f"{name} on cuda requires a CUDA device, but torch finds none"
    return None
