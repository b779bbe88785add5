"""Version 2 keeps tiles in registers, so that each load from fast memory serves several products.

On a CPU, eight steps of x stay in registers while a loop visits all outputs of the tile. On a GPU, a thread computes four time
steps, 32 apart.
"""

# mypy: disable-error-code="index, no-untyped-def, valid-type"
from kernels.backends.taichi import ti
from kernels.registry import Requires
from kernels.timex._tiles import TILE, Flat, Products, column, read

REQUIRES = Requires(packages=("taichi",), T_multiple=32)  # since 32 divides T, the limit on B C T also limits the threads

STEPS = 8  # steps of x in registers, on a CPU
THREADS, T_GROUP = 32, 4  # on a GPU: threads per block, outputs per thread
CUDA_TILE = THREADS * T_GROUP


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
        window = ti.simt.block.SharedArray(2 * CUDA_TILE, ti.f32)
        ks = ti.simt.block.SharedArray(CUDA_TILE, ti.f32)
        row, tile, lane = thread // THREADS // tiles, thread // THREADS % tiles, thread % THREADS
        total = [eps for _ in ti.static(range(T_GROUP))]
        for u_tile in range(tile + 1):
            _share_window(window, lane, w, row % C * T, T - CUDA_TILE - (tile - u_tile) * CUDA_TILE, T)
            _share_tile(ks, lane, k, row * T, u_tile * CUDA_TILE, T, backwards)
            _add_dots(total, window, ks, lane)
        for d in ti.static(range(T_GROUP)):
            t = tile * CUDA_TILE + CUDA_TILE - 1 - lane - THREADS * d
            if t < T:
                out[row * T + column(t, T, backwards)] = total[d]


@ti.kernel
def _grad_w_cuda(k: Flat, grad_out: Flat, grad_w: Flat, B: int, C: int, T: int):
    tiles = (T + CUDA_TILE - 1) // CUDA_TILE
    ti.loop_config(block_dim=THREADS)
    for thread in range(C * tiles * THREADS):
        window = ti.simt.block.SharedArray(2 * CUDA_TILE, ti.f32)
        gs = ti.simt.block.SharedArray(CUDA_TILE, ti.f32)
        c = thread // THREADS // tiles
        i_0 = thread // THREADS % tiles * CUDA_TILE
        lane = thread % THREADS
        total = [0.0 for _ in ti.static(range(T_GROUP))]
        for b in range(B):
            for t_tile in range(ti.max(0, T - CUDA_TILE - i_0) // CUDA_TILE, tiles):
                t_0 = t_tile * CUDA_TILE
                row = (b * C + c) * T
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
        window[i] = read(x, row, at + i, T)


@ti.func
def _share_tile(tile: ti.template(), lane, x: ti.template(), row, at, T, backwards: ti.template()):
    for d in ti.static(range(T_GROUP)):
        j = lane + THREADS * d
        tile[j] = read(x, row, column(at + j, T, backwards), T)


@ti.func
def _add_dots(total: ti.template(), window: ti.template(), x: ti.template(), lane):
    """Adds to this lane's sums. The barriers wait until all lanes have stored the tile, and until all have read it.

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


_products = Products(_correlate, _forward_cuda, _grad_w_cuda)
forward = _products.forward
grad_k = _products.grad_k
grad_w = _products.grad_w
