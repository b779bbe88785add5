"""Compiles the kernels of the fused forms as training launches them, without a GPU: `python fused_triton_cubins.py 90`.

The program uses tests/kernels/triton_cubins.py, and prints JSON in the same format.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[3]))
from triton_cubins import cubins

from rwkv.model.fused import loss_triton
from rwkv.model.fused import triton as fused_triton
from rwkv.model.rwkv7 import fused_triton as rwkv7_triton


def launches(N: int) -> Iterator[Any]:
    """Yields launches of all kernels: in float32, under autocast, and for a single row; of the gates also without v_first."""
    for dtype, B, T in ((torch.float32, 2, 24), (torch.bfloat16, 2, 24), (torch.bfloat16, 1, 1)):
        H = 2
        C = H * N
        wide, x, row = torch.empty(B, T, C), torch.empty(B, T, C, dtype=dtype), torch.empty(B, C)
        vector, matrix, y = torch.empty(1, 1, C), torch.empty(H, N), torch.empty(B, T, H, N, dtype=dtype)
        for n, before in ((6, True), (3, False), (2, False), (1, True)):
            mus = (vector,) * n
            yield lambda w=wide, d=dtype, s=mus, b=before: fused_triton.mix(d, w, None, s, b)
            yield lambda w=wide, x=x, s=mus, b=before: fused_triton.mix_backward((w, None, *s), (x,) * len(s), b)
        yield lambda w=wide, r=row, d=dtype, v=vector: fused_triton.mix(d, w, r, (v,) * 6, True)
        yield lambda x=x: fused_triton.squared_relu(x)
        yield lambda x=x: fused_triton.squared_relu(x, x)
        for first in (None, x):
            n = 2 if first is None else 3
            vectors, z = (vector,) * (n + 2), (x,) * n
            inverse = torch.empty(B, T, H)
            yield lambda x=x, f=first, z=z, v=vectors: rwkv7_triton.gates(x, x, f, z, N, v)
            yield lambda x=x, f=first, z=z, v=vectors, i=inverse, w=wide: rwkv7_triton.gates_backward(
                x, x, f, z, N, v, i, (w, x, x, x, x), (x, x))
        yield lambda x=x, y=y, m=matrix, v=vector: rwkv7_triton.gated(y, x, x, x, x, N, (m, v, v))
        yield lambda x=x, y=y, m=matrix, v=vector: rwkv7_triton.gated_backward(y, x, x, x, x, N, (m, v, v), x)
        logits, targets = torch.empty(3, 65536, dtype=dtype), torch.zeros(3, dtype=torch.long)
        for penalty in (0.0, 0.1):
            yield lambda x=logits, t=targets, p=penalty: loss_triton.replace_by_gradient(x, t, 1e-4, p, -100)
        yield lambda x=logits, t=targets: loss_triton.negative_log_likelihood(x, t, -100)


if __name__ == "__main__":
    cubins_by_name: dict[str, Any] = {}
    once = "once" in sys.argv
    for size in (64,) if once else (64, 128, 256):
        cubins_by_name |= cubins(int(sys.argv[1]), launches(size), once)
    print(json.dumps(cubins_by_name))
