"""Rung 3: the decay taken out of the state, which leaves 4 multiply-adds for each of its elements and steps instead of 5.

Within a chunk of steps let W_t be the product of w from the chunk's first step to t, S = S' diag(W_t), G = G' / diag(W_t) for
G = dL/dS. With b' = b / W, k' = k / W, r' = r W and a'_t = a_t W_{t-1} the recurrence and its reverse have no decay left:

    forward   lanes i   S' += sa_t b'_t + v_t k'_t              y_t = S' r'_t              sa_{t+1} = S' a'_{t+1}
    rows      lanes i   G' += gsa_{t+1} a'_{t+1} + gy_t r'_t    gv_t = G' k'_t             gsa_t = G' b'_t
    states    lanes j   S' as in forward                        gr_t = W_t (S'^T gy_t)     ga_{t+1} = W_t (S'^T gsa_{t+1})
    keys      lanes j   G' as in rows                           gk_t = (G'^T v_t) / W_t    gb_t = (G'^T sa_t) / W_t

Rows and keys go from the last step to the first. After a chunk the matrix is multiplied by W once. 1/W is at most e^16 where
log_w >= -1. Each of the four is one pass over a matrix: two outer products are added, and it is multiplied by two vectors. The
lanes are where no sum is.

The backward goes twice through a head: from the last chunk to the first for rows, which keep G after each chunk; then forwards,
and of each chunk first its states, then, from its end, its keys. S' before each step of the chunk is kept, so that keys have
both matrices of one moment for log_w's gradient, gl_t = sum_i (S_{t-1} w_t)_ij (G_t)_ij = sum_i (S'_{t-1})_ij (G'_t)_ij. (In
_passes.py is why.)

A task is one (b, h). Forward keeps sa, as large as k. The backward's memory is that of the tasks at work: N/16 + 1 times a
head's k, for each, and 17 vectors for each column of the state.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.backends.lanes import exp, stored
from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.registry import Requires
from kernels.wkv7 import _passes
from kernels.wkv7._passes import LANES, Flat, Vectors, aligned, load_turned, product, store_turned, strip_before, turn

CHUNK = 16  # steps between two multiplications of the matrix by the decay
GROUP = 2  # columns of which a pass loads all before it stores any: Taichi reloads the data's address after a store
FORWARDS, BACKWARDS = (0, 1, 2, 3), (3, 2, 1, 0)  # the order of a step's four vectors: two are added, two are multiplied
REQUIRES = Requires(packages=("taichi",), devices=("cpu",), dtypes=(torch.float32, torch.bfloat16), N_multiple=LANES)

kept = _passes.kept


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *kept: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, N = v.shape
    n = shares(B * H)
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    (sa,) = kept or (state.new_empty(LANES),)
    scratch = state.new_empty(n * (N * N + (6 * CHUNK + 1) * N))
    launch(_forward_kernel(v.dtype), *aligned(r, log_w, k, v, a, b), state.view(-1), y, after.view(-1), sa, scratch, scratch,
           B, T, H, N // LANES, n, len(kept))
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, sa: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, T, H, N = v.shape
    n = shares(B * H)
    grads = tuple(torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state))
    chunks = (T + CHUNK - 1) // CHUNK
    scratch = state.new_empty(n * ((1 + chunks) * N * N + (1 + CHUNK) * LANES * N + (10 * CHUNK + 1 + T) * N))
    launch(_backward_kernel(v.dtype), *aligned(r, log_w, k, v, a, b, state, sa, grad_y), grad_state.view(-1), *grads[:6],
           grads[6].view(-1), scratch, scratch, B, T, H, N // LANES, n)
    return grads


@cache
def _forward_kernel(dtype: torch.dtype) -> Any:
    """With r, k, v, a, b and y of dtype. M: vectors in a head."""
    Rows, read, write = stored(dtype, LANES)

    @ti.kernel
    def forward(r: Rows, log_w: Vectors, k: Rows, v: Rows, a: Rows, b: Rows, state: Flat, y: Rows, after: Flat,
                sa_kept: Vectors, scratch: Vectors, flat: Flat, B: int, T: int, H: int, M: int, n: int, keep: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * H, n)
            S = step // BLOCK * (M * LANES + 6 * CHUNK + 1) * M
            columns = S + M * M * LANES
            decay = columns + 4 * CHUNK * M
            sa = decay + 2 * CHUNK * M
            for head in range(first, end):
                at = (head // H * T * H + head % H) * M
                load_turned(flat, S * LANES, state, head, M)
                for x in range(M):
                    scratch[columns + x] = read(a[at + x])
                for x in range(M):
                    scratch[sa + x] = product(scratch, flat, S + x * M * LANES, columns, M)
                for c in range((T + CHUNK - 1) // CHUNK):
                    steps = ti.min(CHUNK, T - c * CHUNK)
                    _stage_columns(read, scratch, columns, decay, r, log_w, k, a, b, at, c * CHUNK, steps, T, H, M)
                    for x in range(M):
                        sa_t = scratch[sa + x]
                        for s in range(steps):
                            i = at + (c * CHUNK + s) * H * M + x
                            for _ in range(keep):
                                sa_kept[i] = sa_t
                            strip = S + x * M * LANES
                            y_t, sa_t, _other = _pass(scratch, flat, strip, strip, strip, columns + s * 4 * M, M,
                                                      sa_t, read(v[i]), FORWARDS, False)
                            y[i] = write(y_t)
                        scratch[sa + x] = sa_t
                        for j in range(M * LANES):
                            scratch[S + x * M * LANES + j] *= flat[(decay + (steps - 1) * 2 * M) * LANES + j]
                store_turned(after, flat, S * LANES, head, M)

    return forward


@cache
def _backward_kernel(dtype: torch.dtype) -> Any:
    """With r, k, v, a, b, grad_y and their gradients of dtype. M: vectors in a head."""
    Rows, read, write = stored(dtype, LANES)

    @ti.kernel
    def backward(r: Rows, log_w: Vectors, k: Rows, v: Rows, a: Rows, b: Rows, state: Vectors, sa: Vectors, grad_y: Rows,
                 grad_after: Flat, grad_r: Rows, grad_log_w: Vectors, grad_k: Rows, grad_v: Rows, grad_a: Rows, grad_b: Rows,
                 grad_state: Flat, scratch: Vectors, flat: Flat, B: int, T: int, H: int, M: int, n: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * H, n)
            chunks = (T + CHUNK - 1) // CHUNK
            matrix = step // BLOCK * ((1 + chunks) * M * LANES + (1 + CHUNK) * LANES + 10 * CHUNK + 1 + T) * M
            kept = matrix + M * M * LANES
            G = kept + chunks * M * M * LANES
            history = G + M * LANES
            columns = history + CHUNK * M * LANES
            decay = columns + 4 * CHUNK * M
            rows = decay + 2 * CHUNK * M
            gsa = rows + 4 * CHUNK * M  # of T + 1 steps
            for head in range(first, end):
                at = (head // H * T * H + head % H) * M
                # rows: grad_v, gsa, and the gradient of the state
                load_turned(flat, matrix * LANES, grad_after, head, M)
                for x in range(M):
                    scratch[gsa + T * M + x] = ti.Vector([0.0] * LANES)
                for from_last in range(chunks):
                    c = chunks - 1 - from_last
                    t_0 = c * CHUNK
                    steps = ti.min(CHUNK, T - t_0)
                    turn(flat, (kept + c * M * M * LANES) * LANES, matrix * LANES, M)
                    _stage_columns(read, scratch, columns, decay, r, log_w, k, a, b, at, t_0, steps, T, H, M)
                    for x in range(M):
                        strip = matrix + x * M * LANES
                        for j in range(M * LANES):
                            scratch[strip + j] = scratch[strip + j] * flat[(decay + (steps - 1) * 2 * M) * LANES + j]
                        gsa_t = scratch[gsa + (t_0 + steps) * M + x]
                        for s_from_last in range(steps):
                            s = steps - 1 - s_from_last
                            i = at + (t_0 + s) * H * M + x
                            gv_t, gsa_t, _other = _pass(scratch, flat, strip, strip, strip, columns + s * 4 * M, M,
                                                        gsa_t, read(grad_y[i]), BACKWARDS, False)
                            grad_v[i] = write(gv_t)
                            scratch[gsa + (t_0 + s) * M + x] = gsa_t
                for x in range(M):
                    scratch[columns + x] = read(a[at + x])
                for x in range(M):
                    for j in range(M * LANES):
                        m = matrix + x * M * LANES + j
                        scratch[m] = scratch[m] + flat[columns * LANES + j] * scratch[gsa + x]
                store_turned(grad_state, flat, matrix * LANES, head, M)
                # of each chunk states: grad_r, grad_a; and keys: grad_k, grad_b, grad_log_w
                for x in range(M):
                    for i in range(M * LANES):
                        scratch[matrix + x * M * LANES + i] = state[(head * M * LANES + i) * M + x]
                    grad_a[at + x] = write(product(scratch, flat, matrix + x * M * LANES, gsa, M))
                for c in range(chunks):
                    t_0 = c * CHUNK
                    steps = ti.min(CHUNK, T - t_0)
                    _stage_columns(read, scratch, columns, decay, r, log_w, k, a, b, at, t_0, steps, T, H, M)
                    _stage_rows(read, scratch, rows, sa, v, grad_y, gsa, at, t_0, steps, H, M)
                    for x in range(M):
                        for s in range(steps):
                            i = at + (t_0 + s) * H * M + x
                            o = columns + (s * M + x) * 4
                            before = strip_before(s, matrix + x * M * LANES, history, M)
                            after = history + s * M * LANES
                            gr_t, ga_next, _other = _pass(scratch, flat, before, after, before, rows + s * 4 * M, M,
                                                          scratch[o], scratch[o + 1], FORWARDS, False)
                            w = scratch[decay + s * 2 * M + x]
                            grad_r[i] = write(w * gr_t)
                            for _ in range(ti.min(T - 1 - t_0 - s, 1)):
                                grad_a[i + H * M] = write(w * ga_next)
                        w_last = scratch[decay + (steps - 1) * 2 * M + x]
                        for i in range(M * LANES):
                            scratch[G + i] = scratch[kept + (c * M + x) * M * LANES + i] * w_last
                        for s_from_last in range(steps):
                            s = steps - 1 - s_from_last
                            i = at + (t_0 + s) * H * M + x
                            o = columns + (s * M + x) * 4
                            before = strip_before(s, matrix + x * M * LANES, history, M)
                            gk_t, gb_t, gl_t = _pass(scratch, flat, G, G, before, rows + s * 4 * M, M,
                                                     scratch[o + 3], scratch[o + 2], BACKWARDS, True)
                            over = scratch[decay + s * 2 * M + M + x]
                            grad_log_w[i] = gl_t
                            grad_k[i] = write(over * gk_t)
                            grad_b[i] = write(over * gb_t)
                        for i in range(M * LANES):
                            scratch[matrix + x * M * LANES + i] = scratch[history + (steps - 1) * M * LANES + i] * w_last

    return backward


@ti.func
def _pass(scratch: ti.template(), flat: ti.template(), before, after, other, vectors, M, p, q, order: ti.template(),
          beside: ti.template()):
    """Adds p x + q y to the matrix at `before`, of which each vector is a column, and puts the sum at `after`.

    Returns its products with u and v and, if beside, of each lane the sum of products with the matrix at `other`. x, y, u, v:
    the four at `vectors` of scratch, in `order`; each M vectors long, and of each the first vectors come first.
    """
    of_u = 0.0 * p
    of_v = 0.0 * p
    of_other = 0.0 * p
    for block in range(M):
        for group in range(LANES // GROUP):
            o = (vectors * LANES + block * 4 * LANES + group * GROUP) & INDEX
            m = (before + block * LANES + group * GROUP) & INDEX
            new = [scratch[m + g] + p * flat[o + (g + order[0] * LANES)] + q * flat[o + (g + order[1] * LANES)]
                   for g in ti.static(range(GROUP))]
            for g in ti.static(range(GROUP)):
                of_u += new[g] * flat[o + (g + order[2] * LANES)]
                of_v += new[g] * flat[o + (g + order[3] * LANES)]
            if ti.static(beside):
                beside_m = (other + block * LANES + group * GROUP) & INDEX
                for g in ti.static(range(GROUP)):
                    of_other += new[g] * scratch[beside_m + g]
            to = (after + block * LANES + group * GROUP) & INDEX
            for g in ti.static(range(GROUP)):
                scratch[to + g] = new[g]
    return of_u, of_v, of_other


@ti.func
def _stage_columns(read: ti.template(), scratch: ti.template(), columns, decay, r: ti.template(), log_w: ti.template(),
                   k: ti.template(), a: ti.template(), b: ti.template(), at, t_0, steps, T, H, M):
    """Of each step b', k', r' and the next step's a' (0 after the last), and W and 1/W."""
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
            o = columns + (s * M + x) * 4
            scratch[o] = b_t * over
            scratch[o + 1] = k_t * over
            scratch[o + 2] = r_t * w
            scratch[o + 3] = a_next * w * ti.cast(more, ti.f32)
            scratch[decay + s * 2 * M + x] = w
            scratch[decay + s * 2 * M + M + x] = over


@ti.func
def _stage_rows(read: ti.template(), scratch: ti.template(), rows, sa: ti.template(), v: ti.template(),
                grad_y: ti.template(), gsa, at, t_0, steps, H, M):
    """Of each step sa, v, gy and the next step's gsa."""
    for s in range(steps):
        for x in range(M):
            i = at + (t_0 + s) * H * M + x
            sa_t = sa[i]
            v_t = read(v[i])
            gy_t = read(grad_y[i])
            gsa_next = scratch[gsa + (t_0 + s + 1) * M + x]
            o = rows + (s * M + x) * 4
            scratch[o] = sa_t
            scratch[o + 1] = v_t
            scratch[o + 2] = gy_t
            scratch[o + 3] = gsa_next
