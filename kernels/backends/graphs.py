"""CUDA graphs: a sequence of kernel launches, captured once and replayed by one call."""

from collections.abc import Callable

import torch


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that repeats the kernel launches of run(), with the same buffers; on a CPU, `run` itself.

    On a GPU, run() is called twice: first to compile and load its kernels, then for the capture, which computes nothing.
    Meanwhile other threads may allocate memory on the device; only the capturing thread may not.
    """
    if device.type != "cuda":
        run()
        return run
    with torch.cuda.device(device):      # Triton launches on, and Stream() belongs to, the current device
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            run()
    return graph.replay
