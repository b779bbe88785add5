"""Version 0 evaluates the formula, with one output per thread or loop iteration, and reads all inputs from memory.

The same kernels run on CPUs, as parallel loops, and on GPUs. Adjacent threads compute adjacent t, and so read the same k and
adjacent w.
"""

# mypy: disable-error-code="attr-defined, index, no-untyped-def, valid-type"
import torch
from torch import Tensor

from kernels.backends.taichi import launch, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), dtypes=(torch.float32, torch.float64))

Rows = ti.types.ndarray(ndim=2)
Batch = ti.types.ndarray(ndim=3)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(k)
    launch(_forward, w, k, eps, out)
    return out


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    grad_w = torch.empty_like(w)
    grad_k = torch.empty_like(k)
    launch(_grad_k, w, grad_out, grad_k)
    launch(_grad_w, k, grad_out, grad_w)
    return grad_w, grad_k


@ti.kernel
def _forward(w: Rows, k: Batch, eps: ti.f64, out: Batch):
    for b, c, t in out:
        last = out.shape[2] - 1
        total = w[c, last] * k[b, c, t]  # lag 0 comes first, because `total = 0.0` would be float32 even for float64 tensors
        for u in range(t):
            total += w[c, last - (t - u)] * k[b, c, u]
        out[b, c, t] = total + eps


@ti.kernel
def _grad_k(w: Rows, grad_out: Batch, grad_k: Batch):
    for b, c, u in grad_k:
        last = grad_k.shape[2] - 1
        total = w[c, last] * grad_out[b, c, u]
        for t in range(u + 1, last + 1):
            total += w[c, last - (t - u)] * grad_out[b, c, t]
        grad_k[b, c, u] = total


@ti.kernel
def _grad_w(k: Batch, grad_out: Batch, grad_w: Rows):
    for c, i in grad_w:
        lag = grad_w.shape[1] - 1 - i
        total = _correlate(k, grad_out, 0, c, lag)
        for b in range(1, k.shape[0]):
            total += _correlate(k, grad_out, b, c, lag)
        grad_w[c, i] = total


@ti.func
def _correlate(k: ti.template(), grad_out: ti.template(), b, c, lag):
    total = grad_out[b, c, lag] * k[b, c, 0]
    for t in range(lag + 1, k.shape[2]):
        total += grad_out[b, c, t] * k[b, c, t - lag]
    return total
