"""Holds a part's results, device and deadline, and times calls."""

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_check import PATIENCE, Rows

PAUSE = 4_000_000                        # cycles (2 ms) that the GPU waits while the host launches the timed operations
SPARE_S = 3.0                            # seconds between a program's limit and its part's deadline


@dataclass
class Check:
    """The output, device and deadline of a part."""

    part: str
    rows: Rows
    device: str
    deadline: float                      # in seconds of time.monotonic
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gpu-check-")))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def add(self, **row: Any) -> None:
        self.rows.add(part=self.part, **row)

    @contextlib.contextmanager
    def measuring(self, **about: Any) -> Iterator[None]:
        """Turns an exception in the `with` block into a row. A GPU fault ends the part."""
        try:
            yield
        except (Exception, SystemExit) as error:         # functions of other benchmarks exit with a message
            self.add(**about, error=f"{type(error).__name__}: {str(error)[:300]}")
            del error
            self.end_after_gpu_fault()

    def end_after_gpu_fault(self) -> None:
        """Ends this process if the GPU has failed; otherwise frees unused GPU memory."""
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
        except Exception as fault:
            self.add(error=f"the part ends here: {str(fault)[:120]}")
            os._exit(3)
        gc.collect()
        torch.cuda.empty_cache()

    def left(self, most: float) -> float:
        """Returns the time limit of a program in seconds: at most `most`, and not beyond the part's deadline."""
        return max(1.0, min(PATIENCE[self.device] * most, self.deadline - time.monotonic() - SPARE_S))

    def peak_mb(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if self.on_gpu else 0.0


def milliseconds(check: Check, call: Callable[[], Any], seconds: float = 0.6, most: int = 50, alone: bool = False) -> float:
    """Returns the median time of a call in milliseconds.

    On a GPU, the time is measured by events, and includes waiting for the host's launches. With `alone`, the GPU pauses before
    the first event while the host launches everything, so that only the GPU's own time is measured.
    """
    call()
    times: list[float] = []
    end = time.monotonic() + (seconds if check.on_gpu else 0.0)
    while not times or (time.monotonic() < end and len(times) < most):
        if not check.on_gpu:
            start = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - start))
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if alone:
            torch.cuda._sleep(PAUSE)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return median(times)
