"""The recurrence, 16 rows of a head's state to a program; the backward as in cuda_v3: rows, and the keys of all chunks at once.

    rows    G from the last step to the first: gv, gsa, and G after each chunk of 64 steps
    keys    16 columns of S through a chunk: gr and ga; then of G, back: gk and gb; and gw from X_j = sum_i G_ij S_ij after a
            step, X = gw w + b gb + k gk = gw' w' + a' ga' + r gr; ' is of the next step

forward keeps sa, and the state before each chunk. All products and sums are in float32, none on tensor cores.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",), dtypes=(torch.float32, torch.bfloat16))

CHUNK = 64                           # steps between two states that forward keeps
SHARE = 16                           # rows or columns of a program, a power of 2
WARPS = 2


def kept(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    return (B, T, H, N), (B, H, -(-T // CHUNK), N, N)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *sa_and_states: Tensor) -> tuple[Tensor, Tensor]:
    y, after = torch.empty_like(v), torch.empty_like(state)
    _launch(_recurrence, v, 1, r, log_w, k, v, a, b, state, y, after, *(sa_and_states or (after, after)), bool(sa_and_states))
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             sa: Tensor, states: Tensor, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state)]
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, grad_state_before = grads
    gsa, of_X, Gs = torch.empty_like(sa), torch.empty_like(sa), torch.empty_like(states)
    _launch(_rows, v, 1, r, log_w, k, a, b, grad_y, grad_state, grad_v, gsa, Gs, grad_state_before)
    _launch(_keys, v, states.shape[2], r, log_w, k, v, a, b, sa, states, grad_y, gsa, Gs, of_X,
            grad_r, grad_log_w, grad_k, grad_a, grad_b)
    return tuple(grads)


def _launch(kernel, v: Tensor, chunks: int, *args) -> None:
    B, T, H, N = v.shape
    with torch.cuda.device_of(v):
        grid = B * H * chunks, triton.cdiv(N, SHARE)
        kernel[grid](*args, T, H, N, CHUNK, SHARE, triton.next_power_of_2(N), num_warps=WARPS)


@triton.jit
def _recurrence(r, log_w, k, v, a, b, state, y, after, sa_kept, states, KEEP: tl.constexpr, T, H, N,
             CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    in_i, in_j = i < N, j < N
    at, inside = head * N * N + i * N + j, in_i & in_j
    kept_at = head * tl.cdiv(T, CHUNK) * N * N + i * N + j
    x = (head // H * T * H + head % H) * N
    S = tl.load(state + at, mask=inside, other=0.0)
    for t in range(T):
        if KEEP and t % CHUNK == 0:
            tl.store(states + kept_at + t // CHUNK * N * N, S, mask=inside)
        r_j = tl.load(r + x + j, mask=in_j, other=0.0).to(tl.float32)
        k_j = tl.load(k + x + j, mask=in_j, other=0.0).to(tl.float32)
        a_j = tl.load(a + x + j, mask=in_j, other=0.0).to(tl.float32)
        b_j = tl.load(b + x + j, mask=in_j, other=0.0).to(tl.float32)
        v_i = tl.load(v + x + i, mask=in_i, other=0.0).to(tl.float32)
        w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
        sa = tl.sum(S * a_j, 1, keep_dims=True)
        S = S * w_j + sa * b_j + v_i * k_j
        tl.store(y + x + i, tl.sum(S * r_j, 1, keep_dims=True).to(y.dtype.element_ty), mask=in_i)
        if KEEP:
            tl.store(sa_kept + x + i, sa, mask=in_i)
        x += H * N
    tl.store(after + at, S, mask=inside)


@triton.jit
def _rows(r, log_w, k, a, b, grad_y, grad_state, grad_v, gsa_of_all, Gs, grad_state_before, T, H, N,
          CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    in_i, in_j = i < N, j < N
    at, inside = head * N * N + i * N + j, in_i & in_j
    kept_at = head * tl.cdiv(T, CHUNK) * N * N + i * N + j
    x = ((head // H * T + T - 1) * H + head % H) * N
    G = tl.load(grad_state + at, mask=inside, other=0.0)
    for back in range(T):
        t = T - 1 - back
        r_j = tl.load(r + x + j, mask=in_j, other=0.0).to(tl.float32)
        k_j = tl.load(k + x + j, mask=in_j, other=0.0).to(tl.float32)
        a_j = tl.load(a + x + j, mask=in_j, other=0.0).to(tl.float32)
        b_j = tl.load(b + x + j, mask=in_j, other=0.0).to(tl.float32)
        gy = tl.load(grad_y + x + i, mask=in_i, other=0.0).to(tl.float32)
        w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
        G += gy * r_j
        if back == 0 or (t + 1) % CHUNK == 0:
            tl.store(Gs + kept_at + t // CHUNK * N * N, G, mask=inside)
        gsa = tl.sum(G * b_j, 1, keep_dims=True)
        tl.store(grad_v + x + i, tl.sum(G * k_j, 1, keep_dims=True).to(grad_v.dtype.element_ty), mask=in_i)
        tl.store(gsa_of_all + x + i, gsa, mask=in_i)
        G = G * w_j + gsa * a_j
        x -= H * N
    tl.store(grad_state_before + at, G, mask=inside)


@triton.jit
def _keys(r, log_w, k, v, a, b, sa, states, grad_y, gsa, Gs, of_X, grad_r, grad_log_w, grad_k, grad_a, grad_b, T, H, N,
          CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    chunks = tl.cdiv(T, CHUNK)
    head, first = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks * CHUNK
    steps = tl.minimum(T - first, CHUNK)
    i, j = tl.arange(0, ROWS)[:, None], tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_i, in_j = i < N, j < N
    at, inside = tl.program_id(0).to(tl.int64) * N * N + i * N + j, in_i & in_j
    x = ((head // H * T + first) * H + head % H) * N
    S = tl.load(states + at, mask=inside, other=0.0)
    r_gr = tl.zeros([1, COLUMNS], tl.float32)
    for _ in range(steps):
        r_j = tl.load(r + x + j, mask=in_j, other=0.0).to(tl.float32)
        k_j = tl.load(k + x + j, mask=in_j, other=0.0).to(tl.float32)
        a_j = tl.load(a + x + j, mask=in_j, other=0.0).to(tl.float32)
        b_j = tl.load(b + x + j, mask=in_j, other=0.0).to(tl.float32)
        v_i = tl.load(v + x + i, mask=in_i, other=0.0).to(tl.float32)
        w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
        gy = tl.load(grad_y + x + i, mask=in_i, other=0.0).to(tl.float32)
        sa_i = tl.load(sa + x + i, mask=in_i, other=0.0)
        gsa_i = tl.load(gsa + x + i, mask=in_i, other=0.0)
        ga = tl.sum(S * gsa_i, 0, keep_dims=True)
        S = S * w_j + sa_i * b_j + v_i * k_j
        gr = tl.sum(S * gy, 0, keep_dims=True)
        tl.store(grad_a + x + j, ga.to(grad_a.dtype.element_ty), mask=in_j)
        tl.store(grad_r + x + j, gr.to(grad_r.dtype.element_ty), mask=in_j)
        tl.store(of_X + x + j, r_gr + a_j * ga, mask=in_j)       # X of the step before, without gw w
        r_gr = r_j * gr
        x += H * N
    tl.debug_barrier()                                           # all that was stored can be loaded
    G = tl.load(Gs + at, mask=inside, other=0.0)
    X = tl.sum(S * G, 0, keep_dims=True)
    for back in range(steps):
        x -= H * N
        k_j = tl.load(k + x + j, mask=in_j, other=0.0).to(tl.float32)
        b_j = tl.load(b + x + j, mask=in_j, other=0.0).to(tl.float32)
        v_i = tl.load(v + x + i, mask=in_i, other=0.0).to(tl.float32)
        sa_i = tl.load(sa + x + i, mask=in_i, other=0.0)
        gk = tl.sum(G * v_i, 0, keep_dims=True)
        gb = tl.sum(G * sa_i, 0, keep_dims=True)
        gw_w = X - k_j * gk - b_j * gb
        X = gw_w + tl.load(of_X + x + j, mask=in_j, other=0.0)
        tl.store(grad_log_w + x + j, gw_w, mask=in_j)
        tl.store(grad_k + x + j, gk.to(grad_k.dtype.element_ty), mask=in_j)
        tl.store(grad_b + x + j, gb.to(grad_b.dtype.element_ty), mask=in_j)
        if back + 1 < steps:
            w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
            gsa_i = tl.load(gsa + x + i, mask=in_i, other=0.0)
            a_j = tl.load(a + x + j, mask=in_j, other=0.0).to(tl.float32)
            before = x - H * N
            r_j = tl.load(r + before + j, mask=in_j, other=0.0).to(tl.float32)
            gy = tl.load(grad_y + before + i, mask=in_i, other=0.0).to(tl.float32)
            G = G * w_j + gsa_i * a_j + gy * r_j
