"""Measures a function's peak memory beyond inputs and outputs, and counts its launches, with PyTorch's profiler."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

NO_WORK = {f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_",
                                        "promote_types", "result_type")}


def extra_bytes(run: Callable[[], Any], device: str) -> int:
    """Returns the peak bytes that torch allocates during run(), minus the bytes of the tensors that run() returns.

    Tensors that forward saves for backward count, unless they are inputs or outputs.
    """
    peak, result = (_peak_cuda if device == "cuda" else _peak_cpu)(run)
    return max(0, peak - _size(result))


def _peak_cuda(run: Callable[[], Any]) -> tuple[int, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def _peak_cpu(run: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the peak memory of run() on a CPU, where torch has no memory counter, and the result of run().

    The peak is the largest running sum of the profiler's allocations and releases. Releases of tensors that were allocated
    before this profile are ignored.
    """
    with silence_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    live: dict[int, int] = {}                # address -> size
    live_bytes = peak = 0
    for address, size in _allocations(recorded.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            live[address] = size
            live_bytes += size
            peak = max(peak, live_bytes)
        else:
            live_bytes -= live.pop(address, 0)
    return peak, result


def _allocations(tree: list[Any]) -> list[tuple[int, int]]:
    """Returns (address, bytes) of all allocations and releases in order of time. Releases have negative bytes."""
    allocations = []
    nodes = list(tree)
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.name == "[memory]":
            allocations.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    return [(address, size) for _, size, address in sorted(allocations)]


def _size(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(map(_size, result))


def launches(run: Callable[[], Any], device: str) -> int:
    """Counts the kernels, copies and fills that the GPU executes during run(), or on a CPU the operators that compute.

    An operator that calls other operators does not count itself. Views and allocations do not count.
    """
    run()                                # the first call may compile, which must not count
    if device == "cuda":
        torch.cuda.synchronize()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with silence_profiler(), profile(activities=[activity]) as recorded:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    events = recorded.events()
    if device == "cuda":
        return sum(event.device_type == DeviceType.CUDA for event in events)
    return sum(_count_operators(event) for event in events if event.cpu_parent is None)


def _count_operators(event: FunctionEvent) -> int:
    return sum(map(_count_operators, event.cpu_children)) or int(_is_operator(event))


def _is_operator(event: FunctionEvent) -> bool:
    """Returns True for an operator of torch or of this project that is neither a view nor an allocation."""
    library, _, name = event.name.partition("::")
    if library != "aten" or event.name in NO_WORK:
        return library == "timemix"
    packet = getattr(torch.ops.aten, name)
    return not any(getattr(packet, overload).is_view for overload in packet.overloads())


@contextmanager
def silence_profiler() -> Iterator[None]:
    """Discards the messages that the profiler's C++ library writes to standard error when it starts and stops."""
    sys.stderr.flush()
    before = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
