"""The one place that imports Taichi and calls ti.init: `from kernels.backends.taichi import launch, ti`.

Importing starts nothing: the first `launch(kernel, *args)` starts Taichi. launch raises KernelUnavailable for what Taichi
does not support: a second arch in one process, a forked child, a GPU but the first, a tensor too long for 32-bit indices.

Of Taichi's own environment variables only those of its cache, TI_OFFLINE_CACHE and TI_OFFLINE_CACHE_FILE_PATH, count here: with
another TI_DEFAULT_FP, TI_ARCH or TI_FAST_MATH these kernels would compute something else, or end the process. So Taichi is
imported and started without them. They still apply to a program that calls ti.init itself.
"""

import contextlib
import ctypes
import inspect
import io
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kernels.registry import KernelUnavailable


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hides Taichi's banner, in sys.__stdout__ too: with sys.stdout alone redirected, Taichi prints more, as in a notebook."""
    streams = sys.stdout, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        sys.stdout, sys.__stdout__ = streams  # type: ignore[misc]


@contextlib.contextmanager
def _importlib_has_no_source() -> Iterator[None]:
    """Lets inspect answer at once about frames of importlib, which it would look for in all modules.

    Taichi's decorators look up the source line of such a frame at a module's top level: 1 to 2 ms per function once torch is
    imported, most of the time of importing Taichi.
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
def _no_variables() -> Iterator[None]:
    """Hides the variables that Taichi reads, in Python and in C++, and sets HOME, without which it ends the process."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TI_")}
    has_home = "HOME" in os.environ
    os.environ.setdefault("HOME", os.path.expanduser("~"))       # noqa: PTH111 (Path raises for a user without one)
    try:
        yield
    finally:
        os.environ.update(hidden)
        if not has_home:
            del os.environ["HOME"]


# Taichi uses what newer Pythons deprecate
with _no_variables(), _silent(), _importlib_has_no_source(), warnings.catch_warnings(action="ignore"):
    import taichi as ti


def _look_up_quickly(inside_class: Callable[[int], bool]) -> Callable[[int], bool]:
    """Taichi's test whether a function is decorated in a class, without its slow look-ups; the results are the same."""
    def wrapped(level_of_class_stackframe: int) -> bool:
        with _importlib_has_no_source():
            return inside_class(level_of_class_stackframe + 1)

    return wrapped


if hasattr(ti.lang.kernel_impl, "_inside_class"):
    ti.lang.kernel_impl._inside_class = _look_up_quickly(ti.lang.kernel_impl._inside_class)

NUMEL_MAX = 2**30
INDEX = NUMEL_MAX - 1  # `at & INDEX` tells LLVM that at + constant does not overflow, so that it merges neighbouring loads
BLOCK = 512  # iterations of a CPU kernel's outermost loop that Taichi gives to one thread at a time; see share

TRIED = 2**20  # bytes for which a disk must have room: about the compiled kernels of a model
KNOWN = ((1, 7, 4),)  # versions of Taichi whose internal launch calls _Compiled repeats

_compiled: dict[Any, "_Compiled"] = {}
_started_in: int | None = None  # id of the process in which Taichi started its threads
_ensured: tuple[Any, torch.device] | None = None  # the Taichi program and the device of the last successful check
_lock = threading.RLock()  # held by the one thread that compiles or launches


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """Runs `kernel(*args)` on the device of its first argument, in order with torch's current stream."""
    device = args[0].device
    numel = max(arg.numel() for arg in args if isinstance(arg, Tensor))
    if numel >= NUMEL_MAX:
        raise KernelUnavailable(f"Taichi kernels index with 32 bits: a tensor must have fewer than {NUMEL_MAX} elements; got "
                                f"{numel}: use a smaller batch, or another kernel")
    if _started_in not in (None, os.getpid()):  # before taking the lock: a forked child may have a copy that is locked
        raise KernelUnavailable("Taichi was started before this process was forked, and a launch would hang: "
                                "use the spawn start method, or another kernel")
    with _lock:
        _ensure(device)
        if device.type == "cpu":
            _launch_cpu(kernel, args)
            return
        with _in_stream_order(device), _brief_positions():
            kernel(*args)


def _launch_cpu(kernel: Any, args: tuple[Any, ...]) -> None:
    """kernel(*args). Skips Taichi's type checks after the first launch: 10 us instead of 100, and more when cold.

    The first launch is Taichi's own call, which compiles; later launches repeat what that call does after its checks.
    """
    program = ti.lang.impl.get_runtime().prog
    compiled = _compiled.get(kernel)
    if compiled is not None and compiled.program is program:
        compiled.launch(args)
        return
    types = [argument.annotation for argument in kernel._primal.arguments]
    arrays = [_array(arg, annotation) if isinstance(arg, Tensor) else arg for arg, annotation in zip(args, types, strict=True)]
    with _brief_positions():
        kernel(*arrays)
    if ti.__version__ in KNOWN and all(map(_fixed, types)):
        instance, = kernel._primal.compiled_kernels.values()
        code = program.compile_kernel(program.config(), program.get_device_caps(), instance)
        _compiled[kernel] = _Compiled(program, instance, code, [_setter(*numbered) for numbered in enumerate(types)])


@contextlib.contextmanager
def _brief_positions() -> Iterator[None]:
    """Shortens the position that Taichi records for each expression, for its errors, to the file and the line. Formatting the
    text of the lines takes half of the time in which Taichi parses a kernel.
    """
    context = ti.lang.ast.ast_transformer_utils.ASTTransformerContext
    get_pos_info = context.get_pos_info

    def brief(self: Any, node: Any) -> str:
        return f'File "{self.file}", line {node.lineno + self.lineno_offset}, in {self.func.func.__name__}:\n'

    context.get_pos_info = brief
    try:
        yield
    finally:
        context.get_pos_info = get_pos_info


@dataclass(frozen=True)
class _Compiled:
    """A compiled kernel with a single instance; `setters` has one function per argument, which passes it to a launch."""

    program: Any
    kernel: Any
    code: Any
    setters: list[Callable[[Any, Any], None]]

    def launch(self, args: tuple[Any, ...]) -> None:
        context = self.kernel.make_launch_context()
        for setter, arg in zip(self.setters, args, strict=True):
            setter(context, arg)
        self.program.launch_kernel(self.code, context)


def _fixed(annotation: Any) -> bool:
    """Whether an argument of this type leaves the compiled kernel the same: no template, no array without a fixed dtype."""
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        return annotation.dtype is not None and annotation.ndim is not None
    return annotation in (int, float, *ti.types.primitive_types.all_types)


def _array(tensor: Tensor, annotation: Any) -> Any:
    """A numpy array for Taichi's own call, of vectors where the annotation has vectors; a third faster than a tensor."""
    lanes = _lanes(annotation)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return (tensor.view(-1, lanes) if lanes else tensor).numpy()


def _lanes(annotation: Any) -> int:
    """The length of the vectors in a one-dimensional array of vectors, which accepts a tensor of any shape; else 0."""
    return getattr(annotation.dtype, "n", 0) if annotation.ndim == 1 else 0


def _setter(number: int, annotation: Any) -> Callable[[Any, Any], None]:
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        dtype = ti.lang.util.to_pytorch_type(getattr(annotation.dtype, "dtype", annotation.dtype))  # of elements
        dtypes = (dtype, torch.bfloat16) if dtype == torch.int16 else (dtype,)
        return partial(_set_array, (number,), annotation.ndim, _lanes(annotation), dtypes)
    if annotation in (float, *ti.types.primitive_types.real_types):
        return lambda context, value: context.set_arg_float((number,), float(value))
    return lambda context, value: context.set_arg_int((number,), value)


def _set_array(place: tuple[int], ndim: int, lanes: int, dtypes: tuple[torch.dtype, ...], context: Any, tensor: Tensor) -> None:
    """ndim: of the array, not counting the elements of a vector."""
    assert tensor.is_contiguous(), "Taichi kernels take contiguous tensors"
    assert tensor.dtype in dtypes, f"the kernel takes tensors of {dtypes[0]}"
    assert not lanes or tensor.numel() % lanes == 0, f"the kernel takes whole vectors of {lanes} numbers"
    shape = (tensor.numel() // lanes,) if lanes else tensor.shape[:ndim]
    context.set_arg_external_array_with_shape(place, tensor.data_ptr(), tensor.nbytes, shape, 0)


def shares(tasks: int) -> int:
    """The number of shares of `tasks`: two per thread, so that a thread that finishes early takes another."""
    return min(tasks, 2 * torch.get_num_threads())


@ti.func
def share(i, tasks, n):  # type: ignore[no-untyped-def]
    """(first, end) of the tasks that iteration i of `for i in range(n * BLOCK)` does, where n = shares(tasks).

    Taichi gives the outermost loop of a CPU kernel to threads in blocks of 512 iterations, so a shorter loop runs on one core.
    Here the first iteration of each block does tasks / n of the tasks, and the other iterations do none.
    """
    at_work = 1 - ti.min(i % BLOCK, 1)  # 0 or 1 as a factor: an `if` around vector code aborts the process
    per_share = (tasks + n - 1) // n
    first = i // BLOCK * per_share
    return at_work * first, at_work * ti.min(first + per_share, tasks)


def _ensure(device: torch.device) -> None:
    """Starts Taichi on `device` unless it runs there already. Raises KernelUnavailable where it cannot."""
    global _started_in, _ensured
    if _ensured == (ti.lang.impl.get_runtime().prog, device):
        return
    arch = ti.cuda if device.type == "cuda" else ti.cpu
    if device.index:
        raise KernelUnavailable(f"Taichi runs on the first GPU only, not on {device}: move the tensors to cuda:0, "
                                "or set CUDA_VISIBLE_DEVICES")
    if ti.lang.impl.get_runtime().prog is None:
        _start(arch)
    if ti.cfg.arch != arch:
        raise KernelUnavailable(f"Taichi has one arch per process and runs on {_name(ti.cfg.arch)} here, not on "
                                f"{_name(arch)}: use another process, or another kernel")
    if ti.lang.impl.get_runtime().default_ip != ti.i32:
        raise KernelUnavailable("Taichi was started with a default_ip other than ti.i32, which these kernels require: call "
                                "ti.init without default_ip, or use another kernel")
    if ti.lang.impl.get_runtime().default_fp != ti.f32:
        raise KernelUnavailable("Taichi was started with a default_fp other than ti.f32, which these kernels require: call "
                                "ti.init without default_fp, and without TI_DEFAULT_FP, or use another kernel")
    _started_in = os.getpid()
    _ensured = (ti.lang.impl.get_runtime().prog, device)
    _let_forks_end()


@cache
def _let_forks_end() -> None:
    """From now on a forked child never destroys its copy of Taichi's program, which would wait for ever for its threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_keep_program)


def _keep_program() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ti.lang.impl.get_runtime().prog))


def _start(arch: Any) -> None:
    """Starts Taichi on `arch`.

    real_matrix_scalarize=False keeps ti vectors as LLVM vectors: several times faster on a CPU. fast_math, Taichi's default,
    stays on: LLVM may reorder sums, and NaN and infinity still propagate.
    """
    try:
        cache = _cache()
        with _no_variables(), _silent(), _no_version_check():
            ti.init(arch=arch, enable_fallback=False, cpu_max_num_threads=torch.get_num_threads(),
                    real_matrix_scalarize=False, log_level=ti.ERROR, **cache)
    except RuntimeError as error:
        raise KernelUnavailable(f"Taichi cannot start on {_name(arch)} ({error}): use another kernel") from error


def _cache() -> dict[str, Any]:
    """The arguments of ti.init for the cache of compiled kernels on the disk.

    If Taichi's cache folder does not exist and cannot be created, Taichi ends the process with a segmentation fault at exit,
    even with the cache off; where a file of the cache cannot be opened, it aborts, or waits for ever. Where the folder or such
    a file cannot be written, the cache is off and its folder is one that always exists.
    """
    folder = os.environ.get("TI_OFFLINE_CACHE_FILE_PATH") or ti.lang.impl.default_cfg().offline_cache_file_path
    if os.environ.get("TI_OFFLINE_CACHE") != "0" and _can_write(Path(folder).absolute()):
        return {"offline_cache": True, "offline_cache_file_path": str(Path(folder).absolute())}
    return {"offline_cache": False, "offline_cache_file_path": os.sep}


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED))
            file.flush()
        files = [file for pattern in ("ticache.*", "*.tic") for file in folder.glob(pattern)]
        return all(file.is_file() and os.access(file, os.R_OK | os.W_OK) for file in files)
    except (OSError, ValueError):        # ValueError: a name with a zero byte
        return False


@contextlib.contextmanager
def _no_version_check() -> Iterator[None]:
    """Stops ti.init from asking a server for the newest version."""
    check = ti._version_check.start_version_check_thread
    ti._version_check.start_version_check_thread = lambda: None
    try:
        yield
    finally:
        ti._version_check.start_version_check_thread = check


@contextlib.contextmanager
def _in_stream_order(device: torch.device) -> Iterator[None]:
    """Orders Taichi's launches, which go on the legacy default stream, with torch's current stream if that is another one."""
    if device.type != "cuda" or torch.cuda.current_stream() == torch.cuda.default_stream():
        yield
        return
    current = torch.cuda.current_stream()
    default = torch.cuda.default_stream()
    default.wait_stream(current)
    yield
    current.wait_stream(default)


def _name(arch: Any) -> str:
    return "cuda" if arch == ti.cuda else "the CPU" if arch == ti.cpu else str(arch)
