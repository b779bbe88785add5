"""Version 3 computes more products per load, with vectors of eight lanes on a CPU and several batches per thread on a GPU.

The three products follow the formula in _tiles.py. With i = lane + L d and j = phase + L e, one vector of the window, at phase
+ L (d + e), serves every pair (d, e) with the same d + e. So on a CPU, 15 vector loads and 8 broadcasts serve 64 multiply-adds
of 8 lanes.

LLVM generates this code under four conditions: arrays are flat and indexed by one masked base plus constants, so that LLVM
merges eight adjacent loads; accumulators are Taichi vectors; stores go to an array of vectors; at most about 64 products are
unrolled. One vector crosses the end of a row, so the last eight values of the row are copied, followed by eight zeros. Zero
times infinity is NaN, so a nonfinite value also makes up to seven earlier outputs NaN on a CPU, and a whole tile on a GPU.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from typing import Any

import torch
from torch import Tensor

from kernels.backends.taichi import BLOCK, INDEX, launch, share, shares, ti
from kernels.registry import Requires
from kernels.timex._tiles import Flat, column, read

REQUIRES = Requires(packages=("taichi",), T_multiple=32)

LANES = 8  # elements per vector, on a CPU
THREADS, T_GROUP, B_GROUP = 32, 4, 4  # on a GPU: threads per block; time steps and batches per thread
CUDA_TILE = THREADS * T_GROUP
Lanes = ti.types.vector(LANES, ti.f32)
Edge = ti.types.vector(2 * LANES, ti.f32)
FlatLanes = ti.types.ndarray(dtype=Lanes, ndim=1)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(k)
    _launch(_forward_cpu, _forward_cuda, k.shape[0] * k.shape[1], w, k, out, *k.shape, eps, False)
    return out


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    B, C, T = grad_out.shape
    grad = torch.empty_like(grad_out)
    _launch(_forward_cpu, _forward_cuda, B * C, w, grad_out, grad, B, C, T, 0.0, True)
    return grad


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    grad = torch.empty_like(k[0])
    _launch(_grad_w_cpu, _grad_w_cuda, grad.numel() // _tile(k), k, grad_out, grad, *k.shape)
    return grad


def _tile(k: Tensor) -> int:
    return 64 if k.shape[-1] % 64 == 0 else 32


def _launch(on_cpu: Any, on_cuda: Any, tasks: int, left: Tensor, right: Tensor, result: Tensor, *numbers: Any) -> None:
    inputs = left.view(-1), right.view(-1)
    if left.is_cuda:
        launch(on_cuda, *inputs, result.view(-1), *numbers)
    else:
        launch(on_cpu, *inputs, result.view(-1, LANES), *numbers, shares(tasks), _tile(result) // LANES)


@ti.kernel
def _forward_cpu(w: Flat, k: Flat, out: FlatLanes, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template(),
                 n: int, N: ti.template()):
    for step in range(n * BLOCK):
        tail = Edge(0.0)  # the end of a row of w, then zeros
        first, end = share(step, B * C, n)
        for row in range(first, end):
            w_end = (row % C + 1) * T
            sign = ti.static(-1 if backwards else 1)
            k_0 = row * T + (T - 1 if ti.static(backwards) else 0)
            _copy(tail, 0, w, w_end - LANES)
            for tile in range(T // (LANES * N)):
                t_0 = tile * LANES * N
                total = [Lanes(eps) for _ in ti.static(range(N))]
                for u_tile, phase in ti.ndrange(tile, LANES):
                    u = u_tile * LANES * N + phase
                    _add(total, w, w_end - LANES * N - t_0 + u, k, k_0 + sign * u, sign * LANES, 0, 2 * N - 1, N)
                for phase in range(LANES):
                    k_at = k_0 + sign * (t_0 + phase)
                    _add(total, w, w_end - LANES * N + phase, k, k_at, sign * LANES, 0, N - 1, N)
                    _add(total, tail, phase - LANES * (N - 1), k, k_at, sign * LANES, N - 1, N, N)
                if ti.static(backwards):
                    _store(out, row * T + T - LANES * N - t_0, total, N)
                else:
                    _store_reversed(out, row * T + t_0, total, N)


@ti.kernel
def _grad_w_cpu(k: Flat, grad_out: Flat, grad_w: FlatLanes, B: int, C: int, T: int, n: int, N: ti.template()):
    for step in range(n * BLOCK):
        tiles = T // (LANES * N)
        head = Edge(0.0)  # zeros, then the beginning of a row of k
        first, end = share(step, C * tiles, n)
        for task in range(first, end):
            _store(grad_w, task * LANES * N, [Lanes(0.0) for _ in ti.static(range(N))], N)
        for b in range(B):  # this loop is the outermost, so that memory is read in order
            for task in range(first, end):
                row = (b * C + task // tiles) * T
                tile = task % tiles
                t_0 = row + (tiles - 1 - tile) * LANES * N
                _copy(head, LANES, k, row)
                total = [Lanes(0.0) for _ in ti.static(range(N))]
                for phase in range(LANES):
                    _add(total, head, phase + 1 - LANES * (N - 1), grad_out, t_0 + phase, LANES, N - 1, N, N)
                    _add(total, k, row - LANES * N + 1 + phase, grad_out, t_0 + phase, LANES, N, 2 * N - 1, N)
                for u_tile, phase in ti.ndrange(tile, LANES):
                    u = u_tile * LANES * N + phase
                    _add(total, k, row + 1 + u, grad_out, t_0 + LANES * N + u, LANES, 0, 2 * N - 1, N)
                before = task * N & INDEX
                for d in ti.static(range(N)):
                    total[d] += grad_w[before + d]
                _store(grad_w, task * LANES * N, total, N)


@ti.func
def _add(total: ti.template(), window: ti.template(), at, x: ti.template(), x_at, stride: ti.template(),
         low: ti.template(), high: ti.template(), N: ti.template()):
    """Adds window[at + 8 (d + e) .. + 8] * x[x_at + stride * e] to total[d] for all d, e with low <= d + e < high."""
    lowest = ti.static(min(0, stride * (N - 1)))
    base = (at + LANES * low) & INDEX
    x_base = (x_at + lowest) & INDEX
    xs = [x[x_base + (stride * e - lowest)] for e in ti.static(range(N))]
    for de in ti.static(range(low, high)):
        values = Lanes([window[base + (LANES * (de - low) + lane)] for lane in ti.static(range(LANES))])
        for e in ti.static(range(max(0, de - N + 1), min(N, de + 1))):
            total[de - e] += values * xs[e]


@ti.func
def _copy(edge: ti.template(), edge_at: ti.template(), x: ti.template(), at):
    base = at & INDEX
    for lane in ti.static(range(LANES)):
        edge[edge_at + lane] = x[base + lane]


@ti.func
def _store(x: ti.template(), at, total: ti.template(), N: ti.template()):
    base = at // LANES & INDEX
    for d in ti.static(range(N)):
        x[base + d] = total[d]


@ti.func
def _store_reversed(x: ti.template(), at, total: ti.template(), N: ti.template()):
    base = at // LANES & INDEX
    for d in ti.static(range(N)):
        x[base + N - 1 - d] = Lanes([total[d][LANES - 1 - lane] for lane in ti.static(range(LANES))])


@ti.kernel
def _forward_cuda(w: Flat, k: Flat, out: Flat, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template()):
    tiles = (T + CUDA_TILE - 1) // CUDA_TILE
    ti.loop_config(block_dim=THREADS)
    for thread in range((B + B_GROUP - 1) // B_GROUP * C * tiles * THREADS):
        window = ti.simt.block.SharedArray(2 * CUDA_TILE, ti.f32)
        ks = ti.simt.block.SharedArray(B_GROUP * CUDA_TILE, ti.f32)
        block, lane = thread // THREADS, thread % THREADS
        b_0 = block // tiles // C * B_GROUP
        c = block // tiles % C
        tile = block % tiles
        total = [eps for _ in ti.static(range(B_GROUP * T_GROUP))]
        for u_tile in range(tile + 1):
            _share_window(window, 0, lane, w, c * T, T - CUDA_TILE - (tile - u_tile) * CUDA_TILE, T)
            for b in ti.static(range(B_GROUP)):
                size = T if b_0 + b < B else 0  # zeros after the last batch
                _share_tile(ks, b * CUDA_TILE, lane, k, ((b_0 + b) * C + c) * T, u_tile * CUDA_TILE, size, backwards)
            _add_dots(total, window, 0, ks, 0, lane, B_GROUP)
        for b, d in ti.static(ti.ndrange(B_GROUP, T_GROUP)):
            t = tile * CUDA_TILE + CUDA_TILE - 1 - lane - THREADS * d
            if b_0 + b < B and t < T:
                out[((b_0 + b) * C + c) * T + column(t, T, backwards)] = total[b * T_GROUP + d]


@ti.kernel
def _grad_w_cuda(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int):
    tiles = (T + CUDA_TILE - 1) // CUDA_TILE
    ti.loop_config(block_dim=B_GROUP * THREADS)
    for thread in range(C * tiles * B_GROUP * THREADS):  # each warp of a block sums over some of the batches
        window = ti.simt.block.SharedArray(B_GROUP * 2 * CUDA_TILE, ti.f32)
        gs = ti.simt.block.SharedArray(B_GROUP * CUDA_TILE, ti.f32)
        block, warp, lane = thread // THREADS // B_GROUP, thread // THREADS % B_GROUP, thread % THREADS
        c = block // tiles
        i_0 = block % tiles * CUDA_TILE
        total = [0.0 for _ in ti.static(range(T_GROUP))]
        for b_group in range((B + B_GROUP - 1) // B_GROUP):
            b = b_group * B_GROUP + warp
            row = (b * C + c) * T
            size = T if b < B else 0
            for t_tile in range(ti.max(0, T - CUDA_TILE - i_0) // CUDA_TILE, tiles):
                t_0 = t_tile * CUDA_TILE
                _share_window(window, warp * 2 * CUDA_TILE, lane, k, row, t_0 - (T - 1) + i_0, size)
                _share_tile(gs, warp * CUDA_TILE, lane, grad_out, row, t_0, size, False)
                _add_dots(total, window, warp * 2 * CUDA_TILE, gs, warp * CUDA_TILE, lane, 1)
        for d in ti.static(range(T_GROUP)):
            gs[warp * CUDA_TILE + lane + THREADS * d] = total[d]
        ti.simt.block.sync()
        i = thread % (B_GROUP * THREADS)
        if i_0 + i < T:
            total[0] = gs[i]
            for part in ti.static(range(1, B_GROUP)):
                total[0] += gs[part * CUDA_TILE + i]
            grad_w[c * T + i_0 + i] = total[0]
        ti.simt.block.sync()


@ti.func
def _share_window(window: ti.template(), at, lane, x: ti.template(), row, first, T):
    for d in ti.static(range(2 * T_GROUP)):
        i = lane + THREADS * d
        window[at + i] = read(x, row, first + i, T)


@ti.func
def _share_tile(tile: ti.template(), at, lane, x: ti.template(), row, first, T, backwards: ti.template()):
    for d in ti.static(range(T_GROUP)):
        j = lane + THREADS * d
        tile[at + j] = read(x, row, column(first + j, T, backwards), T)


@ti.func
def _add_dots(total: ti.template(), window: ti.template(), w_at, x: ti.template(), x_at, lane, batches: ti.template()):
    """Adds to this lane's sums. The barriers wait until all lanes have stored the tile, and until all have read it."""
    ti.simt.block.sync()
    dots = [0.0 for _ in ti.static(range(batches * T_GROUP))]
    for phase in range(THREADS):
        xs = [x[x_at + b * CUDA_TILE + phase + THREADS * e] for b, e in ti.static(ti.ndrange(batches, T_GROUP))]
        for de in ti.static(range(2 * T_GROUP - 1)):
            value = window[w_at + lane + phase + THREADS * de]
            for b, e in ti.static(ti.ndrange(batches, (max(0, de - T_GROUP + 1), min(T_GROUP, de + 1)))):
                dots[b * T_GROUP + de - e] += value * xs[b * T_GROUP + e]
    for d in ti.static(range(batches * T_GROUP)):
        total[d] += dots[d]
    ti.simt.block.sync()
