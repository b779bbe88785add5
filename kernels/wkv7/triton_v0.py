"""A program computes 16 rows of a head's state; as in cuda_v3, the backward's key pass runs in all chunks in parallel.

    rows    computes gv, gsa, and G after each chunk of 64 steps, from the last step to the first
    keys    computes gr and ga from 16 columns of S, forwards through a chunk; then computes gk, gb and gw_j = sum_i G_ij S'_ij
            from 16 columns of G, backwards. S', the state before the step, is stored at every fourth step on the way forwards.
            On the way back, the steps in between are recomputed

forward saves sa and the state before each chunk. All products and sums are in float32, without tensor cores.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",), dtypes=(torch.float32, torch.bfloat16, torch.float16))

CHUNK = 64                           # steps between two states that forward saves
GROUP = 4                            # steps between two states that _keys stores; equals GROUP in _keys
PROGRAMS = 2048                      # largest number of programs of _keys; each program stores (CHUNK / GROUP) N SHARE numbers
SHARE = 16                           # rows or columns per program, a power of 2
WARPS, KEYS_WARPS = 2, 4              # with 2 warps, _keys would need more than 255 registers


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    return (B, T, H, N), (B, H, -(-T // CHUNK), N, N)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *sa_and_states: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(v)
    after = torch.empty_like(state)
    B, _, H, _ = v.shape
    _launch(_recurrence, v, B * H, r, log_w, k, v, a, b, state, y, after, *(sa_and_states or (after, after)),
            bool(sa_and_states))
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
             sa: Tensor, states: Tensor, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    grads = [torch.empty_like(tensor) for tensor in (r, log_w, k, v, a, b, state)]
    grad_r, grad_log_w, grad_k, grad_v, grad_a, grad_b, grad_state_before = grads
    gsa = torch.empty_like(sa)
    Gs = torch.empty_like(states)
    B, H, chunks, N, _ = states.shape
    shares = triton.cdiv(v.shape[-1], SHARE)
    blocks = min(B * H * chunks, max(1, PROGRAMS // shares))
    starts = state.new_empty(blocks, triton.cdiv(CHUNK, GROUP), N, N)
    _launch(_rows, v, B * H, r, log_w, k, a, b, grad_y, grad_state, grad_v, gsa, Gs, grad_state_before)
    _launch(_keys, v, blocks, r, log_w, k, v, a, b, sa, states, grad_y, gsa, Gs, starts,
            grad_r, grad_log_w, grad_k, grad_a, grad_b, B * H * chunks)
    return tuple(grads)


def _launch(kernel, v: Tensor, blocks: int, *args) -> None:
    _, T, H, N = v.shape
    with torch.cuda.device_of(v):
        grid = blocks, triton.cdiv(N, SHARE)
        kernel[grid](*args, T, H, N, CHUNK, SHARE, triton.next_power_of_2(N),
                     num_warps=KEYS_WARPS if kernel is _keys else WARPS, enable_fp_fusion=True)


@triton.jit
def _place(N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns a program's rows i and all columns j of a matrix (N,N), the masks of existing rows and columns, and offsets."""
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, COLUMNS)[None, :]
    return i, j, i < N, j < N, i * N + j


@triton.jit
def _recurrence(r, log_w, k, v, a, b, state, y, after, sa_saved, states, KEEP: tl.constexpr, T, H, N,
                CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, j, in_i, in_j, place = _place(N, ROWS, COLUMNS)
    inside = in_i & in_j
    at = head * N * N + place
    saved_at = head * tl.cdiv(T, CHUNK) * N * N + place
    x = (head // H * T * H + head % H) * N
    S = tl.load(state + at, mask=inside, other=0.0)
    for t in range(T):
        if KEEP and t % CHUNK == 0:
            tl.store(states + saved_at + t // CHUNK * N * N, S, mask=inside)
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
            tl.store(sa_saved + x + i, sa, mask=in_i)
        x += H * N
    tl.store(after + at, S, mask=inside)


@triton.jit
def _rows(r, log_w, k, a, b, grad_y, grad_state, grad_v, gsa_of_all, Gs, grad_state_before, T, H, N,
          CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, j, in_i, in_j, place = _place(N, ROWS, COLUMNS)
    inside = in_i & in_j
    at = head * N * N + place
    saved_at = head * tl.cdiv(T, CHUNK) * N * N + place
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
            tl.store(Gs + saved_at + t // CHUNK * N * N, G, mask=inside)
        gsa = tl.sum(G * b_j, 1, keep_dims=True)
        tl.store(grad_v + x + i, tl.sum(G * k_j, 1, keep_dims=True).to(grad_v.dtype.element_ty), mask=in_i)
        tl.store(gsa_of_all + x + i, gsa, mask=in_i)
        G = G * w_j + gsa * a_j
        x -= H * N
    tl.store(grad_state_before + at, G, mask=inside)


@triton.jit
def _keys(r, log_w, k, v, a, b, sa, states, grad_y, gsa, Gs, starts, grad_r, grad_log_w, grad_k, grad_a, grad_b, count, T, H, N,
          CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Computes a program's columns in one chunk after another. `count` is the number of chunks of all heads."""
    GROUP: tl.constexpr = 4
    chunks = tl.cdiv(T, CHUNK)
    i = tl.arange(0, ROWS)[:, None]
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_i = i < N
    in_j = j < N
    inside = in_i & in_j
    start = starts + tl.program_id(0).to(tl.int64) * tl.cdiv(CHUNK, GROUP) * N * N + i * N + j
    index = tl.program_id(0).to(tl.int64)
    while index < count:
        head = index // chunks
        first = (index % chunks).to(tl.int32) * CHUNK
        steps = tl.minimum(T - first, CHUNK)
        at = index * N * N + i * N + j
        x = ((head // H * T + first) * H + head % H) * N
        S = tl.load(states + at, mask=inside, other=0.0)
        for s in range(steps):
            if s % GROUP == 0:
                tl.store(start + s // GROUP * N * N, S, mask=inside)
            gy = tl.load(grad_y + x + i, mask=in_i, other=0.0).to(tl.float32)
            gsa_i = tl.load(gsa + x + i, mask=in_i, other=0.0)
            ga = tl.sum(S * gsa_i, 0, keep_dims=True)
            S = _state_after(S, log_w, k, v, b, sa, x, i, j, N)
            gr = tl.sum(S * gy, 0, keep_dims=True)
            tl.store(grad_a + x + j, ga.to(grad_a.dtype.element_ty), mask=in_j)
            tl.store(grad_r + x + j, gr.to(grad_r.dtype.element_ty), mask=in_j)
            x += H * N
        tl.debug_barrier()                                       # waits until all stores are visible
        G = tl.load(Gs + at, mask=inside, other=0.0)
        for group in range(tl.cdiv(steps, GROUP)):
            s = (tl.cdiv(steps, GROUP) - 1 - group) * GROUP
            x = ((head // H * T + first + s) * H + head % H) * N
            S = tl.load(start + s // GROUP * N * N, mask=inside, other=0.0)
            S_1 = _state_after(S, log_w, k, v, b, sa, x, i, j, tl.where(s + 1 < steps, N, 0))
            S_2 = _state_after(S_1, log_w, k, v, b, sa, x + H * N, i, j, tl.where(s + 2 < steps, N, 0))
            S_3 = _state_after(S_2, log_w, k, v, b, sa, x + 2 * H * N, i, j, tl.where(s + 3 < steps, N, 0))
            G = _gradients(G, S_3, s + 3, steps, x + 3 * H * N, H * N, i, j, N,
                           r, log_w, v, a, sa, grad_y, gsa, grad_log_w, grad_k, grad_b)
            G = _gradients(G, S_2, s + 2, steps, x + 2 * H * N, H * N, i, j, N,
                           r, log_w, v, a, sa, grad_y, gsa, grad_log_w, grad_k, grad_b)
            G = _gradients(G, S_1, s + 1, steps, x + H * N, H * N, i, j, N,
                           r, log_w, v, a, sa, grad_y, gsa, grad_log_w, grad_k, grad_b)
            G = _gradients(G, S, s, steps, x, H * N, i, j, N,
                           r, log_w, v, a, sa, grad_y, gsa, grad_log_w, grad_k, grad_b)
        tl.debug_barrier()                                       # the next chunk overwrites `starts`
        index += tl.num_programs(0)


@triton.jit
def _state_after(S, log_w, k, v, b, sa, x, i, j, N):
    """Returns S after the step with vectors at offset x. N = 0 leaves S unchanged."""
    in_i = i < N
    in_j = j < N
    k_j = tl.load(k + x + j, mask=in_j, other=0.0).to(tl.float32)
    b_j = tl.load(b + x + j, mask=in_j, other=0.0).to(tl.float32)
    v_i = tl.load(v + x + i, mask=in_i, other=0.0).to(tl.float32)
    w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
    sa_i = tl.load(sa + x + i, mask=in_i, other=0.0)
    return S * w_j + sa_i * b_j + v_i * k_j


@triton.jit
def _gradients(G, S, s, steps, x, stride, i, j, N, r, log_w, v, a, sa, grad_y, gsa, grad_log_w, grad_k, grad_b):
    """Updates G from step s + 1 to step s, with vectors at offset x, and stores gk, gb and gl of step s.

    S is the state before step s. Steps beyond the end of the chunk change nothing. At the chunk's last step, the argument G is
    already that of the step.
    """
    N_next = tl.where(s + 1 < steps, N, 0)
    N_here = tl.where(s < steps, N, 0)
    in_i = i < N_next
    in_j = j < N_next
    w_next = tl.exp(tl.load(log_w + x + stride + j, mask=in_j, other=0.0))
    a_next = tl.load(a + x + stride + j, mask=in_j, other=0.0).to(tl.float32)
    gsa_next = tl.load(gsa + x + stride + i, mask=in_i, other=0.0)
    r_j = tl.load(r + x + j, mask=in_j, other=0.0).to(tl.float32)
    gy = tl.load(grad_y + x + i, mask=in_i, other=0.0).to(tl.float32)
    G = G * w_next + gsa_next * a_next + gy * r_j
    in_i = i < N_here
    in_j = j < N_here
    v_i = tl.load(v + x + i, mask=in_i, other=0.0).to(tl.float32)
    sa_i = tl.load(sa + x + i, mask=in_i, other=0.0)
    w_j = tl.exp(tl.load(log_w + x + j, mask=in_j, other=0.0))
    gk = tl.sum(G * v_i, 0, keep_dims=True)
    gb = tl.sum(G * sa_i, 0, keep_dims=True)
    tl.store(grad_log_w + x + j, w_j * tl.sum(G * S, 0, keep_dims=True), mask=in_j)
    tl.store(grad_k + x + j, gk.to(grad_k.dtype.element_ty), mask=in_j)
    tl.store(grad_b + x + j, gb.to(grad_b.dtype.element_ty), mask=in_j)
    return G
