"""How much memory a function needs beyond what it is given and what it returns, at its peak."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def extra_bytes(run: Callable[[], Any], device: str) -> int:
    """The peak of what torch's allocator hands out during run(), less the tensors that run() returns.

    What a forward pass saves for its backward pass, beyond its inputs and outputs, counts.
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
    """There is no counter to ask: the profiler notes every allocation and release, and their running sum has a maximum."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    return peak, result


def _size(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(map(_size, result))


@contextmanager
def quiet() -> Iterator[None]:
    """The profiler's library tells standard error, from below Python, that it starts and stops."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
