// Version 2: float4. A thread computes T_GROUP = 4 outputs and loads four values at a time from global and shared memory.
//
// All three products have the same formula, total[i] += window[i + j] * x[j], with i in a tile of outputs and j in STEP inputs:
//     forward   window of w, x = k           i counts t downwards from the end of its tile
//     grad_k    the same with time reversed: step t of grad_out and of grad_k is column T - 1 - t
//     grad_w    window of k, x = grad_out    i counts the columns of w
// Elements outside a row are staged as zero. T and all offsets are multiples of T_GROUP.

struct alignas(16) Four { float of[4]; };

static __device__ Four read(const float* row, int column, int T) {
    if (0 <= column && column < T) return *reinterpret_cast<const Four*>(row + column);
    return {};
}

static __device__ Four read_backwards(const float* row, int column, int T) {
    const Four x = read(row, T - 4 - column, T);
    return {x.of[3], x.of[2], x.of[1], x.of[0]};
}

// to[j] = row[column + j] for 0 <= j < n
template <bool BACKWARDS>
static __device__ void stage(float* to, int n, const float* row, int column, int T) {
    for (int j = 4 * threadIdx.x; j < n; j += 4 * blockDim.x)
        *reinterpret_cast<Four*>(to + j) = BACKWARDS ? read_backwards(row, column + j, T) : read(row, column + j, T);
}

static __device__ void load(float* to, const float* from) {
    const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = four.of[e];
}

// total[i] += sum over first <= j < end of window[SHIFT + i + j] * x[j]
template <int SHIFT>
static __device__ void correlate(float (&total)[T_GROUP], const float* window, const float* x, int first, int end) {
    float ws[T_GROUP + 4], xs[4], part[T_GROUP] = {};            // partial sums, to reduce rounding error
    load(ws + 4, window + first);
#pragma unroll 4
    for (int j = first; j < end; j += 4) {
#pragma unroll
        for (int i = 0; i < T_GROUP; ++i) ws[i] = ws[i + 4];
        load(ws + T_GROUP, window + j + T_GROUP);
        load(xs, x + j);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int i = 0; i < T_GROUP; ++i) part[i] += ws[SHIFT + i + e] * xs[e];
    }
#pragma unroll
    for (int i = 0; i < T_GROUP; ++i) total[i] += part[i];
}

// row[i] = total[i] + eps, or total[T_GROUP - 1 - i] + eps
template <bool BACKWARDS>
static __device__ void store(float* row, const float (&total)[T_GROUP], float eps) {
    Four four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.of[e] = total[BACKWARDS ? T_GROUP - 1 - e : e] + eps;
    *reinterpret_cast<Four*>(row) = four;
}

template <bool BACKWARDS>
static __device__ void convolve(const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out,
                                int C, int T, float eps) {
    __shared__ __align__(16) float window[THREADS * T_GROUP + STEP], ks[STEP];
    const int tile = blockDim.x * T_GROUP, tiles = (T + tile - 1) / tile;
    const int t_0 = (tiles - 1 - blockIdx.x % tiles) * tile;                 // the longest sums first
    const long long row = (long long)(blockIdx.x / tiles) * T, c = blockIdx.x / tiles % C;
    const int i = threadIdx.x * T_GROUP, t = t_0 + tile - T_GROUP - i;       // this thread's outputs: t to t + T_GROUP - 1
    float total[T_GROUP] = {};
    for (int u_0 = 0; u_0 < min(T, t_0 + tile); u_0 += STEP) {
        const int end = (t < T ? t + T_GROUP : 0) - u_0;                     // steps that contribute to this thread's outputs
        __syncthreads();
        stage<false>(window, tile + STEP, w + c * T, T - tile - t_0 + u_0, T);
        stage<BACKWARDS>(ks, STEP, k + row, u_0, T);
        __syncthreads();
        correlate<0>(total, window + i, ks, 0, min(STEP, end));
    }
    if (t < T) store<!BACKWARDS>(out + row + (BACKWARDS ? T - T_GROUP - t : t), total, eps);
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
    __shared__ __align__(16) float window[THREADS * T_GROUP + STEP], gs[STEP];
    const int tile = blockDim.x * T_GROUP, tiles = (T + tile - 1) / tile;
    const int c = blockIdx.x / tiles, i_0 = (tiles - 1 - blockIdx.x % tiles) * tile, i = threadIdx.x * T_GROUP;
    float total[T_GROUP] = {};
    for (int b = 0; b < B; ++b) {
        const long long row = ((long long)b * C + c) * T;
        for (int t_0 = max(0, T - tile - i_0); t_0 < T; t_0 += STEP) {       // earlier steps have no product with this tile's lags
            const int first = max(0, T - T_GROUP - i_0 - i - t_0);
            __syncthreads();
            stage<false>(window, tile + STEP, k + row, t_0 - T + i_0, T);
            stage<false>(gs, STEP, grad_out + row, t_0, T);
            __syncthreads();
            correlate<1>(total, window + i, gs, first, min(STEP, T - t_0));
        }
    }
    if (i_0 + i < T) store<false>(grad_w + (long long)c * T + i_0 + i, total, 0);
}
