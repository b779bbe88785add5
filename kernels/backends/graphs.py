"""Captures a sequence of kernel launches as a CUDA graph, which one call replays."""

import warnings
from collections.abc import Callable

import torch


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that repeats the kernel launches of run() with the same buffers. On a CPU the function is `run`.

    On a GPU, run() is called twice: first to compile and load the kernels, then for the capture, which computes nothing.
    During the capture other threads may allocate memory on the device, but the capturing thread must not. If the capture fails,
    a warning gives the reason, and the returned function launches the kernels one by one.
    """
    if device.type != "cuda":
        run()
        return run
    with torch.cuda.device(device):      # Triton and Stream() use the current device
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)                # a failed capture may leave its own stream selected
            cause = error.__context__ or error           # the end of a capture that has failed raises an error of its own
            reason = str(cause).partition("\n")[0]
            warnings.warn(f"CUDA graph capture failed ({reason}): kernels are launched one by one, which is slower",
                          stacklevel=2)
            return lambda: _run_on(device, run)
    return graph.replay


def _run_on(device: torch.device, run: Callable[[], None]) -> None:
    with torch.cuda.device(device):
        run()
