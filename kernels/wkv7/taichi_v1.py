"""Version 1 uses vectors of 16 lanes, along i for sums over j and along j for sums over i, so that no sum is across lanes.

A step of the four passes in _passes.py multiplies a matrix by the decay, adds two outer products, and multiplies the result by
two vectors. This version takes three loops over the matrix. The lanes share the loads of a step's inputs, and e^log_w.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import partial

from kernels.backends.taichi import INDEX, ti
from kernels.wkv7 import _passes
from kernels.wkv7._passes import LANES

REQUIRES = _passes.REQUIRES


@ti.func
def _step(scratch: ti.template(), flat: ti.template(), before, after, other, vectors, M, p, q, w,
          order: ti.template(), along_j: ti.template(), beside: ti.template()):
    """Computes the `step` that _passes.py describes."""
    for block in range(M):
        for lane in range(LANES):
            o = (vectors * LANES + block * 6 * LANES + lane) & INDEX
            m = block * LANES + lane
            old = scratch[before + m] * (w if ti.static(along_j) else flat[o + order[4] * LANES])
            scratch[after + m] = old + p * flat[o + order[0] * LANES] + q * flat[o + order[1] * LANES]
    dot_u = 0.0 * p
    dot_v = 0.0 * p
    dot_other = 0.0 * p
    for block in range(M):
        for lane in range(LANES):
            dot_u += scratch[after + block * LANES + lane] * flat[(vectors + block * 6 + order[2]) * LANES + lane]
    for block in range(M):
        for lane in range(LANES):
            dot_v += scratch[after + block * LANES + lane] * flat[(vectors + block * 6 + order[3]) * LANES + lane]
    if ti.static(beside):
        for m in range(M * LANES):
            dot_other += scratch[after + m] * scratch[other + m]
    return dot_u, dot_v, dot_other


activation_shapes = _passes.activation_shapes
forward = partial(_passes.forward, _passes.Version(_step))
backward = partial(_passes.backward, _passes.Version(_step))
