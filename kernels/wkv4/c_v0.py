"""The recurrence of taichi_scan in C (csrc/wkv4.c), with fused multiply-adds: vectors of channels, integer exponents."""

import torch
from torch import Tensor

from kernels import native
from kernels.native.forms import FORMS
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), why_not=native.why_not, dtypes=tuple(FORMS))

CHUNK, SHARE = 32, 32  # as in wkv4.c: steps between two states that are kept, channels of a task
KEPT, SAVED, LANES = 3, 5, 16  # vectors for each chunk and for each step of a chunk; at most so many lanes
SERIAL = 2**14  # elements up to which one thread is done before another one is awake


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    outputs = torch.empty_like(v), *(torch.empty_like(part) for part in (a, b, p))
    _run("forward", k, 0, None, time_decay, time_first, k, v, a, b, p, *outputs)
    return outputs


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    chunks = (k.shape[1] + CHUNK - 1) // CHUNK
    scratch_size = (CHUNK * SAVED + chunks * KEPT) * LANES
    scratch = a.new_empty(_threads(k) * scratch_size)
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    of_rows = torch.empty_like(a), torch.empty_like(a), torch.empty_like(a), torch.empty_like(b)
    _run("backward", k, scratch_size, scratch, time_decay, time_first, k, v, a, b, p, grad_y, grad_a, grad_b, None,
         grad_k, grad_v, *of_rows)
    grad_decay, grad_first, grad_a, grad_b = of_rows
    return grad_decay.sum(0), grad_first.sum(0), grad_k, grad_v, grad_a, grad_b


def _run(direction: str, k: Tensor, scratch_size: int, scratch: Tensor | None, *tensors: Tensor | None) -> None:
    """Calls the C function with its struct call."""
    native.run(f"wkv4_{direction}_{FORMS[k.dtype]}", _threads(k), *k.shape, scratch_size, scratch, *tensors)


def _threads(k: Tensor) -> int:
    B, _, C = k.shape
    return 1 if k.numel() <= SERIAL else native.threads_for(B * ((C + SHARE - 1) // SHARE))
