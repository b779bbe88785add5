"""The number of kernels that a function launches on a GPU, or of torch operators that it runs on a CPU, by the profiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from kernels.bench.peak_memory import quiet

NO_WORK = {f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_",
                                         "promote_types", "result_type")}


def launches(run: Callable[[], Any], device: str) -> int:
    """Kernels, copies and fills that the GPU executes during run(); on a CPU the operators that compute.

    An operator that calls other operators counts as those; one that calls none counts as 1, whatever its back end does
    inside. Views and allocations count as 0.
    """
    run()                                # compilation and first-use work are not counted
    if device == "cuda":
        torch.cuda.synchronize()
    with quiet(), profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as recorded:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    events = recorded.events()
    if device == "cuda":
        return sum(event.device_type == DeviceType.CUDA for event in events)
    return sum(_computing(event) for event in events if event.cpu_parent is None)


def _computing(event: FunctionEvent) -> int:
    return sum(map(_computing, event.cpu_children)) or int(_is_operator(event))


def _is_operator(event: FunctionEvent) -> bool:
    """Whether the event is an operator of torch or of this project that is neither a view nor an allocation."""
    library, _, name = event.name.partition("::")
    if library != "aten" or event.name in NO_WORK:
        return library == "timemix"
    packet = getattr(torch.ops.aten, name)
    return not any(getattr(packet, overload).is_view for overload in packet.overloads())
