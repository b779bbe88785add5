"""Launches Taichi kernels: `from kernels.backends.taichi import launch, ti`.

Importing this module imports Taichi (_taichi_startup.py), and the first `launch(kernel, *args)` starts Taichi. `launch` raises
KernelUnavailable in the cases that Taichi does not support: a second arch in the same process, a forked child, a GPU other
than the first, or a tensor too large for 32-bit indices.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.backends._taichi_startup import start, ti
from kernels.registry import KernelUnavailable

NUMEL_MAX = 2**30
INDEX = NUMEL_MAX - 1  # `at & INDEX` tells LLVM that `at + constant` cannot overflow, so that it merges adjacent loads
BLOCK = 512  # iterations of a CPU kernel's outermost loop that Taichi assigns to a thread at a time; see share

KNOWN = ((1, 7, 4),)  # versions of Taichi whose internal calls in a launch _Compiled can repeat

_compiled: dict[Any, "_Compiled"] = {}
_started_in: int | None = None  # id of the process in which Taichi started its threads
_last_check: tuple[Any, torch.device] | None = None  # the Taichi program and the device of the last successful check
_lock = threading.RLock()  # held while compiling or launching


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """Runs `kernel(*args)` on the device of the first argument, in order with torch's current stream."""
    device = args[0].device
    numel = max(arg.numel() for arg in args if isinstance(arg, Tensor))
    if numel >= NUMEL_MAX:
        raise KernelUnavailable(f"a tensor for Taichi must have fewer than {NUMEL_MAX} elements (indices have 32 bits); got "
                                f"{numel}: use a smaller batch, or another kernel")
    if _started_in not in (None, os.getpid()):  # this precedes the lock, which a forked child may inherit locked
        raise KernelUnavailable("Taichi was started before this process was forked, so a launch would hang: "
                                "use the spawn start method, or another kernel")
    with _lock:
        _ensure_started(device)
        if device.type == "cpu":
            _launch_cpu(kernel, args)
            return
        with _in_stream_order(device), _short_positions():
            kernel(*args)


def _launch_cpu(kernel: Any, args: tuple[Any, ...]) -> None:
    """Calls kernel(*args), and skips Taichi's type checks from the second launch on.

    The first launch is an ordinary call, which compiles the kernel. Later launches repeat only the part of that call after the
    checks, and take 10 us instead of 100 us or more.
    """
    program = ti.lang.impl.get_runtime().prog
    compiled = _compiled.get(kernel)
    if compiled is not None and compiled.program is program:
        compiled.launch(args)
        return
    types = [argument.annotation for argument in kernel._primal.arguments]
    arrays = [_array(arg, annotation) if isinstance(arg, Tensor) else arg for arg, annotation in zip(args, types, strict=True)]
    with _short_positions():
        kernel(*arrays)
    if ti.__version__ in KNOWN and all(map(_is_compiled_once, types)):
        instance, = kernel._primal.compiled_kernels.values()
        code = program.compile_kernel(program.config(), program.get_device_caps(), instance)
        _compiled[kernel] = _Compiled(program, instance, code, [_setter(*numbered) for numbered in enumerate(types)])


@contextlib.contextmanager
def _short_positions() -> Iterator[None]:
    """Makes Taichi record only the file and the line number of each expression for error messages.

    Taichi would otherwise spend half of the time for parsing a kernel on formatting source text.
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
    """A kernel that was compiled once for all arguments. Each of `setters` sets one argument in the context of a launch."""

    program: Any
    kernel: Any
    code: Any
    setters: list[Callable[[Any, Any], None]]

    def launch(self, args: tuple[Any, ...]) -> None:
        context = self.kernel.make_launch_context()
        for setter, arg in zip(self.setters, args, strict=True):
            setter(context, arg)
        self.program.launch_kernel(self.code, context)


def _is_compiled_once(annotation: Any) -> bool:
    """Returns True for types that need only one compiled kernel, unlike templates and arrays without a fixed dtype."""
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        return annotation.dtype is not None and annotation.ndim is not None
    return annotation in (int, float, *ti.types.primitive_types.all_types)


def _array(tensor: Tensor, annotation: Any) -> Any:
    """Returns the tensor as a numpy array, of vectors if the annotation has vectors. Arrays are passed a third faster."""
    lanes = _lanes(annotation)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return (tensor.view(-1, lanes) if lanes else tensor).numpy()


def _lanes(annotation: Any) -> int:
    """Returns the vector length of a one-dimensional array of vectors, which accepts tensors of any shape, otherwise 0."""
    return getattr(annotation.dtype, "n", 0) if annotation.ndim == 1 else 0


def _setter(number: int, annotation: Any) -> Callable[[Any, Any], None]:
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        dtype = ti.lang.util.to_pytorch_type(getattr(annotation.dtype, "dtype", annotation.dtype))  # dtype of an element
        dtypes = (dtype, torch.bfloat16) if dtype == torch.int16 else (dtype,)
        return partial(_set_array, (number,), annotation.ndim, _lanes(annotation), dtypes)
    if annotation in (float, *ti.types.primitive_types.real_types):
        return lambda context, value: context.set_arg_float((number,), float(value))
    return lambda context, value: context.set_arg_int((number,), value)


def _set_array(place: tuple[int], ndim: int, lanes: int, dtypes: tuple[torch.dtype, ...], context: Any, tensor: Tensor) -> None:
    """Sets an array argument in the context of a launch. `ndim` does not count the dim of a vector's elements."""
    assert tensor.is_contiguous(), "Taichi kernels require contiguous tensors"
    assert tensor.dtype in dtypes, f"the kernel requires tensors of dtype {dtypes[0]}"
    assert not lanes or tensor.numel() % lanes == 0, f"the number of elements must be a multiple of {lanes}"
    shape = (tensor.numel() // lanes,) if lanes else tensor.shape[:ndim]
    context.set_arg_external_array_with_shape(place, tensor.data_ptr(), tensor.nbytes, shape, 0)


def shares(tasks: int) -> int:
    """Returns the number of shares into which `tasks` are divided, which is two per thread, to balance the load."""
    return min(tasks, 2 * torch.get_num_threads())


@ti.func
def share(i, tasks, n):  # type: ignore[no-untyped-def]
    """Returns the range (first, end) of the tasks of iteration i in `for i in range(n * BLOCK)`, where n = shares(tasks).

    Taichi divides the outermost loop of a CPU kernel among threads in blocks of 512 iterations, so a shorter loop runs on one
    core. Here the first iteration of each block computes tasks / n tasks, and the block's other iterations compute none.
    """
    at_work = 1 - ti.min(i % BLOCK, 1)  # a factor of 0 or 1 replaces an `if`, which aborts the process around vector code
    per_share = (tasks + n - 1) // n
    first = i // BLOCK * per_share
    return at_work * first, at_work * ti.min(first + per_share, tasks)


def _ensure_started(device: torch.device) -> None:
    """Starts Taichi on `device`, if necessary. Raises KernelUnavailable if Taichi cannot run on `device`."""
    global _started_in, _last_check
    if _last_check == (ti.lang.impl.get_runtime().prog, device):
        return
    arch = ti.cuda if device.type == "cuda" else ti.cpu
    if device.index:
        raise KernelUnavailable(f"Taichi runs on the first GPU only, not on {device}: move the tensors to cuda:0, "
                                "or set CUDA_VISIBLE_DEVICES")
    if ti.lang.impl.get_runtime().prog is None:
        try:
            start(arch)
        except RuntimeError as error:
            raise KernelUnavailable(f"Taichi cannot start on {_name(arch)} ({error}): use another kernel") from error
    if ti.cfg.arch != arch:
        raise KernelUnavailable(f"Taichi supports only one arch per process, and this process already uses "
                                f"{_name(ti.cfg.arch)}, not {_name(arch)}: use another process, or another kernel")
    if ti.lang.impl.get_runtime().default_ip != ti.i32:
        raise KernelUnavailable("Taichi was started with a default_ip other than ti.i32, which these kernels require: call "
                                "ti.init without default_ip, or use another kernel")
    if ti.lang.impl.get_runtime().default_fp != ti.f32:
        raise KernelUnavailable("Taichi was started with a default_fp other than ti.f32, which these kernels require: call "
                                "ti.init without default_fp, and without TI_DEFAULT_FP, or use another kernel")
    _started_in = os.getpid()
    _last_check = (ti.lang.impl.get_runtime().prog, device)
    _keep_program_in_forks()


@cache
def _keep_program_in_forks() -> None:
    """Keeps a forked child from destroying Taichi's program, because the child would wait for threads that do not exist."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_keep_program)


def _keep_program() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ti.lang.impl.get_runtime().prog))


@contextlib.contextmanager
def _in_stream_order(device: torch.device) -> Iterator[None]:
    """Synchronises Taichi's launches on the legacy default stream with torch's current stream, if the two differ."""
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
