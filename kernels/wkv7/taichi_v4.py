"""Rung 4: rung 3 in C (csrc/wkv7.c), with fused multiply-adds: 1,070 cycles for a pass over 64 x 64, of at least 1,024."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.backends.bitcode import function
from kernels.backends.taichi import BLOCK, launch, ti
from kernels.registry import Requires
from kernels.wkv7 import _passes

SOURCE = Path(__file__).parent / "csrc" / "wkv7.c"
CHUNK, STAGED, LANES = 16, 9, 16  # as in wkv7.c: steps, vectors that are made ready for each, lanes at most
FORMS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
REQUIRES = Requires(packages=("taichi",), devices=("cpu",), bitcode=True, dtypes=tuple(FORMS), N_multiple=16)

kept = _passes.kept


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *kept: Tensor) -> tuple[Tensor, Tensor]:
    N = v.shape[-1]
    y, after = torch.empty_like(v), torch.empty_like(state)
    (sa,) = kept or (None,)
    _run("forward", (N + CHUNK * STAGED + 1) * N, r, log_w, k, v, a, b, state, sa, y, after)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, sa: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    _, T, _, N = v.shape
    matrices = 1 + (T + CHUNK - 1) // CHUNK
    gradients = tuple(torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state))
    _run("backward", (matrices * N + (CHUNK + 1) * LANES + CHUNK * STAGED + 1 + T) * N, r, log_w, k, v, a, b, state, sa, grad_y, grad_state,
         *gradients)
    return gradients


def _run(direction: str, scratch_size: int, r: Tensor, log_w: Tensor, *others: Tensor | None) -> None:
    """Starts the C function, which finds sizes and addresses as its struct call lists them. scratch_size: of a thread."""
    B, T, H, N = r.shape
    threads = min(B * H, torch.get_num_threads())
    taken, scratch = r.new_zeros(1, dtype=torch.int32), log_w.new_empty(threads * scratch_size)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (taken, scratch, r, log_w, *others))
    call = torch.tensor([B, T, H, N, scratch_size, *addresses], device=r.device)
    launch(_kernel(direction, r.dtype), call, call.data_ptr(), threads)


@cache
def _kernel(direction: str, dtype: torch.dtype):
    of_thread = function(SOURCE, f"wkv7_{direction}_{FORMS[dtype]}")

    @ti.kernel
    def kernel(first: ti.types.ndarray(dtype=ti.i64, ndim=1), call: ti.i64, n: int):
        for step in range(n * BLOCK):
            if step % BLOCK == 0:
                of_thread(call, step // BLOCK)

    return kernel
