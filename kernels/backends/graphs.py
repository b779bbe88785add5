"""CUDA graphs: a sequence of launches captured once and replayed by one call."""

from collections.abc import Callable

import torch


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that repeats the launches of run(), with the same buffers; on a CPU, run itself.

    run() is called twice: once to compile and load its kernels, and once for the capture, which computes nothing. Other
    threads may allocate memory on the device meanwhile: a capture forbids it only to its own thread.
    """
    if device.type != "cuda":
        run()
        return run
    with torch.cuda.device(device):      # Triton launches on the current device, and a stream of its own belongs to it
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            run()
    return graph.replay
