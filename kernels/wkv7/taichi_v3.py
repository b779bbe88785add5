"""Version 3 factors the decay out of the state, which leaves 4 multiply-adds per element and step instead of 5.

Within a chunk of steps let W_t be the product of w from the chunk's first step to t, S = S' diag(W_t), and G = G' / diag(W_t)
for G = dL/dS. With b' = b / W, k' = k / W, r' = r W and a'_t = a_t W_{t-1} the recurrence and its reverse have no decay left:

    forward   lanes i   S' += sa_t b'_t + v_t k'_t              y_t = S' r'_t              sa_{t+1} = S' a'_{t+1}
    rows      lanes i   G' += gsa_{t+1} a'_{t+1} + gy_t r'_t    gv_t = G' k'_t             gsa_t = G' b'_t
    states    lanes j   S' as in forward                        gr_t = W_t (S'^T gy_t)     ga_{t+1} = W_t (S'^T gsa_{t+1})
    keys      lanes j   G' as in rows                           gk_t = (G'^T v_t) / W_t    gb_t = (G'^T sa_t) / W_t

The passes `rows` and `keys` go from the last step to the first. The matrix is multiplied by W once, after a chunk. 1/W is at
most e^16 for log_w >= -1. Each step of the four passes is one loop over a matrix, which adds two outer products and multiplies
the matrix by two vectors. Lanes run along the axis that is not summed over.

log_w's gradient is gl_t = sum_i (S_{t-1} w_t)_ij (G_t)_ij = sum_i (S'_{t-1})_ij (G'_t)_ij. All other formulas are those of
_passes.py.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import partial

import torch

from kernels.backends.lanes import exp
from kernels.backends.taichi import INDEX, ti
from kernels.registry import Requires
from kernels.wkv7 import _passes
from kernels.wkv7._passes import LANES

GROUP = 2  # columns that a pass loads before it stores, because Taichi reloads an array's address after each store
REQUIRES = Requires(packages=("taichi",), devices=("cpu",), dtypes=(torch.float32, torch.bfloat16), N_multiple=LANES)


@ti.func
def _pass(scratch: ti.template(), flat: ti.template(), before, after, other, vectors, M, p, q, w,
          order: ti.template(), along_j: ti.template(), beside: ti.template()):
    """Computes the `step` that _passes.py describes, without the decay w."""
    dot_u = 0.0 * p
    dot_v = 0.0 * p
    dot_other = 0.0 * p
    for block in range(M):
        for group in range(LANES // GROUP):
            o = (vectors * LANES + block * 6 * LANES + group * GROUP) & INDEX
            m = (before + block * LANES + group * GROUP) & INDEX
            new = [scratch[m + g] + p * flat[o + (g + order[0] * LANES)] + q * flat[o + (g + order[1] * LANES)]
                   for g in ti.static(range(GROUP))]
            for g in ti.static(range(GROUP)):
                dot_u += new[g] * flat[o + (g + order[2] * LANES)]
                dot_v += new[g] * flat[o + (g + order[3] * LANES)]
            if ti.static(beside):
                beside_m = (other + block * LANES + group * GROUP) & INDEX
                for g in ti.static(range(GROUP)):
                    dot_other += new[g] * scratch[beside_m + g]
            to = (after + block * LANES + group * GROUP) & INDEX
            for g in ti.static(range(GROUP)):
                scratch[to + g] = new[g]
    return dot_u, dot_v, dot_other


@ti.func
def _stage(read: ti.template(), scratch: ti.template(), columns, r: ti.template(), log_w: ti.template(),
           k: ti.template(), a: ti.template(), b: ti.template(), at, t_0, steps, T, H, M):
    """Computes b', k', r', the next step's a' (0 after the last step), W and 1/W for each step of a chunk."""
    for x in range(M):
        w = ti.Vector([1.0] * LANES)
        for s in range(steps):
            i = at + (t_0 + s) * H * M + x
            more = ti.min(T - 1 - t_0 - s, 1)
            w = w * exp(log_w[i])
            over = 1.0 / w
            b_t = read(b[i])
            k_t = read(k[i])
            r_t = read(r[i])
            a_next = read(a[i + more * H * M])
            o = columns + (s * M + x) * 6
            scratch[o] = b_t * over
            scratch[o + 1] = k_t * over
            scratch[o + 2] = r_t * w
            scratch[o + 3] = a_next * w * ti.cast(more, ti.f32)
            scratch[o + 4] = w
            scratch[o + 5] = over


activation_shapes = _passes.activation_shapes
_version = _passes.Version(_pass, _stage, outside=True)
forward = partial(_passes.forward, _version)
backward = partial(_passes.backward, _version)
