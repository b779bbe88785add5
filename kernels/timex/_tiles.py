"""Contains the code that the Taichi versions share. Versions 1 and 2 use the CPU tiles, and version 3 some functions.

All three products are total[i] += window[i + j] * x[j]. i and j are in a tile, and the window is two tiles long:
    forward   window of w, x = k           i counts t downwards from the end of the tile
    grad_k    as in forward, but with time reversed: step t of grad_out and grad_k is column T - 1 - t
    grad_w    window of k, x = grad_out    i counts the columns of w
Positions outside a row are loaded as zeros, so T may have any value. Zero times infinity is NaN, so a nonfinite value also
makes other outputs of the same tile NaN.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from typing import Any

import torch
from torch import Tensor

from kernels.backends.taichi import BLOCK, launch, share, shares, ti

TILE = 64  # steps per tile, on a CPU
Flat = ti.types.ndarray(dtype=ti.f32, ndim=1)
Tile = ti.types.vector(TILE, ti.f32)
Window = ti.types.vector(2 * TILE, ti.f32)


class Products:
    """The functions of a version. On a CPU, the ti.func correlate(total, window, x) adds a tile's products."""

    def __init__(self, correlate: Any, forward_cuda: Any, grad_w_cuda: Any) -> None:
        self._forward = _forward_kernel(correlate), forward_cuda
        self._grad_w = _grad_w_kernel(correlate), grad_w_cuda

    def forward(self, w: Tensor, k: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(k)
        _launch(*self._forward, k.shape[0] * k.shape[1], w, k, out, *k.shape, eps, False)
        return out

    def grad_k(self, w: Tensor, grad_out: Tensor) -> Tensor:
        grad = torch.empty_like(grad_out)
        _launch(*self._forward, grad.shape[0] * grad.shape[1], w, grad_out, grad, *grad.shape, 0.0, True)
        return grad

    def grad_w(self, k: Tensor, grad_out: Tensor) -> Tensor:
        grad = torch.empty_like(k[0])
        tasks = grad.shape[0] * -(-grad.shape[1] // TILE)
        _launch(*self._grad_w, tasks, k, grad_out, grad, *k.shape)
        return grad


def _launch(on_cpu: Any, on_cuda: Any, tasks: int, left: Tensor, right: Tensor, result: Tensor, *numbers: Any) -> None:
    tensors = left.view(-1), right.view(-1), result.view(-1)
    if left.is_cuda:
        launch(on_cuda, *tensors, *numbers)
    else:
        launch(on_cpu, *tensors, *numbers, shares(tasks))


def _forward_kernel(correlate: Any) -> Any:
    @ti.kernel
    def forward(w: Flat, k: Flat, out: Flat, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template(), n: int):
        for step in range(n * BLOCK):
            first, end = share(step, B * C, n)
            for row in range(first, end):
                for tile in range((T + TILE - 1) // TILE):
                    total = Tile(eps)
                    for u_tile in range(tile + 1):
                        window = Window(0.0)
                        ks = Tile(0.0)
                        stage_window(window, w, row % C * T, T - TILE - (tile - u_tile) * TILE, T)
                        stage_tile(ks, k, row * T, u_tile * TILE, T, backwards)
                        correlate(total, window, ks)
                    for i in range(ti.max(0, tile * TILE + TILE - T), TILE):
                        t = tile * TILE + TILE - 1 - i
                        out[row * T + column(t, T, backwards)] = total[i]

    return forward


def _grad_w_kernel(correlate: Any) -> Any:
    @ti.kernel
    def grad_w_kernel(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int, n: int):
        for step in range(n * BLOCK):
            tiles = (T + TILE - 1) // TILE
            first, end = share(step, C * tiles, n)
            for task in range(first, end):
                c = task // tiles
                i_0 = task % tiles * TILE
                total = Tile(0.0)
                for b in range(B):
                    part = Tile(0.0)  # the sum over one batch; a sum of partial sums has smaller rounding errors
                    for t_tile in range(ti.max(0, T - TILE - i_0) // TILE, tiles):
                        t_0 = t_tile * TILE
                        row = (b * C + c) * T
                        window = Window(0.0)
                        gs = Tile(0.0)
                        stage_window(window, k, row, t_0 - (T - 1) + i_0, T)
                        stage_tile(gs, grad_out, row, t_0, T, False)
                        correlate(part, window, gs)
                    total += part
                for i in range(ti.min(TILE, T - i_0)):
                    grad_w[c * T + i_0 + i] = total[i]

    return grad_w_kernel


@ti.func
def column(t, T, backwards: ti.template()):
    return T - 1 - t if ti.static(backwards) else t


@ti.func
def stage_window(window: ti.template(), x: ti.template(), row, at, T):
    for j in range(ti.max(0, -at), ti.min(2 * TILE - 1, T - at)):
        window[j] = x[row + at + j]


@ti.func
def stage_tile(tile: ti.template(), x: ti.template(), row, at, T, backwards: ti.template()):
    for j in range(ti.min(TILE, T - at)):
        tile[j] = x[row + column(at + j, T, backwards)]


@ti.func
def read(x: ti.template(), row, at, T):
    value = 0.0
    if 0 <= at < T:
        value = x[row + at]
    return value
