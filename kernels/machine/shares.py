"""A process's share of a machine: a number of threads, and one of the GPUs."""

import os

THREADS = "OMP_NUM_THREADS"              # of torch's CPU operators, and of ours
GPUS = "CUDA_VISIBLE_DEVICES"


def take(threads: int | None, gpu: int | None) -> None:
    """Limits this process to `threads` threads, unless the user has set their number, and to one GPU; None for no limit.

    gpu: torch's index, among those in CUDA_VISIBLE_DEVICES. Call it before torch is imported.
    """
    if threads is not None:
        os.environ.setdefault(THREADS, str(threads))
    if gpu is not None:
        visible = os.environ.get(GPUS)
        os.environ[GPUS] = visible.split(",")[gpu].strip() if visible else str(gpu)
