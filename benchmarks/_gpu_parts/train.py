"""The parts `train` and `compiled`: training steps."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_parts.check import Check, milliseconds
from benchmarks._gpu_parts.random_models import Shape, Way, autocast, new_task, use_fused_layers

GPU_SHAPES = (Shape("rwkv7", 12, 768, 65536, 8, 1024), Shape("rwkv7", 4, 192, 2048, 8, 128),
              Shape("rwkv7", 24, 2048, 65536, 4, 1024), Shape("rwkv4", 12, 768, 50277, 8, 1024))
CPU_SHAPES = (Shape("rwkv7", 2, 64, 256, 2, 16), Shape("rwkv4", 2, 64, 256, 2, 16))
WAYS = (Way("bf16", "bf16-mixed"), Way("bf16, graphs", "bf16-mixed", graphs=True), Way("tf32", "tf32"),
        Way("float32", "32-true"), Way("bf16, unfused", "bf16-mixed", fused=False))
COMPILED = (Way("bf16, compiled", "bf16-mixed", {"compile": True}),)


def train(check: Check) -> None:
    _train(check, WAYS)


def compiled(check: Check) -> None:
    if check.on_gpu:
        _train(check, COMPILED)


def _train(check: Check, ways: Sequence[Way]) -> None:
    for way in ways:
        for shape in GPU_SHAPES if check.on_gpu else CPU_SHAPES:
            if (way.precision == "tf32" or way.graphs) and not check.on_gpu:
                continue
            about = {"model": str(shape), "way": way.name}
            with check.measuring(**about), use_fused_layers(way.fused):
                _training_steps(check, shape, way, about)        # is a separate function, so that its tensors are freed
            check.end_after_gpu_fault()


def _training_steps(check: Check, shape: Shape, way: Way, about: dict[str, Any]) -> None:
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    task = new_task(check, shape, way)
    optimizer = task.configure_optimizers()["optimizer"]
    x = torch.randint(shape.V, (shape.B, shape.T), device=check.device)

    def step(x: Tensor) -> Tensor:
        with autocast(check, way):
            loss = task.loss(x, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    start = time.perf_counter()
    for _ in range(3):
        loss = step(x)
    value = loss.item()
    first_s = time.perf_counter() - start
    ms = milliseconds(check, lambda: step(x), 1.0, 20)
    about |= {"ms": ms, "ktok_s": shape.B * shape.T / ms, "first_3_steps_s": first_s, "peak_mb": check.peak_mb(), "loss": value}
    kind = torch.profiler.ProfilerActivity.CUDA if check.on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiled:
        step(x)
        if check.on_gpu:
            torch.cuda.synchronize()
    events = [(event.key, event.count, getattr(event, "self_device_time_total", 0) or 0) for event in profiled.key_averages()]
    events = sorted((event for event in events if event[2]), key=lambda event: -event[2])
    about |= {"launches": sum(count for _, count, _ in events), "gpu_ms": sum(us for *_, us in events) / 1000,
              "longest": [[key[:60], count, round(us)] for key, count, us in events[:10]]}
    if not way.options:                  # measures the host with a small batch, unless a graph fixes the shape
        small = x if way.graphs else x[:1, :16]
        host = []
        for _ in range(5):
            if check.on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step(small)
            host.append(1000 * (time.perf_counter() - start))
        about["host_ms"] = median(host)
    check.add(**about)
