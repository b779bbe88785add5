"""The reference's loop over the steps as TorchScript, which runs the same operations without Python, in float64.

A float32 exponent near 230 has a rounding error of 1.5e-5 at every step; in float64 the plain formula is as exact as the scans
with integer exponents.
"""

import torch
from torch import Tensor

from kernels.backends.compiled import scripted
from kernels.registry import Requires
from kernels.wkv4 import decay_exponent

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), scripted=True)


def forward(time_decay: Tensor, time_first: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    wide = [tensor.double() for tensor in (time_first, *inputs)]
    outputs = scripted(_forward)(decay_exponent(time_decay.double()), *wide)
    return tuple(output.to(time_decay.dtype) for output in outputs)


def backward(time_decay: Tensor, time_first: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    wide = [tensor.double() for tensor in (time_first, *inputs)]
    w = decay_exponent(time_decay.double())
    by_w, *grads = scripted(_backward)(w, *wide)
    return tuple(grad.to(time_decay.dtype) for grad in (by_w * w, *grads))


def _forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor,
             a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty_like(v)
    for t in range(k.shape[1]):
        past, now, _ = _shares(p, u + k[:, t])
        y[:, t] = (past * a + now * v[:, t]) / (past * b + now)
        kept, new, p = _shares(p + w, k[:, t])
        a, b = kept * a + new * v[:, t], kept * b + new
    return y, a, b, p


def _backward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor, y: Tensor, grad_y: Tensor,
              grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    states = [(a, b, p)]
    for t in range(k.shape[1] - 1):
        kept, new, p = _shares(p + w, k[:, t])
        a, b = kept * a + new * v[:, t], kept * b + new
        states.append((a, b, p))
    grad_k, grad_v, grad_w, grad_u = torch.empty_like(k), torch.empty_like(v), torch.zeros_like(a), torch.zeros_like(a)
    for t in range(k.shape[1] - 1, -1, -1):              # grad_a, grad_b: for the state after step t, at its scale
        a, b, p = states[t]
        past, now, _ = _shares(p, u + k[:, t])
        grad_num = grad_y[:, t] / (past * b + now)
        grad_here = now * grad_num * (v[:, t] - y[:, t])
        kept, new, _ = _shares(p + w, k[:, t])
        grad_v[:, t] = grad_num * now + grad_a * new
        grad_k[:, t] = grad_here + new * (grad_a * v[:, t] + grad_b)
        grad_u += grad_here
        grad_w += kept * (grad_a * a + grad_b * b)
        grad_a = kept * grad_a + past * grad_num
        grad_b = kept * grad_b - past * grad_num * y[:, t]
    return grad_w.sum(0), grad_u.sum(0), grad_k, grad_v, grad_a, grad_b


def _shares(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^p and e^q divided by the larger of the two, and the exponent of the larger."""
    top = torch.maximum(p, q)
    return torch.exp(p - top), torch.exp(q - top), top
