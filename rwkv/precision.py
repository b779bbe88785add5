"""trainer.precision=auto: bf16-mixed where the machine multiplies bfloat16 clearly faster than float32, else 32-true.

A GPU says so; of a CPU no library tells for all of them, so it is measured, in a few milliseconds.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from rwkv.config import TrainConfig
from rwkv.scale import device_for

AUTO = "auto"
N, CALLS = 512, 5                        # of a square product, and how often it is timed
FASTER = 1.3                             # what products must gain, since converting to bfloat16 and back takes time as well


def with_precision(config: TrainConfig) -> TrainConfig:
    """The configuration with auto decided for the device of this run. Raises ValueError where that device is not there."""
    if config.trainer.precision != AUTO:
        return config
    halves = halves_are_faster(device_for(config.trainer.accelerator))
    return replace(config, trainer=replace(config.trainer, precision="bf16-mixed" if halves else "32-true"))


def halves_are_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    whole, half = (min(list(_seconds(dtype))[1:]) for dtype in (torch.float32, torch.bfloat16))
    return whole > FASTER * half


def _seconds(dtype: torch.dtype) -> Iterator[float]:
    x = torch.ones(N, N, dtype=dtype)
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        x @ x
        yield time.perf_counter() - start
