"""Version 1 computes a tile from copies of w and k in fast memory (on a GPU shared memory), with one output per thread.

On a CPU the copies are local arrays, which cannot alias, so LLVM vectorises the sums.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from kernels.backends.taichi import ti
from kernels.registry import Requires
from kernels.timex._tiles import TILE, Flat, Products, column, read

REQUIRES = Requires(packages=("taichi",), T_multiple=32)  # since 32 divides T, the limit on B C T also limits the threads


@ti.func
def _correlate(total: ti.template(), window: ti.template(), x: ti.template()):
    for i in range(TILE):
        dot = 0.0
        for j in range(TILE):
            dot += window[i + j] * x[j]
        total[i] += dot


@ti.kernel
def _forward_cuda(w: Flat, k: Flat, out: Flat, B: int, C: int, T: int, eps: ti.f32, backwards: ti.template()):
    tiles = (T + TILE - 1) // TILE
    ti.loop_config(block_dim=TILE)
    for thread in range(B * C * tiles * TILE):
        window = ti.simt.block.SharedArray(2 * TILE, ti.f32)
        ks = ti.simt.block.SharedArray(TILE, ti.f32)
        row, tile, i = thread // TILE // tiles, thread // TILE % tiles, thread % TILE
        total = eps
        for u_tile in range(tile + 1):
            _share_window(window, i, w, row % C * T, T - TILE - (tile - u_tile) * TILE, T)
            _share_tile(ks, i, k, row * T, u_tile * TILE, T, backwards)
            total += _dot(window, ks, i)
        t = tile * TILE + TILE - 1 - i
        if t < T:
            out[row * T + column(t, T, backwards)] = total


@ti.kernel
def _grad_w_cuda(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int):
    tiles = (T + TILE - 1) // TILE
    ti.loop_config(block_dim=TILE)
    for thread in range(C * tiles * TILE):
        window = ti.simt.block.SharedArray(2 * TILE, ti.f32)
        gs = ti.simt.block.SharedArray(TILE, ti.f32)
        c = thread // TILE // tiles
        i_0 = thread // TILE % tiles * TILE
        i = thread % TILE
        total = 0.0
        for b in range(B):
            for t_tile in range(ti.max(0, T - TILE - i_0) // TILE, tiles):
                t_0 = t_tile * TILE
                row = (b * C + c) * T
                _share_window(window, i, k, row, t_0 - (T - 1) + i_0, T)
                _share_tile(gs, i, grad_out, row, t_0, T, False)
                total += _dot(window, gs, i)
        if i_0 + i < T:
            grad_w[c * T + i_0 + i] = total


@ti.func
def _share_window(window: ti.template(), i, x: ti.template(), row, at, T):
    window[i] = read(x, row, at + i, T)
    window[i + TILE] = read(x, row, at + i + TILE, T)


@ti.func
def _share_tile(tile: ti.template(), i, x: ti.template(), row, at, T, backwards: ti.template()):
    tile[i] = read(x, row, column(at + i, T, backwards), T)


@ti.func
def _dot(window: ti.template(), x: ti.template(), i):
    """Returns the sum of thread i. The barriers wait until all threads have stored the tile, and until all have read it."""
    ti.simt.block.sync()
    dot = 0.0
    for j in range(TILE):
        dot += window[i + j] * x[j]
    ti.simt.block.sync()
    return dot


_products = Products(_correlate, _forward_cuda, _grad_w_cuda)
forward = _products.forward
grad_k = _products.grad_k
grad_w = _products.grad_w
