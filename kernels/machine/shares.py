"""Limits a run of a sweep to its share of the machine: a number of threads and one GPU."""

import os

THREADS = "OMP_NUM_THREADS"              # limits the threads of torch's and this package's CPU operators
GPUS = "CUDA_VISIBLE_DEVICES"


def limit_process(threads: int | None, gpu: int | None) -> None:
    """Limits this process to `threads` threads, unless the user has set a number, and to one GPU.

    Call this function before torch is imported. `gpu` is an index among the GPUs in CUDA_VISIBLE_DEVICES, as torch counts them.
    None sets no limit.
    """
    if threads is not None:
        os.environ.setdefault(THREADS, str(threads))
    if gpu is not None:
        visible = os.environ.get(GPUS)
        os.environ[GPUS] = visible.split(",")[gpu].strip() if visible else str(gpu)
