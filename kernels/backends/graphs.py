"""Captures a sequence of kernel launches as a CUDA graph, which one call replays."""

from collections.abc import Callable

import torch


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns a function that repeats the kernel launches of run() with the same buffers. On a CPU the function is `run`.

    On a GPU, run() is called twice: first to compile and load the kernels, then for the capture, which computes nothing.
    During the capture other threads may allocate memory on the device, but the capturing thread must not.
    """
    if device.type != "cuda":
        run()
        return run
    with torch.cuda.device(device):      # Triton and Stream() use the current device
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            run()
    return graph.replay
