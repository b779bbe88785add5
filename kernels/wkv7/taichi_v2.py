"""Version 2 takes a single loop over the matrix per step, in which each element is loaded and stored once.

A single loop is possible because sa is computed one step ahead. So each step of the four passes in _passes.py can multiply the
matrix by the decay, add two outer products, and multiply the result by two vectors in the same loop.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import partial

from kernels.backends.taichi import INDEX, ti
from kernels.wkv7 import _passes
from kernels.wkv7._passes import LANES

REQUIRES = _passes.REQUIRES
GROUP = 2  # columns that a pass loads before it stores, because Taichi reloads an array's address after each store


@ti.func
def _pass(scratch: ti.template(), flat: ti.template(), before, after, other, vectors, M, p, q, w,
          order: ti.template(), along_j: ti.template(), beside: ti.template()):
    """Computes the `step` that _passes.py describes."""
    dot_u = 0.0 * p
    dot_v = 0.0 * p
    dot_other = 0.0 * p
    for block in range(M):
        for group in range(LANES // GROUP):
            o = (vectors * LANES + block * 6 * LANES + group * GROUP) & INDEX
            m = (before + block * LANES + group * GROUP) & INDEX
            new = [scratch[m + g] * (w if ti.static(along_j) else flat[o + (g + order[4] * LANES)])
                   + p * flat[o + (g + order[0] * LANES)] + q * flat[o + (g + order[1] * LANES)]
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


activation_shapes = _passes.activation_shapes
forward = partial(_passes.forward, _passes.Version(_pass))
backward = partial(_passes.backward, _passes.Version(_pass))
