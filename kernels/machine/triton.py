"""Checks what Triton requires to compile and launch a kernel on a GPU, without loading Triton's compiler."""

import importlib
import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

CAPABILITY = 8, 0                        # the lowest compute capability that Triton supports (Ampere)
COMPILERS = ("gcc", "clang")             # at the first launch Triton compiles its launcher, a C file that includes Python.h


def why_not(device: torch.device | None = None) -> str | None:
    """Returns why Triton cannot run on the GPU, with the remedy, or None. The default is the current GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install -e '.[triton]')"
    return _too_old(device) or _no_compiler()


def _too_old(device: torch.device | None) -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    required = ".".join(map(str, CAPABILITY))
    return None if (major, minor) >= CAPABILITY else (
        f"Triton requires a GPU of compute capability {required} or newer, but this GPU has {major}.{minor}")


def _no_compiler() -> str | None:
    if sys.platform == "win32":          # Triton for Windows contains a compiler
        return None
    build = importlib.import_module("triton.knobs").build        # build.cc comes from the variable CC
    if not (build.cc or build.impl or any(map(shutil.which, COMPILERS))):
        return f"Triton requires a C compiler, but the PATH has no {' or '.join(COMPILERS)} (apt install gcc)"
    header = Path(_headers()) / "Python.h"
    return None if header.is_file() else f"Triton requires Python's headers, but {header} is missing (apt install python3-dev)"


def _headers() -> str:
    """Returns the folder in which Triton looks for Python's headers.

    Debian's default scheme, posix_local, names a folder without headers.
    """
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
