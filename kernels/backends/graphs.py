"""CUDA graphs: a sequence of launches captured once and replayed by one call."""

from collections.abc import Callable

import torch


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that repeats what run() launches, with the same buffers; on a CPU it is run itself.

    run() is called twice: once to compile and load its kernels, and once while it is captured, when nothing is computed.
    """
    run()
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        run()
    return graph.replay
