// Version 1: rows in shared memory. A block computes a tile of one row's outputs from a staged copy of their common inputs.
//
// All three products have the same formula, total += window[i + j] * x[j], with i in a tile of outputs and j in STEP inputs:
//     forward   window of w, x = k           i counts t downwards from the end of its tile
//     grad_k    the same with time reversed: step t of grad_out and of grad_k is column T - 1 - t
//     grad_w    window of k, x = grad_out    i counts the columns of w
// Elements outside a row are staged as zero.

static __device__ float read(const float* row, int column, int T) { return 0 <= column && column < T ? row[column] : 0; }

// to[j] = row[column + j] for 0 <= j < n
template <bool BACKWARDS>
static __device__ void stage(float* to, int n, const float* row, int column, int T) {
    for (int j = threadIdx.x; j < n; j += blockDim.x) to[j] = read(row, BACKWARDS ? T - 1 - column - j : column + j, T);
}

// The sum over first <= j < end of window[j] * x[j]
static __device__ float dot(const float* window, const float* x, int first, int end) {
    float total = 0;
#pragma unroll 8
    for (int j = first; j < end; ++j) total += window[j] * x[j];
    return total;
}

template <bool BACKWARDS>
static __device__ void convolve(const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out,
                                int C, int T, float eps) {
    __shared__ float window[THREADS + STEP], ks[STEP];
    const int tile = blockDim.x, tiles = (T + tile - 1) / tile;
    const int t_0 = (tiles - 1 - blockIdx.x % tiles) * tile;                 // the longest sums first
    const long long row = (long long)(blockIdx.x / tiles) * T, c = blockIdx.x / tiles % C;
    const int i = threadIdx.x, t = t_0 + tile - 1 - i;
    float total = 0;
    for (int u_0 = 0; u_0 < min(T, t_0 + tile); u_0 += STEP) {
        const int end = (t < T ? t + 1 : 0) - u_0;                           // steps that contribute to this thread's output
        __syncthreads();
        stage<false>(window, tile + STEP, w + c * T, T - tile - t_0 + u_0, T);
        stage<BACKWARDS>(ks, STEP, k + row, u_0, T);
        __syncthreads();
        total += dot(window + i, ks, 0, min(STEP, end));
    }
    if (t < T) out[row + (BACKWARDS ? T - 1 - t : t)] = total + eps;
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(
        const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out, int B, int C, int T, float eps) {
    convolve<false>(w, k, out, C, T, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) grad_k(
        const float* __restrict__ w, const float* __restrict__ grad_out, float* __restrict__ grad_k, int B, int C, int T) {
    convolve<true>(w, grad_out, grad_k, C, T, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) grad_w(
        const float* __restrict__ k, const float* __restrict__ grad_out, float* __restrict__ grad_w, int B, int C, int T) {
    __shared__ float window[THREADS + STEP], gs[STEP];
    const int tile = blockDim.x, tiles = (T + tile - 1) / tile;
    const int c = blockIdx.x / tiles, i_0 = (tiles - 1 - blockIdx.x % tiles) * tile, i = threadIdx.x;
    float total = 0;
    for (int b = 0; b < B; ++b) {
        const long long row = ((long long)b * C + c) * T;
        for (int t_0 = max(0, T - tile - i_0); t_0 < T; t_0 += STEP) {       // earlier steps have no product with this tile's lags
            const int first = max(0, T - 1 - i_0 - i - t_0);
            __syncthreads();
            stage<false>(window, tile + STEP, k + row, t_0 - (T - 1) + i_0, T);
            stage<false>(gs, STEP, grad_out + row, t_0, T);
            __syncthreads();
            total += dot(window + i, gs, first, min(STEP, T - t_0));
        }
    }
    if (i_0 + i < T) grad_w[(long long)c * T + i_0 + i] = total;
}
