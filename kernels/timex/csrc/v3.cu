// Version 3: batch groups. A thread computes T_GROUP outputs of B_GROUP batches, which reuse the same w.
//
// All three products have the same formula, total[i] += window[i + j] * x[j], with i in a tile of outputs and j in STEP inputs:
//     forward   window of w, x = k           i counts t downwards from the end of its tile
//     grad_k    the same with time reversed: step t of grad_out and of grad_k is column T - 1 - t
//     grad_w    window of k, x = grad_out    i counts the columns of w
// Elements outside a row or after the last batch are staged as zero. T and all offsets are multiples of T_GROUP.
//
// In a block, blockDim.x threads divide the batches and blockDim.y the outputs i. So a warp covers many batches and few steps, and
// wastes little work above the diagonal. In grad_w, where batches share no inputs, a thread processes every blockDim.x-th batch,
// and the threads of a row add up their sums at the end.

struct alignas(16) Four { float of[4]; };

constexpr int STRIDE = STEP + 4;         // rows in shared memory are padded, so that eight rows fall into different banks

static __device__ float* shared_memory() {
    extern __shared__ __align__(16) float shared[];
    return shared;
}

static __device__ Four read(const float* row, int column, int T) {
    if (0 <= column && column < T) return *reinterpret_cast<const Four*>(row + column);
    return {};
}

static __device__ Four read_backwards(const float* row, int column, int T) {
    const Four x = read(row, T - 4 - column, T);
    return {x.of[3], x.of[2], x.of[1], x.of[0]};
}

// to[j] = row[column + j] for 0 <= j < n, copied by `threads` threads, of which this is number `thread`
template <bool BACKWARDS>
static __device__ void stage(float* to, int n, const float* row, int column, int T, int thread, int threads) {
    for (int j = 4 * thread; j < n; j += 4 * threads)
        *reinterpret_cast<Four*>(to + j) = BACKWARDS ? read_backwards(row, column + j, T) : read(row, column + j, T);
}

// Stages the rows of `rows` batches from b_0 on, one warp per row
template <bool BACKWARDS>
static __device__ void stage_rows(float* to, int stride, int n, const float* x, int column, int rows, int b_0, int B, int C, int T) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
    for (int row = thread / 32; row < rows; row += warps) {
        const int b = b_0 + row, size = b < B ? T : 0;
        stage<BACKWARDS>(to + row * stride, n, x + (long long)b * C * T, column, size, thread % 32, 32);
    }
}

static __device__ void load(float* to, const float* from) {
    const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = four.of[e];
}

// total[b][i] += sum over first <= j < end of window[SHIFT + i + j] * x[b * stride + j]
template <int SHIFT, int GROUP>
static __device__ void correlate(float (&total)[GROUP][T_GROUP], const float* window, const float* x, int stride,
                                 int first, int end) {
    float ws[T_GROUP + 4], xs[4], part[GROUP][T_GROUP] = {};     // partial sums, to reduce rounding error
#pragma unroll
    for (int i = 0; i < T_GROUP; i += 4) load(ws + 4 + i, window + first + i);
#pragma unroll 1
    for (int j_0 = first; j_0 < end; j_0 += T_GROUP) {
#pragma unroll
        for (int j = j_0; j < j_0 + T_GROUP; j += 4) {
#pragma unroll
            for (int i = 0; i < T_GROUP; ++i) ws[i] = ws[i + 4];
            load(ws + T_GROUP, window + j + T_GROUP);
#pragma unroll
            for (int b = 0; b < GROUP; ++b) {
                load(xs, x + b * stride + j);
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int i = 0; i < T_GROUP; ++i) part[b][i] += ws[SHIFT + i + e] * xs[e];
            }
        }
    }
#pragma unroll
    for (int b = 0; b < GROUP; ++b)
#pragma unroll
        for (int i = 0; i < T_GROUP; ++i) total[b][i] += part[b][i];
}

// row[i] = total[i] + eps, or total[T_GROUP - 1 - i] + eps
template <bool BACKWARDS>
static __device__ void store(float* row, const float (&total)[T_GROUP], float eps) {
#pragma unroll
    for (int i = 0; i < T_GROUP; i += 4) {
        Four four;
#pragma unroll
        for (int e = 0; e < 4; ++e) four.of[e] = total[BACKWARDS ? T_GROUP - 1 - i - e : i + e] + eps;
        *reinterpret_cast<Four*>(row + i) = four;
    }
}

template <bool BACKWARDS>
static __device__ void convolve(const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out,
                                int B, int C, int T, float eps) {
    float* shared = shared_memory();
    const int tile = blockDim.y * T_GROUP, tiles = (T + tile - 1) / tile, rows = blockDim.x * B_GROUP;
    const int t_0 = (tiles - 1 - blockIdx.x % tiles) * tile;                 // the longest sums first
    const int c = blockIdx.x / tiles % C, b_0 = blockIdx.x / tiles / C * rows;
    const int i = threadIdx.y * T_GROUP, t = t_0 + tile - T_GROUP - i;       // this thread's outputs: t to t + T_GROUP - 1
    float *window = shared, *ks = shared + tile + STEP, total[B_GROUP][T_GROUP] = {};
    for (int u_0 = 0; u_0 < min(T, t_0 + tile); u_0 += STEP) {
        const int end = (t < T ? t + T_GROUP : 0) - u_0;                     // steps that contribute to this thread's outputs
        __syncthreads();
        stage<false>(window, tile + STEP, w + (long long)c * T, T - tile - t_0 + u_0, T,
                     threadIdx.y * blockDim.x + threadIdx.x, blockDim.x * blockDim.y);
        stage_rows<BACKWARDS>(ks, STRIDE, STEP, k + (long long)c * T, u_0, rows, b_0, B, C, T);
        __syncthreads();
        correlate<0>(total, window + i, ks + threadIdx.x * STRIDE, blockDim.x * STRIDE, 0, min(STEP, end));
    }
#pragma unroll
    for (int g = 0; g < B_GROUP; ++g) {
        const int b = b_0 + threadIdx.x + g * blockDim.x;
        float* row = out + ((long long)b * C + c) * T;
        if (b < B && t < T) store<!BACKWARDS>(row + (BACKWARDS ? T - T_GROUP - t : t), total[g], eps);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) forward(
        const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out, int B, int C, int T, float eps) {
    convolve<false>(w, k, out, B, C, T, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grad_k(
        const float* __restrict__ w, const float* __restrict__ grad_out, float* __restrict__ grad_k, int B, int C, int T) {
    convolve<true>(w, grad_out, grad_k, B, C, T, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) grad_w(
        const float* __restrict__ k, const float* __restrict__ grad_out, float* __restrict__ grad_w, int B, int C, int T) {
    float* shared = shared_memory();
    const int tile = blockDim.y * T_GROUP, tiles = (T + tile - 1) / tile, stride = tile + STRIDE;
    const int c = blockIdx.x / tiles, i_0 = (tiles - 1 - blockIdx.x % tiles) * tile, i = threadIdx.y * T_GROUP;
    const long long row = (long long)c * T;
    float *windows = shared, *gs = shared + blockDim.x * stride, total[1][T_GROUP] = {};
    for (int b_0 = 0; b_0 < B; b_0 += blockDim.x) {
        for (int t_0 = max(0, T - tile - i_0); t_0 < T; t_0 += STEP) {       // earlier steps have no product with this tile's lags
            const int first = max(0, T - T_GROUP - i_0 - i - t_0);
            __syncthreads();
            stage_rows<false>(windows, stride, tile + STEP, k + row, t_0 - T + i_0, blockDim.x, b_0, B, C, T);
            stage_rows<false>(gs, STRIDE, STEP, grad_out + row, t_0, blockDim.x, b_0, B, C, T);
            __syncthreads();
            correlate<1>(total, windows + threadIdx.x * stride + i, gs + threadIdx.x * STRIDE, 0, first, min(STEP, T - t_0));
        }
    }
#pragma unroll
    for (int d = 0; d < T_GROUP; ++d)                                        // sums over the batches, in a fixed order
        for (int lanes = blockDim.x / 2; lanes; lanes /= 2) total[0][d] += __shfl_xor_sync(~0u, total[0][d], lanes);
    if (threadIdx.x == 0 && i_0 + i < T) store<false>(grad_w + row + i_0 + i, total[0], 0);
}
