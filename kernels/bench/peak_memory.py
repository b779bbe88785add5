"""Peak memory of a function beyond its inputs and outputs."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def extra_bytes(run: Callable[[], Any], device: str) -> int:
    """Peak bytes that torch's allocator hands out during run(), less the tensors that run() returns.

    Tensors that a forward pass saves for its backward pass count, unless they are inputs or outputs.
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
    """torch has no peak counter on a CPU: the maximum of the running sum of the profiler's allocations and releases.

    The profiler also reports the release of tensors that were allocated during an earlier profile. They are not run()'s, and
    do not count.
    """
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    live: dict[int, int] = {}                # size by address
    held = peak = 0
    for address, size in _allocations(recorded.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            live[address] = size
            held += size
            peak = max(peak, held)
        else:
            held -= live.pop(address, 0)
    return peak, result


def _allocations(tree: list[Any]) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation, and of each release with negative bytes, in the order of time."""
    found = []
    nodes = list(tree)
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    return [(address, size) for _, size, address in sorted(found)]


def _size(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(map(_size, result))


@contextmanager
def quiet() -> Iterator[None]:
    """Discards what the profiler's C++ library writes to standard error when it starts and stops."""
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
