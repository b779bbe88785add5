"""C code (csrc/wkv4.c) computes the recurrence of taichi_scan with vectors of channels and fused multiply-adds."""

import torch
from torch import Tensor

from kernels import native
from kernels.native.dtypes import DTYPES
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), why_not=native.why_not, dtypes=tuple(DTYPES))

CHUNK, TASK_CHANNELS = 32, 32  # as in wkv4.c: steps between saved states, channels per task
PER_CHUNK, PER_STEP, LANES = 3, 5, 16  # vectors saved per chunk and per step; largest number of lanes
SERIAL = 2**14  # elements up to which one thread finishes before a second would wake


def forward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
            a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    outputs = torch.empty_like(v), *(torch.empty_like(part) for part in (a, b, p))
    _run("forward", k, 0, None, time_decay, time_first, k, v, a, b, p, *outputs, *[None] * 6)
    return outputs


def backward(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, p: Tensor,
             y: Tensor, grad_y: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    chunks = (k.shape[1] + CHUNK - 1) // CHUNK
    scratch_size = (CHUNK * PER_STEP + chunks * PER_CHUNK) * LANES
    scratch = a.new_empty(_threads(k) * scratch_size)
    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    grad_decay, grad_first, grad_initial_a, grad_initial_b = (torch.empty_like(a) for _ in range(4))
    _run("backward", k, scratch_size, scratch, time_decay, time_first, k, v, a, b, p, grad_y, grad_a, grad_b, None,
         grad_k, grad_v, grad_decay, grad_first, grad_initial_a, grad_initial_b)
    return grad_decay.sum(0), grad_first.sum(0), grad_k, grad_v, grad_initial_a, grad_initial_b


def _run(direction: str, k: Tensor, scratch_size: int, scratch: Tensor | None, *tensors: Tensor | None) -> None:
    """Calls the C function. `tensors` are the fields after `scratch` in the C struct `call`."""
    native.run(f"wkv4_{direction}_{DTYPES[k.dtype]}", _threads(k), *k.shape, scratch_size, scratch, *tensors)


def _threads(k: Tensor) -> int:
    B, _, C = k.shape
    return 1 if k.numel() <= SERIAL else native.threads_for(B * ((C + TASK_CHANNELS - 1) // TASK_CHANNELS))
