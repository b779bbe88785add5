"""Steps of one kind, in a process of their own, for benchmarks/busy.py: _busy_job.py train | decode.

Each line of standard input is a number of seconds; the process runs steps for that long and prints a step's median time in ms.

train: a bare training step of model=tiny with the kernel that auto chooses. decode: one token of a model with 169 million
parameters, one row.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from kernels.machine.allocator import keep_large_blocks
from kernels.select import select
from rwkv.config import ModelConfig, OptimConfig
from rwkv.generation.decoder import decoder_of
from rwkv.pretrained import RWKV
from rwkv.training.task import LanguageModel

B, TINY = 8, (ModelConfig(n_layer=4, n_embd=192, ctx_len=128), 2048)
LARGER = ModelConfig(n_layer=12, n_embd=768), 50277
WARM = 3


def train() -> Callable[[], Any]:
    config, vocab_size = TINY
    task = LanguageModel(RWKV(config, vocab_size, select("wkv4", "auto")).init_weights(), OptimConfig(), 1000, 1.0)
    optimizer, x = task.configure_optimizers()["optimizer"], torch.randint(vocab_size, (B, config.ctx_len))

    def step() -> None:
        task.training_step((x, x), 0).backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def decode() -> Callable[[], Any]:
    config, vocab_size = LARGER
    model = RWKV(config, vocab_size, select("wkv4", "auto")).requires_grad_(False)
    decoder = decoder_of(model, model.empty_state(1))
    token = torch.zeros(1, dtype=torch.long)
    return lambda: decoder.step(token)


def main(kind: str) -> None:
    keep_large_blocks()
    torch.manual_seed(0)
    step = {"train": train, "decode": decode}[kind]()
    for _ in range(WARM):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        print(_median_ms(step, float(line)), flush=True)


def _median_ms(step: Callable[[], Any], seconds: float) -> float:
    """At least one step."""
    took: list[float] = []
    since = time.perf_counter()
    while not took or time.perf_counter() - since < seconds:
        began = time.perf_counter()
        step()
        took.append(1000 * (time.perf_counter() - began))
    return median(took)


if __name__ == "__main__":
    main(sys.argv[1])
