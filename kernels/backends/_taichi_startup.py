"""Imports and starts Taichi. The module taichi.py launches kernels.

Only the environment variables of Taichi's cache are used: TI_OFFLINE_CACHE and TI_OFFLINE_CACHE_FILE_PATH. With a different
TI_DEFAULT_FP, TI_ARCH or TI_FAST_MATH these kernels would compute wrong results or crash. So all other variables are
hidden while Taichi is imported and started. A program that calls ti.init itself still uses all variables.
"""

import contextlib
import inspect
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

CACHE_BYTES = 2**20  # free bytes required for the cache: about the size of a model's compiled kernels


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hides Taichi's banner. If only sys.stdout were replaced, as in a notebook, Taichi would print even more."""
    streams = sys.stdout, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        sys.stdout, sys.__stdout__ = streams  # type: ignore[misc]


@contextlib.contextmanager
def _fast_frame_info() -> Iterator[None]:
    """Makes inspect.getframeinfo skip the search for source lines in frames of importlib.

    Taichi's decorators look up the source line of such a frame for functions at a module's top level. If torch is imported, the
    search through all modules takes 1 to 2 ms per function, which is most of the time of importing Taichi.
    """
    look_up = inspect.getframeinfo

    def getframeinfo(frame: Any, context: int = 1) -> Any:
        if isinstance(frame, FrameType) and frame.f_code.co_filename.startswith("<frozen"):
            return inspect.Traceback(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)
        return look_up(frame, context)

    inspect.getframeinfo = getframeinfo
    try:
        yield
    finally:
        inspect.getframeinfo = look_up


@contextlib.contextmanager
def _hidden_variables() -> Iterator[None]:
    """Hides Taichi's environment variables (TI_*), and sets a missing HOME, without which Taichi would end the process."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TI_")}
    has_home = "HOME" in os.environ
    os.environ.setdefault("HOME", os.path.expanduser("~"))       # noqa: PTH111 (Path raises for a user without a home)
    try:
        yield
    finally:
        os.environ.update(hidden)
        if not has_home:
            del os.environ["HOME"]


# Warnings are ignored, because Taichi uses features that newer Pythons deprecate.
with _hidden_variables(), _silent(), _fast_frame_info(), warnings.catch_warnings(action="ignore"):
    import taichi as ti


def _faster_lookup(inside_class: Callable[[int], bool]) -> Callable[[int], bool]:
    """Returns a faster version of Taichi's test of whether a function is decorated inside a class."""
    def wrapped(level_of_class_stackframe: int) -> bool:
        with _fast_frame_info():
            return inside_class(level_of_class_stackframe + 1)

    return wrapped


if hasattr(ti.lang.kernel_impl, "_inside_class"):
    ti.lang.kernel_impl._inside_class = _faster_lookup(ti.lang.kernel_impl._inside_class)


def start(arch: Any) -> None:
    """Starts Taichi on `arch`. Raises RuntimeError if Taichi cannot start.

    With real_matrix_scalarize=False, Taichi's vectors stay LLVM vectors, and kernels are several times as fast on a CPU.
    fast_math is on by default, and stays on: LLVM may reorder sums, but NaN and infinity still propagate.
    """
    cache = _cache()
    with _hidden_variables(), _silent(), _no_version_check():
        ti.init(arch=arch, enable_fallback=False, cpu_max_num_threads=torch.get_num_threads(), real_matrix_scalarize=False,
                log_level=ti.ERROR, **cache)


def _cache() -> dict[str, Any]:
    """Returns the arguments of ti.init for the cache of compiled kernels on disk.

    If the cache folder does not exist and cannot be created, Taichi crashes with a segmentation fault at exit, even with the
    cache off. If a file of the cache cannot be opened, Taichi aborts or hangs. So if the folder or a file in it is not
    writable, the cache is turned off, and the cache folder is set to the root folder, which always exists.
    """
    folder = os.environ.get("TI_OFFLINE_CACHE_FILE_PATH") or ti.lang.impl.default_cfg().offline_cache_file_path
    if os.environ.get("TI_OFFLINE_CACHE") != "0" and _can_write(Path(folder).absolute()):
        return {"offline_cache": True, "offline_cache_file_path": str(Path(folder).absolute())}
    return {"offline_cache": False, "offline_cache_file_path": os.sep}


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(CACHE_BYTES))
            file.flush()
        files = [file for pattern in ("ticache.*", "*.tic") for file in folder.glob(pattern)]
        return all(file.is_file() and os.access(file, os.R_OK | os.W_OK) for file in files)
    except (OSError, ValueError):        # ValueError: the name contains a zero byte
        return False


@contextlib.contextmanager
def _no_version_check() -> Iterator[None]:
    check = ti._version_check.start_version_check_thread
    ti._version_check.start_version_check_thread = lambda: None
    try:
        yield
    finally:
        ti._version_check.start_version_check_thread = check
