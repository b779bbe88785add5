"""The parts `wkv7`, `wkv4` and `peers`: the forward and backward passes of every kernel, and of other projects' kernels."""

import importlib
import importlib.util
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_parts.check import Check, milliseconds
from benchmarks.gpu_check import PUBLISHED
from kernels.registry import load, why_not
from kernels.select import folder, rule, select, selectable

WKV7_SHAPES = (8, 4096, 64, 64), (8, 4096, 12, 64), (8, 1024, 12, 64), (1, 512, 64, 64)
WKV4_SHAPES = (8, 1024, 768), (8, 8192, 768), (32, 768, 768), (8, 4096, 4096)


def kernels_of(op: str, check: Check) -> list[str]:
    """Returns the operator's kernels that run on this device, in the order of kernel=auto, and then the others.

    The list has no kernels that use torch.compile, which would take a minute each.
    """
    if not check.on_gpu:
        return ["c_v0"]
    order = rule(op, check.device, torch.bfloat16).order
    here = [name for name in selectable(op) if name != "reference" and why_not(folder(op, name), name, check.device) is None
            and not load(folder(op, name), name).REQUIRES.compiled]
    return sorted(here, key=lambda name: (order.index(name) if name in order else len(order), name.startswith("taichi"), name))


def wkv7(check: Check) -> None:
    for name, shape in product(kernels_of("wkv7", check), WKV7_SHAPES if check.on_gpu else ((1, 32, 2, 64),)):
        with check.measuring(kernel=name, shape=list(shape)):
            operator = select("wkv7", name, check.device)
            inputs, grad = wkv7_inputs(check, *shape)
            forward_and_backward(check, name, list(shape), lambda op=operator, ins=inputs: op(*ins)[0], inputs, grad)


def wkv7_inputs(check: Check, B: int, T: int, H: int, N: int) -> tuple[list[Tensor], Tensor]:
    """Returns r, log_w, k, v, a and b, with the dtypes of bf16-mixed and requires_grad; and a gradient of y."""
    r, w, k, v, a, b = (torch.randn(B, T, H, N, device=check.device) for _ in range(6))
    kk = torch.nn.functional.normalize(a, dim=-1)
    inputs = [r.bfloat16(), -0.6065306597 * torch.sigmoid(w), k.bfloat16(), v.bfloat16(), (-kk).bfloat16(),
              (kk * torch.sigmoid(b)).bfloat16()]
    return [tensor.requires_grad_() for tensor in inputs], torch.randn_like(inputs[3])


def wkv4(check: Check) -> None:
    shapes = product(WKV4_SHAPES if check.on_gpu else ((1, 16, 32),), (torch.float32, torch.bfloat16))
    for name, ((B, T, C), dtype) in product(kernels_of("wkv4", check), shapes):
        with check.measuring(kernel=name, shape=[B, T, C], dtype=str(dtype)):
            operator = select("wkv4", name, check.device)
            k, v = (torch.randn(B, T, C, device=check.device, dtype=dtype) for _ in range(2))
            decay = -5 + 8 * torch.rand(C, device=check.device)
            bonus = -1.2 + 0.5 * torch.randn(C, device=check.device)
            leaves = [tensor.requires_grad_() for tensor in (decay, bonus, k, v)]
            forward_and_backward(check, name, [B, T, C], lambda op=operator, ins=leaves: op(*ins)[0], leaves,
                                  torch.randn_like(v), dtype=str(dtype))


def peers(check: Check) -> None:
    for row in PUBLISHED:
        check.add(published=True, **row)
    if not check.on_gpu or importlib.util.find_spec("fla") is None:
        check.add(peer="flash-linear-attention", skipped="not installed" if check.on_gpu else "needs a GPU")
        return
    for shape in WKV7_SHAPES:
        with check.measuring(peer="flash-linear-attention", shape=list(shape)):
            chunk_rwkv7 = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
            (r, log_w, k, v, a, b), grad = wkv7_inputs(check, *shape)
            named = {"r": r, "w": log_w.detach().bfloat16().requires_grad_(), "k": k, "v": v, "a": a, "b": b}

            forward_and_backward(
                check, "flash-linear-attention", list(shape),
                lambda f=chunk_rwkv7, n=named: f(**n, scale=1.0, output_final_state=False, safe_gate=True)[0],
                list(named.values()), grad)


def forward_and_backward(check: Check, name: str, shape: list[int], forward: Callable[[], Tensor], inputs: list[Tensor],
                          grad: Tensor, **about: Any) -> None:
    before = torch.cuda.memory_allocated() / 2**20 if check.on_gpu else 0.0
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    forward_ms = milliseconds(check, forward, 0.3, alone=True)
    y = forward()
    backward_ms = milliseconds(check, lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True), 0.3, alone=True)
    check.add(kernel=name, shape=shape, forward_ms=forward_ms, backward_ms=backward_ms, peak_mb=check.peak_mb() - before,
              **about)
