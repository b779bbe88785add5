"""Runs one measurement of benchmarks/training.py in a separate process.

    steps GENERATION PRECISION    milliseconds of a bare training step (loss, gradients, clipping, AdamW) and of its matrix
                                  products alone, measured alternately until the process is killed
    head chunked | whole          a step with the loss in chunks, or with all logits in memory together, for 2 layers of width
                                  256, a vocabulary of 65,536 and 4096 tokens: milliseconds, increase of the peak resident
                                  memory in MB, and the largest difference between the gradients of both losses, relative to
                                  the largest gradient
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks._matmuls import seconds_per_step
from kernels.machine.allocator import keep_large_blocks
from kernels.machine.memory import resident_memory
from kernels.select import AUTO, select
from rwkv.config import ModelConfig, OptimConfig
from rwkv.model.base import generation
from rwkv.pretrained import RWKV
from rwkv.training.task import LanguageModel

B = 4
VOCABULARY = 8192
LARGE_HEAD = ModelConfig(n_layer=2, n_embd=256, ctx_len=1024), 65536


def steps(name: str, precision: str) -> None:
    config = ModelConfig(generation=name, n_layer=6, n_embd=384, ctx_len=512)
    vocab_size = VOCABULARY
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    task = new_task(config, vocab_size, dtype)
    x = torch.randint(vocab_size, (B, config.ctx_len))
    optimizer = task.configure_optimizers()["optimizer"]
    while True:
        start = time.perf_counter()
        training_step(task, optimizer, x, dtype)
        bare = time.perf_counter() - start
        matmuls = seconds_per_step(config, vocab_size, B, config.ctx_len, dtype)
        print(json.dumps({"bare": 1000 * bare, "matmuls": 1000 * matmuls}), flush=True)


def head(loss: str) -> None:
    config, vocab_size = LARGE_HEAD
    task = new_task(config, vocab_size, torch.float32)
    x = torch.randint(vocab_size, (B, config.ctx_len))
    task.optim.l2_wrap = 0.0             # the plain loss has no workspace
    losses = {"chunked": lambda: task.loss(x, x), "whole": lambda: _unchunked_loss(task.model, x)}
    task.model.hidden(x[:1, :8])[0].sum().backward()     # compiles the kernels
    task.zero_grad(set_to_none=True)
    before = resident_memory()
    start = time.perf_counter()
    with _memory_peak() as peak:
        losses[loss]().backward()
    seconds = time.perf_counter() - start
    gradients = [parameter.grad.clone() for parameter in task.parameters()]
    task.zero_grad(set_to_none=True)
    next(other for name, other in losses.items() if name != loss)().backward()
    difference = max(float((gradient - other.grad).abs().max() / other.grad.abs().max())
                     for gradient, other in zip(gradients, task.parameters(), strict=True) if other.grad.any())
    print(json.dumps({"peak_mb": (peak() - before) / 1e6, "ms": 1000 * seconds, "difference": difference}))


def _unchunked_loss(model: RWKV, x: Tensor) -> Tensor:
    logits, _ = model(x)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def new_task(config: ModelConfig, vocab_size: int, dtype: torch.dtype, optim: OptimConfig | None = None) -> LanguageModel:
    keep_large_blocks()
    torch.manual_seed(0)
    operator = select(generation(config).OPERATOR, AUTO, dtype=dtype)
    return LanguageModel(RWKV(config, vocab_size, operator).init_weights(), optim or OptimConfig(), 1000, 1.0)


def training_step(task: LanguageModel, optimizer: Any, x: Tensor, dtype: torch.dtype,
                  part: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
    """Runs a training step without Lightning. Each part runs in the context part(name).

    The names of the parts are forward, loss, backward and optimiser.
    """
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with part("forward"):
            hidden = task.model.forward_features(x)
        with part("loss"):
            loss = task._loss_at_head(hidden, x)
    with part("backward"):
        loss.backward()
    with part("optimiser"):
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _memory_peak() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the peak of the resident memory so far, in bytes. A thread samples every millisecond."""
    samples = [resident_memory()]
    stop = threading.Event()
    watcher = threading.Thread(target=lambda: [samples.append(resident_memory()) for _ in iter(lambda: stop.wait(0.001), True)])
    watcher.start()
    try:
        yield lambda: max(samples)
    finally:
        stop.set()
        watcher.join()


if __name__ == "__main__":
    {"steps": steps, "head": head}[sys.argv[1]](*sys.argv[2:])
