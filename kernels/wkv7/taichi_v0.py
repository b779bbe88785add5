"""Version 0 computes the recurrence as written, with one row or column of the state per thread.

A step takes 9 memory accesses for 5 multiply-adds. No sum is divided among threads. A thread processes a row i of S in forward,
a row of G = dL/dS for grad_v and gsa_i = sum_j G_ij b_j, and a column j of both for the other gradients:

    rows      G_ij += gy_i r_j      gv_i = sum_j G_ij k_j      gsa_i = sum_j G_ij b_j      G_ij <- G_ij w_j + gsa_i a_j
    columns   gr_j = sum_i S_ij gy_i (S after)      G_ij += gy_i r_j      gk_j = sum_i G_ij v_i      gb_j = sum_i G_ij sa_i
              gl_j = w_j sum_i G_ij S'_ij (S' before)      ga_j = sum_i S'_ij gsa_i      G_ij <- G_ij w_j + gsa_i a_j

Both passes go from the last step to the first. forward saves sa and the state before each chunk of steps. From that state a
thread recomputes a column through the chunk. The same kernels run on CPUs and GPUs.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from typing import Any

import torch
from torch import Tensor

from kernels.backends.taichi import launch, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",))

CHUNK = 32  # steps between saved states
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of sa and of the states before each chunk."""
    return (B, T, H, N), ((T + CHUNK - 1) // CHUNK, B, H, N, N)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *activations: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(v)
    after = state.clone()
    sa, states = activations or (state.new_empty(1), state.new_empty(1))
    _launch(_forward, v.shape, r, log_w, k, v, a, b, y, after, sa, states, len(activations))
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, sa: Tensor, states: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    B, _, H, N = v.shape
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, gsa = (torch.empty_like(v) for _ in range(7))
    _launch(_rows, v.shape, r, log_w, k, a, b, grad_y, grad_state.clone(), grad_v, gsa)
    G = grad_state.clone()
    history = state.new_empty(CHUNK + 1, B, H, N, N)
    _launch(_columns, v.shape, r, log_w, k, v, a, b, sa, states, grad_y, gsa, G, history,
            grad_r, grad_log_w, grad_k, grad_a, grad_b)
    return grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, G


def _launch(kernel: Any, shape: torch.Size, *args: Any) -> None:
    launch(kernel, *(arg.view(-1) if isinstance(arg, Tensor) else arg for arg in args), *shape)


@ti.kernel
def _forward(r: Flat, log_w: Flat, k: Flat, v: Flat, a: Flat, b: Flat, y: Flat, S: Flat, sa_saved: Flat, states: Flat,
             save: int, B: int, T: int, H: int, N: int):
    for row in range(B * H * N):
        for t in range(T):
            at = _vector(row // N, t, T, H, N)
            if save > 0 and t % CHUNK == 0:
                for j in range(N):
                    states[(t // CHUNK * B * H * N + row) * N + j] = S[row * N + j]
            sa = 0.0
            for j in range(N):
                sa += S[row * N + j] * a[at + j]
            if save > 0:
                sa_saved[at + row % N] = sa
            for j in range(N):
                S[row * N + j] = S[row * N + j] * ti.exp(log_w[at + j]) + sa * b[at + j] + v[at + row % N] * k[at + j]
            y_i = 0.0
            for j in range(N):
                y_i += S[row * N + j] * r[at + j]
            y[at + row % N] = y_i


@ti.kernel
def _rows(r: Flat, log_w: Flat, k: Flat, a: Flat, b: Flat, grad_y: Flat, G: Flat, grad_v: Flat, gsa: Flat,
          B: int, T: int, H: int, N: int):
    for row in range(B * H * N):
        for from_last in range(T):
            at = _vector(row // N, T - 1 - from_last, T, H, N)
            gv_i = 0.0
            gsa_i = 0.0
            for j in range(N):
                G[row * N + j] += grad_y[at + row % N] * r[at + j]
                gv_i += G[row * N + j] * k[at + j]
                gsa_i += G[row * N + j] * b[at + j]
            for j in range(N):
                G[row * N + j] = G[row * N + j] * ti.exp(log_w[at + j]) + gsa_i * a[at + j]
            grad_v[at + row % N] = gv_i
            gsa[at + row % N] = gsa_i


@ti.kernel
def _columns(r: Flat, log_w: Flat, k: Flat, v: Flat, a: Flat, b: Flat, sa: Flat, states: Flat, grad_y: Flat, gsa: Flat,
             G: Flat, history: Flat, grad_r: Flat, grad_log_w: Flat, grad_k: Flat, grad_a: Flat, grad_b: Flat,
             B: int, T: int, H: int, N: int):
    for column in range(B * H * N):
        head, j = column // N, column % N
        chunks = (T + CHUNK - 1) // CHUNK
        for chunk_from_last in range(chunks):
            chunk = chunks - 1 - chunk_from_last
            first = chunk * CHUNK
            steps = ti.min(CHUNK, T - chunk * CHUNK)
            for i in range(N):
                history[(head * N + i) * N + j] = states[((chunk * B * H + head) * N + i) * N + j]
            for s in range(steps):
                at = _vector(head, first + s, T, H, N)
                w = ti.exp(log_w[at + j])
                b_j = b[at + j]
                k_j = k[at + j]
                for i in range(N):
                    before = ((s * B * H + head) * N + i) * N + j
                    history[before + B * H * N * N] = history[before] * w + sa[at + i] * b_j + v[at + i] * k_j
            for from_last in range(steps):
                s = steps - 1 - from_last
                at = _vector(head, first + s, T, H, N)
                w = ti.exp(log_w[at + j])
                r_j = r[at + j]
                a_j = a[at + j]
                gr = 0.0
                gl = 0.0
                gk = 0.0
                ga = 0.0
                gb = 0.0
                for i in range(N):
                    before = ((s * B * H + head) * N + i) * N + j
                    g = G[(head * N + i) * N + j] + grad_y[at + i] * r_j
                    gr += history[before + B * H * N * N] * grad_y[at + i]
                    gk += g * v[at + i]
                    gb += g * sa[at + i]
                    gl += g * history[before]
                    ga += history[before] * gsa[at + i]
                    G[(head * N + i) * N + j] = g * w + gsa[at + i] * a_j
                grad_r[at + j] = gr
                grad_log_w[at + j] = w * gl
                grad_k[at + j] = gk
                grad_a[at + j] = ga
                grad_b[at + j] = gb


@ti.func
def _vector(head, t, T, H, N):
    """Returns the index of the first of a head's N numbers at step t."""
    return ((head // H * T + t) * H + head % H) * N
