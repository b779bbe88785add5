"""Rung 2: register tiles. A value read from fast memory enters several products: on a CPU, eight steps of x stay in registers
during a loop over all outputs of the tile; on a GPU, a thread computes four time steps, 32 apart.

All three products have one form, total[i] += window[i + j] * x[j], with i and j in a tile and the window two tiles long:
    forward   window of w, x = k           i counts t downwards from the end of its tile
    grad_k    the same on reversed time: step t of grad_out and grad_k is column T - 1 - t
    grad_w    window of k, x = grad_out    i counts the columns of w
Zeros are staged for positions outside a row, so any T is legal. (Zero times infinity is NaN: a value that is not finite also
makes other outputs of its tile NaN.)
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from typing import Any

import torch
from torch import Tensor

from kernels.backends.taichi import BLOCK, launch, share, shares, ti
from kernels.registry import Requires

REQUIRES = Requires(packages=("taichi",), T_multiple=32)  # then B C T < 2**30 bounds the number of threads, too

TILE, STEPS = 64, 8  # on a CPU
THREADS, T_GROUP = 32, 4  # on a GPU: threads per block, outputs per thread
CUDA_TILE = THREADS * T_GROUP
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)
Tile = ti.types.vector(TILE, ti.f32)
Window = ti.types.vector(2 * TILE, ti.f32)


def forward(w: Tensor, k: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(k)
    _launch(_forward_cpu, _forward_cuda, k.shape[0] * k.shape[1], w, k, out, *k.shape, eps, False)
    return out


def backward(w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return grad_w(k, grad_out), grad_k(w, grad_out)


def grad_k(w: Tensor, grad_out: Tensor) -> Tensor:
    (B, C, T), grad = grad_out.shape, torch.empty_like(grad_out)
    _launch(_forward_cpu, _forward_cuda, B * C, w, grad_out, grad, B, C, T, 0.0, True)
    return grad


def grad_w(k: Tensor, grad_out: Tensor) -> Tensor:
    grad = torch.empty_like(k[0])
    tasks = grad.shape[0] * -(-grad.shape[1] // TILE)
    _launch(_grad_w_cpu, _grad_w_cuda, tasks, k, grad_out, grad, *k.shape)
    return grad


def _launch(on_cpu: Any, on_cuda: Any, tasks: int, left: Tensor, right: Tensor, result: Tensor, *numbers: Any) -> None:
    tensors = left.view(-1), right.view(-1), result.view(-1)
    if left.is_cuda:
        launch(on_cuda, *tensors, *numbers)
    else:
        launch(on_cpu, *tensors, *numbers, shares(tasks))


@ti.kernel
def _forward_cpu(w: Flat, k: Flat, out: Flat, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template(), n: int):
    for step in range(n * BLOCK):
        first, end = share(step, B * C, n)
        for row in range(first, end):
            for tile in range((T + TILE - 1) // TILE):
                total = Tile(eps)
                for u_tile in range(tile + 1):
                    window, ks = Window(0.0), Tile(0.0)
                    _stage_window(window, w, row % C * T, T - TILE - (tile - u_tile) * TILE, T)
                    _stage_tile(ks, k, row * T, u_tile * TILE, T, backwards)
                    _correlate(total, window, ks)
                for i in range(ti.max(0, tile * TILE + TILE - T), TILE):
                    t = tile * TILE + TILE - 1 - i
                    out[row * T + _column(t, T, backwards)] = total[i]


@ti.kernel
def _grad_w_cpu(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int, n: int):
    for step in range(n * BLOCK):
        tiles = (T + TILE - 1) // TILE
        first, end = share(step, C * tiles, n)
        for task in range(first, end):
            c, i_0 = task // tiles, task % tiles * TILE
            total = Tile(0.0)
            for b in range(B):
                part = Tile(0.0)  # one batch; a sum of sums has smaller rounding errors
                for t_tile in range(ti.max(0, T - TILE - i_0) // TILE, tiles):
                    t_0, row = t_tile * TILE, (b * C + c) * T
                    window, gs = Window(0.0), Tile(0.0)
                    _stage_window(window, k, row, t_0 - (T - 1) + i_0, T)
                    _stage_tile(gs, grad_out, row, t_0, T, False)
                    _correlate(part, window, gs)
                total += part
            for i in range(ti.min(TILE, T - i_0)):
                grad_w[c * T + i_0 + i] = total[i]


@ti.func
def _column(t, T, backwards: ti.template()):
    return T - 1 - t if ti.static(backwards) else t


@ti.func
def _stage_window(window: ti.template(), x: ti.template(), row, at, T):
    for j in range(ti.max(0, -at), ti.min(2 * TILE - 1, T - at)):
        window[j] = x[row + at + j]


@ti.func
def _stage_tile(tile: ti.template(), x: ti.template(), row, at, T, backwards: ti.template()):
    for j in range(ti.min(TILE, T - at)):
        tile[j] = x[row + _column(at + j, T, backwards)]


@ti.func
def _correlate(total: ti.template(), window: ti.template(), x: ti.template()):
    for group in range(TILE // STEPS):
        j = group * STEPS
        xs = [x[j + step] for step in ti.static(range(STEPS))]
        for i in range(TILE):
            dot = window[i + j] * xs[0]
            for step in ti.static(range(1, STEPS)):
                dot += window[i + j + step] * xs[step]
            total[i] += dot


@ti.kernel
def _forward_cuda(w: Flat, k: Flat, out: Flat, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template()):
    tiles = (T + CUDA_TILE - 1) // CUDA_TILE
    ti.loop_config(block_dim=THREADS)
    for thread in range(B * C * tiles * THREADS):
        window, ks = ti.simt.block.SharedArray(2 * CUDA_TILE, ti.f32), ti.simt.block.SharedArray(CUDA_TILE, ti.f32)
        row, tile, lane = thread // THREADS // tiles, thread // THREADS % tiles, thread % THREADS
        total = [eps for _ in ti.static(range(T_GROUP))]
        for u_tile in range(tile + 1):
            _share_window(window, lane, w, row % C * T, T - CUDA_TILE - (tile - u_tile) * CUDA_TILE, T)
            _share_tile(ks, lane, k, row * T, u_tile * CUDA_TILE, T, backwards)
            _add_dots(total, window, ks, lane)
        for d in ti.static(range(T_GROUP)):
            t = tile * CUDA_TILE + CUDA_TILE - 1 - lane - THREADS * d
            if t < T:
                out[row * T + _column(t, T, backwards)] = total[d]


@ti.kernel
def _grad_w_cuda(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int):
    tiles = (T + CUDA_TILE - 1) // CUDA_TILE
    ti.loop_config(block_dim=THREADS)
    for thread in range(C * tiles * THREADS):
        window, gs = ti.simt.block.SharedArray(2 * CUDA_TILE, ti.f32), ti.simt.block.SharedArray(CUDA_TILE, ti.f32)
        c, i_0, lane = thread // THREADS // tiles, thread // THREADS % tiles * CUDA_TILE, thread % THREADS
        total = [0.0 for _ in ti.static(range(T_GROUP))]
        for b in range(B):
            for t_tile in range(ti.max(0, T - CUDA_TILE - i_0) // CUDA_TILE, tiles):
                t_0, row = t_tile * CUDA_TILE, (b * C + c) * T
                _share_window(window, lane, k, row, t_0 - (T - 1) + i_0, T)
                _share_tile(gs, lane, grad_out, row, t_0, T, False)
                _add_dots(total, window, gs, lane)
        for d in ti.static(range(T_GROUP)):
            i = i_0 + lane + THREADS * d
            if i < T:
                grad_w[c * T + i] = total[d]


@ti.func
def _share_window(window: ti.template(), lane, x: ti.template(), row, at, T):
    for d in ti.static(range(2 * T_GROUP)):
        i = lane + THREADS * d
        window[i] = _read(x, row, at + i, T)


@ti.func
def _share_tile(tile: ti.template(), lane, x: ti.template(), row, at, T, backwards: ti.template()):
    for d in ti.static(range(T_GROUP)):
        j = lane + THREADS * d
        tile[j] = _read(x, row, _column(at + j, T, backwards), T)


@ti.func
def _read(x: ti.template(), row, column, T):
    value = 0.0
    if 0 <= column < T:
        value = x[row + column]
    return value


@ti.func
def _add_dots(total: ti.template(), window: ti.template(), x: ti.template(), lane):
    """The lane's sums. The barriers wait until all lanes have staged the tile, and until all have read it.

    With i = lane + 32 d and j = step + 32 e, one value of the window serves every pair with the same d + e.
    """
    ti.simt.block.sync()
    dots = [0.0 for _ in ti.static(range(T_GROUP))]
    for step in range(THREADS):
        xs = [x[step + THREADS * e] for e in ti.static(range(T_GROUP))]
        for de in ti.static(range(2 * T_GROUP - 1)):
            value = window[lane + step + THREADS * de]
            for e in ti.static(range(max(0, de - T_GROUP + 1), min(T_GROUP, de + 1))):
                dots[de - e] += value * xs[e]
    for d in ti.static(range(T_GROUP)):
        total[d] += dots[d]
    ti.simt.block.sync()
