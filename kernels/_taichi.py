"""The one place that imports Taichi and calls ti.init: `from kernels._taichi import launch, ti`.

`launch(kernel, *args)` starts Taichi at the first launch, never at import, and refuses with a sentence what Taichi
cannot do: a second arch in one process, a forked child, a GPU but the first, a tensor too long for 32-bit indices.
"""

import contextlib
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.registry import KernelUnavailable


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Taichi prints a banner; it takes a redirected sys.stdout for a notebook's and prints more, so swap both."""
    streams = sys.stdout, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        sys.stdout, sys.__stdout__ = streams  # type: ignore[misc]


with _silent(), warnings.catch_warnings(action="ignore"):  # its import uses what newer Pythons deprecate
    import taichi as ti

NUMEL_MAX = 2**30
INDEX = NUMEL_MAX - 1  # `at & INDEX` tells LLVM that at + constant cannot wrap, and it merges neighbouring loads
BLOCK = 512  # steps of a CPU kernel's outermost loop that Taichi hands to one thread at a time; see share

KNOWN = ((1, 7, 4),)  # versions of Taichi whose launch _Compiled knows

_compiled: dict[Any, "_Compiled"] = {}
_started_in: int | None = None  # the process whose threads Taichi runs on
_ensured: tuple[Any, torch.device] | None = None  # the program that was last found to run there
_lock = threading.RLock()  # one thread at a time compiles and launches


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """Runs `kernel(*args)` on the device of its first argument, in order with torch's current stream."""
    device, numel = args[0].device, max(arg.numel() for arg in args if isinstance(arg, Tensor))
    if numel >= NUMEL_MAX:
        raise KernelUnavailable(f"Taichi kernels index with 32 bits, and a tensor of {numel} elements is over their "
                                f"limit of {NUMEL_MAX}: use a smaller batch, or another kernel")
    if _started_in not in (None, os.getpid()):  # before the lock, which the fork may have copied in its locked state
        raise KernelUnavailable("Taichi was started before this process was forked, and a launch would hang: "
                                "use the spawn start method, or another kernel")
    with _lock:
        _ensure(device)
        if device.type == "cpu":
            _launch_cpu(kernel, args)
            return
        with _in_stream_order(device):
            kernel(*args)


def _launch_cpu(kernel: Any, args: tuple[Any, ...]) -> None:
    """kernel(*args), without a look at the type of every argument at every launch: 10 us instead of 100, and more when cold.

    The first launch goes through Taichi's own front, which compiles; the others do what it does after its checks.
    """
    program = ti.lang.impl.get_runtime().prog
    compiled = _compiled.get(kernel)
    if compiled is not None and compiled.program is program:
        compiled.launch(args)
        return
    types = [argument.annotation for argument in kernel._primal.arguments]
    kernel(*(_array(arg, annotation) if isinstance(arg, Tensor) else arg for arg, annotation in zip(args, types, strict=True)))
    if ti.__version__ in KNOWN and all(map(_fixed, types)):
        instance, = kernel._primal.compiled_kernels.values()
        code = program.compile_kernel(program.config(), program.get_device_caps(), instance)
        _compiled[kernel] = _Compiled(program, instance, code, [_setter(*numbered) for numbered in enumerate(types)])


@dataclass(frozen=True)
class _Compiled:
    """A kernel of which there can be but one instance, of the program that Taichi runs; how each argument is handed over."""

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
    """Whether the kernel is the same for all arguments: no template, no array of any dtype."""
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        return annotation.dtype is not None and annotation.ndim is not None
    return annotation in (int, float, *ti.types.primitive_types.all_types)


def _array(tensor: Tensor, annotation: Any) -> Any:
    """As Taichi's own front takes it: of vectors where those are asked for, and a third faster than a tensor."""
    tensor, lanes = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor, _lanes(annotation)
    return (tensor.view(-1, lanes) if lanes else tensor).numpy()


def _lanes(annotation: Any) -> int:
    """Of the vectors in an array of one dimension, which a tensor of any shape can stand for; 0 for any other array."""
    return getattr(annotation.dtype, "n", 0) if annotation.ndim == 1 else 0


def _setter(number: int, annotation: Any) -> Callable[[Any, Any], None]:
    if isinstance(annotation, ti.types.ndarray_type.NdarrayType):
        dtype = ti.lang.util.to_pytorch_type(getattr(annotation.dtype, "dtype", annotation.dtype))  # of a vector, its lanes'
        dtypes = (dtype, torch.bfloat16) if dtype == torch.int16 else (dtype,)
        return partial(_set_array, (number,), annotation.ndim, _lanes(annotation), dtypes)
    if annotation in (float, *ti.types.primitive_types.real_types):
        return lambda context, value: context.set_arg_float((number,), float(value))
    return lambda context, value: context.set_arg_int((number,), value)


def _set_array(place: tuple[int], ndim: int, lanes: int, dtypes: tuple[torch.dtype, ...], context: Any, tensor: Tensor) -> None:
    """ndim: without the dimension of a vector's lanes."""
    assert tensor.is_contiguous(), "Taichi kernels take contiguous tensors"
    assert tensor.dtype in dtypes, f"the kernel takes tensors of {dtypes[0]}"
    assert not lanes or tensor.numel() % lanes == 0, f"the kernel takes whole vectors of {lanes} numbers"
    shape = (tensor.numel() // lanes,) if lanes else tensor.shape[:ndim]
    context.set_arg_external_array_with_shape(place, tensor.data_ptr(), tensor.nbytes, shape, 0)


def shares(tasks: int) -> int:
    """How many shares to cut `tasks` into: enough that a thread that finishes early takes another."""
    return min(tasks, 2 * torch.get_num_threads())


@ti.func
def share(i, tasks, n):  # type: ignore[no-untyped-def]
    """(first, end) of the tasks of step i of `for i in range(n * BLOCK)`, where n = shares(tasks).

    Taichi hands out the outermost loop of a CPU kernel in blocks of 512 steps: with fewer than that one core does
    everything. So the first step of each block does a share of the tasks, and the others nothing.
    """
    at_work = 1 - ti.min(i % BLOCK, 1)  # arithmetic, because an `if` around vector code aborts the process
    per_share = (tasks + n - 1) // n
    first = i // BLOCK * per_share
    return at_work * first, at_work * ti.min(first + per_share, tasks)


def _ensure(device: torch.device) -> None:
    """Starts Taichi on `device`, or checks that it runs there; raises KernelUnavailable with the reason otherwise."""
    global _started_in, _ensured
    if _ensured == (ti.lang.impl.get_runtime().prog, device):
        return
    wanted = ti.cuda if device.type == "cuda" else ti.cpu
    if device.index:
        raise KernelUnavailable(f"Taichi runs on the first GPU only, not on {device}: move the tensors to cuda:0, "
                                "or set CUDA_VISIBLE_DEVICES")
    if ti.lang.impl.get_runtime().prog is None:
        _start(wanted)
    if ti.cfg.arch != wanted:
        raise KernelUnavailable(f"Taichi has one arch per process and runs on {_name(ti.cfg.arch)} here, not on "
                                f"{_name(wanted)}: use another process, or another kernel")
    if ti.lang.impl.get_runtime().default_ip != ti.i32:
        raise KernelUnavailable("Taichi was started with another default_ip than ti.i32, which these kernels take: call "
                                "ti.init without default_ip, or use another kernel")
    _started_in, _ensured = os.getpid(), (ti.lang.impl.get_runtime().prog, device)


def _start(arch: Any) -> None:
    """real_matrix_scalarize=False keeps ti vectors as LLVM vectors: several times faster on a CPU.

    fast_math (Taichi's default) stays on: it lets LLVM reorder sums, and NaN and infinity still propagate through them.
    """
    try:
        with _silent(), _no_version_check():
            ti.init(arch=arch, enable_fallback=False, cpu_max_num_threads=torch.get_num_threads(),
                    real_matrix_scalarize=False, offline_cache=True, log_level=ti.ERROR)
    except RuntimeError as error:
        raise KernelUnavailable(f"Taichi cannot start on {_name(arch)} ({error}): use another kernel") from error


@contextlib.contextmanager
def _no_version_check() -> Iterator[None]:
    """ti.init would ask a server for the newest version: nothing here goes on the network unasked."""
    check = ti._version_check.start_version_check_thread
    ti._version_check.start_version_check_thread = lambda: None
    try:
        yield
    finally:
        ti._version_check.start_version_check_thread = check


@contextlib.contextmanager
def _in_stream_order(device: torch.device) -> Iterator[None]:
    """Taichi launches on the legacy default stream, which is torch's default: a fence where torch is on another one."""
    if device.type != "cuda" or torch.cuda.current_stream() == torch.cuda.default_stream():
        yield
        return
    current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    default.wait_stream(current)
    yield
    current.wait_stream(default)


def _name(arch: Any) -> str:
    return "cuda" if arch == ti.cuda else "the CPU" if arch == ti.cpu else str(arch)
