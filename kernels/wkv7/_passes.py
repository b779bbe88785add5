"""Contains the four passes over a matrix that taichi_v1, v2 and v3 (versions 1 to 3) share. Each file defines a pass's step.

    forward   lanes i   S = S w_t + sa_t b_t + v_t k_t                  y_t = S r_t      sa_{t+1} = S a_{t+1}
    rows      lanes i   G = G w_{t+1} + gsa_{t+1} a_{t+1} + gy_t r_t    gv_t = G k_t     gsa_t = G b_t
    states    lanes j   S as in forward                                 gr_t = S^T gy_t  ga_{t+1} = S^T gsa_{t+1}
    keys      lanes j   G as in rows                                    gk_t = G^T v_t   gb_t = G^T sa_t

G is dL/dS. The passes `rows` and `keys` go from the last step to the first. Lanes run along the axis that is not summed over.
The backward visits each chunk of a head twice. First `rows`, from the last chunk to the first, saves G after each chunk. Then,
from the first chunk to the last, `states` runs forwards through a chunk and `keys` backwards. `states` saves S before each step
of the chunk, so that `keys` has S and G of the same step for log_w's gradient,

    gl_t = w_t sum_i (S_{t-1})_ij (G_t)_ij

The recurrence gl_t = gl_{t+1} + (r gr)_t + (a ga)_{t+1} - (b gb)_t - (k gk)_t would not need this product. But then a small gl
next to a large gl would be the difference of two large sums, and a gl of 0 would not be exactly 0.

A task is one batch row and head. Forward saves sa, which is as large as k. Backward needs memory only for the tasks that run at
the same time. Each task needs N/16 + 1 times the memory of a head's k, and 17 vectors per column of the state.

The ti.func step(scratch, flat, before, after, other, vectors, M, p, q, w, order, along_j, beside) reads the matrix at `before`,
in which each vector is a column. The step multiplies the matrix by w, adds p x^T + q y^T and stores the sum at `after`. The
results are the products of the sum with u and v and, if `beside`, the sum of the products with the matrix at `other` for each
lane. x, y, u, v (and w, unless the lanes are along j) are at `vectors` of scratch in the order `order`, M vectors each,
interleaved.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends.lanes import exp, storage_of
from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.registry import Requires

LANES = 16  # per vector; AVX2's registers then hold the running sums and the factors of the two outer products
CHUNK = 16  # steps whose vectors are staged at a time
ALIGNMENT = 64  # bytes; a vector load from an unaligned address is a segmentation fault
FORWARDS, BACKWARDS = (0, 1, 2, 3, 4), (3, 2, 1, 0, 5)  # order of a step's vectors: x, y, u, v, w
REQUIRES = Requires(packages=("taichi",), devices=("cpu",), N_multiple=LANES)
Vectors = ti.types.ndarray(dtype=ti.types.vector(LANES, ti.f32), ndim=1)
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)


class Version(NamedTuple):
    """The parts that differ between versions.

    Attributes:
        step: the ti.func that the module describes.
        stage: a ti.func that prepares the vectors of a chunk's steps, stage(read, scratch, columns, ...).
        outside: whether the decay is factored out, so that it multiplies the matrix only once per chunk (taichi_v3).
    """

    step: Any
    stage: Any = None
    outside: bool = False


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of sa, the only activation."""
    return ((B, T, H, N),)


def forward(version: Version, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *activations: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, N = v.shape
    n = shares(B * H)
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    (sa,) = activations or (state.new_empty(LANES),)
    scratch = state.new_empty(n * (N * N + (6 * CHUNK + 1) * N))
    launch(_forward_kernel(v.dtype, version), *align(r, log_w, k, v, a, b), state.view(-1), y, after.view(-1), sa, scratch,
           scratch, B, T, H, N // LANES, n, len(activations))
    return y, after


def backward(version: Version, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, sa: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, T, H, N = v.shape
    n = shares(B * H)
    grads = tuple(torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state))
    chunks = (T + CHUNK - 1) // CHUNK
    scratch = state.new_empty(n * ((1 + chunks) * N * N + (1 + CHUNK) * LANES * N + (12 * CHUNK + 1 + T) * N))
    launch(_backward_kernel(v.dtype, version), *align(r, log_w, k, v, a, b, state, sa, grad_y), grad_state.view(-1),
           *grads[:6], grads[6].view(-1), scratch, scratch, B, T, H, N // LANES, n)
    return grads


def align(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone() for tensor in tensors)


@cache
def _forward_kernel(dtype: torch.dtype, version: Version) -> Any:
    """Returns the forward kernel for r, k, v, a, b and y of `dtype`. The argument M is the number of vectors in a head."""
    Rows, read, write = storage_of(dtype, LANES)
    update = version.step
    stage = version.stage or _stage_columns
    outside = version.outside

    @ti.kernel
    def forward(r: Rows, log_w: Vectors, k: Rows, v: Rows, a: Rows, b: Rows, state: Flat, y: Rows, after: Flat,
                sa_saved: Vectors, scratch: Vectors, flat: Flat, B: int, T: int, H: int, M: int, n: int, save: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * H, n)
            S = step // BLOCK * (M * LANES + 6 * CHUNK + 1) * M
            columns = S + M * M * LANES
            sa = columns + 6 * CHUNK * M
            for head in range(first, end):
                at = (head // H * T * H + head % H) * M
                load_turned(flat, S * LANES, state, head, M)
                for x in range(M):
                    scratch[columns + x] = read(a[at + x])
                for x in range(M):
                    scratch[sa + x] = product(scratch, flat, S + x * M * LANES, columns, M)
                for c in range((T + CHUNK - 1) // CHUNK):
                    steps = ti.min(CHUNK, T - c * CHUNK)
                    stage(read, scratch, columns, r, log_w, k, a, b, at, c * CHUNK, steps, T, H, M)
                    for x in range(M):
                        strip = S + x * M * LANES
                        sa_t = scratch[sa + x]
                        for s in range(steps):
                            i = at + (c * CHUNK + s) * H * M + x
                            for _ in range(save):
                                sa_saved[i] = sa_t
                            y_t, sa_t, _other = update(scratch, flat, strip, strip, strip, columns + s * 6 * M, M,
                                                       sa_t, read(v[i]), sa_t, FORWARDS, False, False)
                            y[i] = write(y_t)
                        scratch[sa + x] = sa_t
                        if ti.static(outside):
                            _decay(scratch, flat, strip, columns, steps, M)
                store_turned(after, flat, S * LANES, head, M)

    return forward


@cache
def _backward_kernel(dtype: torch.dtype, version: Version) -> Any:
    """Returns the backward kernel for r, k, v, a, b, grad_y and gradients of `dtype`. M is as in _forward_kernel."""
    Rows, read, write = storage_of(dtype, LANES)
    update = version.step
    stage = version.stage or _stage_columns
    outside = version.outside

    @ti.kernel
    def backward(r: Rows, log_w: Vectors, k: Rows, v: Rows, a: Rows, b: Rows, state: Vectors, sa: Vectors, grad_y: Rows,
                 grad_after: Flat, grad_r: Rows, grad_log_w: Vectors, grad_k: Rows, grad_v: Rows, grad_a: Rows, grad_b: Rows,
                 grad_state: Flat, scratch: Vectors, flat: Flat, B: int, T: int, H: int, M: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * H, n)
            chunks = (T + CHUNK - 1) // CHUNK
            matrix = step // BLOCK * ((1 + chunks) * M * LANES + (1 + CHUNK) * LANES + 12 * CHUNK + 1 + T) * M
            states = matrix + M * M * LANES
            G = states + chunks * M * M * LANES
            history = G + M * LANES
            columns = history + CHUNK * M * LANES
            rows = columns + 6 * CHUNK * M
            gsa = rows + 6 * CHUNK * M  # gsa has T + 1 steps
            for head in range(first, end):
                at = (head // H * T * H + head % H) * M
                # the pass `rows` computes grad_v, gsa, and the gradient of the state
                load_turned(flat, matrix * LANES, grad_after, head, M)
                for x in range(M):
                    scratch[gsa + T * M + x] = ti.Vector([0.0] * LANES)
                for from_last in range(chunks):
                    c = chunks - 1 - from_last
                    t_0 = c * CHUNK
                    steps = ti.min(CHUNK, T - t_0)
                    turn(flat, (states + c * M * M * LANES) * LANES, matrix * LANES, M)
                    stage(read, scratch, columns, r, log_w, k, a, b, at, t_0, steps, T, H, M)
                    for x in range(M):
                        strip = matrix + x * M * LANES
                        if ti.static(outside):
                            _decay(scratch, flat, strip, columns, steps, M)
                        gsa_t = scratch[gsa + (t_0 + steps) * M + x]
                        for s_from_last in range(steps):
                            s = steps - 1 - s_from_last
                            i = at + (t_0 + s) * H * M + x
                            gv_t, gsa_t, _other = update(scratch, flat, strip, strip, strip, columns + s * 6 * M, M,
                                                         gsa_t, read(grad_y[i]), gsa_t, BACKWARDS, False, False)
                            grad_v[i] = write(gv_t)
                            scratch[gsa + (t_0 + s) * M + x] = gsa_t
                for x in range(M):
                    scratch[columns + x] = read(a[at + x])
                    scratch[columns + M + x] = exp(log_w[at + x])
                for x in range(M):
                    for j in range(M * LANES):
                        m = matrix + x * M * LANES + j
                        a_0 = flat[columns * LANES + j]
                        w_0 = flat[(columns + M) * LANES + j]
                        scratch[m] = (scratch[m] if ti.static(outside) else w_0 * scratch[m]) + a_0 * scratch[gsa + x]
                store_turned(grad_state, flat, matrix * LANES, head, M)
                # for each chunk, the pass `states` computes grad_r and grad_a, and `keys` grad_k, grad_b and grad_log_w
                for x in range(M):
                    for i in range(M * LANES):
                        scratch[matrix + x * M * LANES + i] = state[(head * M * LANES + i) * M + x]
                    grad_a[at + x] = write(product(scratch, flat, matrix + x * M * LANES, gsa, M))
                for c in range(chunks):
                    t_0 = c * CHUNK
                    steps = ti.min(CHUNK, T - t_0)
                    stage(read, scratch, columns, r, log_w, k, a, b, at, t_0, steps, T, H, M)
                    _stage_rows(read, scratch, rows, sa, v, grad_y, gsa, at, t_0, steps, H, M)
                    for x in range(M):
                        for s in range(steps):
                            i = at + (t_0 + s) * H * M + x
                            o = columns + (s * M + x) * 6
                            before = strip_before(s, matrix + x * M * LANES, history, M)
                            after = history + s * M * LANES
                            gr_t, ga_next, _other = update(scratch, flat, before, after, before, rows + s * 6 * M, M,
                                                           scratch[o], scratch[o + 1], scratch[o + 4], FORWARDS, True, False)
                            grad_r[i] = write(scratch[o + 4] * gr_t if ti.static(outside) else gr_t)
                            for _ in range(ti.min(T - 1 - t_0 - s, 1)):
                                grad_a[i + H * M] = write(scratch[o + 4] * ga_next if ti.static(outside) else ga_next)
                        w_last = scratch[columns + ((steps - 1) * M + x) * 6 + 4]
                        for i in range(M * LANES):
                            G_i = scratch[states + (c * M + x) * M * LANES + i]
                            scratch[G + i] = G_i * w_last if ti.static(outside) else G_i
                        for s_from_last in range(steps):
                            s = steps - 1 - s_from_last
                            i = at + (t_0 + s) * H * M + x
                            o = columns + (s * M + x) * 6
                            before = strip_before(s, matrix + x * M * LANES, history, M)
                            gk_t, gb_t, g_t = update(scratch, flat, G, G, before, rows + s * 6 * M, M,
                                                     scratch[o + 3], scratch[o + 2], scratch[o + 5], BACKWARDS, True, True)
                            grad_log_w[i] = g_t if ti.static(outside) else scratch[o + 4] * g_t
                            grad_k[i] = write(scratch[o + 5] * gk_t if ti.static(outside) else gk_t)
                            grad_b[i] = write(scratch[o + 5] * gb_t if ti.static(outside) else gb_t)
                        for i in range(M * LANES):
                            S_i = scratch[history + (steps - 1) * M * LANES + i]
                            scratch[matrix + x * M * LANES + i] = S_i * w_last if ti.static(outside) else S_i

    return backward


@ti.func
def product(scratch: ti.template(), flat: ti.template(), matrix, vector, M):
    """Returns the product of a matrix with vectors as columns and a long vector, stored as M vectors at `vector`."""
    total = 0.0 * scratch[matrix]
    for j in range(M * LANES):
        total += scratch[matrix + j] * flat[vector * LANES + j]
    return total


@ti.func
def _decay(scratch: ti.template(), flat: ti.template(), strip, columns, steps, M):
    for j in range(M * LANES):
        scratch[strip + j] *= flat[(columns + ((steps - 1) * M + j // LANES) * 6 + 4) * LANES + j % LANES]


@ti.func
def _stage_columns(read: ti.template(), scratch: ti.template(), columns, r: ti.template(), log_w: ti.template(),
                   k: ti.template(), a: ti.template(), b: ti.template(), at, t_0, steps, T, H, M):
    """Stores b, k, r, the next step's a (0 after the last), w, and the next step's w (1 after the last) for each step."""
    for x in range(M):
        for s in range(steps):
            i = at + (t_0 + s) * H * M + x
            more = ti.min(T - 1 - t_0 - s, 1)
            following = i + more * H * M
            b_t = read(b[i])
            k_t = read(k[i])
            r_t = read(r[i])
            a_next = read(a[following])
            w = exp(log_w[i])
            w_next = exp(log_w[following] * ti.cast(more, ti.f32))
            o = columns + (s * M + x) * 6
            scratch[o] = b_t
            scratch[o + 1] = k_t
            scratch[o + 2] = r_t
            scratch[o + 3] = a_next * ti.cast(more, ti.f32)
            scratch[o + 4] = w
            scratch[o + 5] = w_next


@ti.func
def _stage_rows(read: ti.template(), scratch: ti.template(), rows, sa: ti.template(), v: ti.template(),
                grad_y: ti.template(), gsa, at, t_0, steps, H, M):
    """Stores sa, v, gy and the next step's gsa for each step."""
    for s in range(steps):
        for x in range(M):
            i = at + (t_0 + s) * H * M + x
            sa_t = sa[i]
            v_t = read(v[i])
            gy_t = read(grad_y[i])
            gsa_next = scratch[gsa + (t_0 + s + 1) * M + x]
            o = rows + (s * M + x) * 6
            scratch[o] = sa_t
            scratch[o + 1] = v_t
            scratch[o + 2] = gy_t
            scratch[o + 3] = gsa_next


@ti.func
def strip_before(s, first, history, M):
    """Returns the index of the columns of the state before step s of a chunk, which is `first` for step 0."""
    return ti.select(s > 0, history + (s - 1) * M * LANES, first)


@ti.func
def turn(flat: ti.template(), to, matrix, M):
    """Copies a matrix with lanes along i to a matrix with lanes along j."""
    for x in range(M):
        for i in range(M * LANES):
            for j in range(LANES):
                flat[to + (x * M * LANES + i) * LANES + j] = (
                    flat[matrix + (i // LANES * M * LANES + x * LANES + j) * LANES + i % LANES])


@ti.func
def load_turned(flat: ti.template(), matrix, state: ti.template(), head, M):
    """Loads a head's state into vectors with lanes along i."""
    for x in range(M):
        for j in range(M * LANES):
            for i in range(LANES):
                flat[matrix + (x * M * LANES + j) * LANES + i] = state[(head * M * LANES + x * LANES + i) * M * LANES + j]


@ti.func
def store_turned(state: ti.template(), flat: ti.template(), matrix, head, M):
    for x in range(M):
        for i in range(LANES):
            for j in range(M * LANES):
                state[(head * M * LANES + x * LANES + i) * M * LANES + j] = flat[matrix + (x * M * LANES + j) * LANES + i]
