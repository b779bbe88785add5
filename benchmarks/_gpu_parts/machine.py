"""The part `machine`: rates of matrix products and of a copy, and the host's time for one operation."""

import os
import time

import torch

from benchmarks._gpu_parts.check import Check, milliseconds
from rwkv.training.device import set_product_precision

PER_OPERATION = 500                      # number of timed launches; a stream holds 1,024 before the host waits


def machine(check: Check) -> None:
    check.add(gpu=torch.cuda.get_device_name() if check.on_gpu else "none", torch=torch.__version__, cpus=os.cpu_count())
    n = 8192 if check.on_gpu else 256
    for name, dtype in (("32-true", torch.float32), ("tf32", torch.float32), ("bf16-mixed", torch.bfloat16)):
        set_product_precision(name, torch.device(check.device))
        for width, depth in ((n, n), (768, 768), (768, 3072)) if check.on_gpu else ((n, n),):
            with check.measuring(product=name, shape=[n, width, depth]):
                x, w = (torch.randn(rows, depth, device=check.device, dtype=dtype) for rows in (n, width))
                ms = milliseconds(check, lambda x=x, w=w: x @ w.T, 0.3, alone=True)
                check.add(product=name, shape=[n, width, depth], ms=ms, tflops=2 * n * width * depth / ms / 1e9)
    source = torch.ones(2**28 if check.on_gpu else 2**20, device=check.device)
    target = torch.empty_like(source)
    ms = milliseconds(check, lambda: target.copy_(source), 0.3, alone=True)
    check.add(copy_gb_s=2 * source.nbytes / ms / 1e6)
    small = torch.zeros(16, device=check.device)
    small.add_(1)
    start = time.perf_counter()
    for _ in range(PER_OPERATION):
        small.add_(1)
    check.add(host_us_of_an_operation=1e6 * (time.perf_counter() - start) / PER_OPERATION)
