// Version 4: tensor cores. A float32 product is the sum of three tf32 products of its operands' high and low parts.
//
//     forward   out[t] = eps + sum_u W[t - u] k[u]      a Toeplitz matrix, the same for all b, times the columns k[b]
//     grad_k    grad_k[t] = sum_u W[u - t] grad_out[u]  the same, with the matrix transposed
//     grad_w    grad_W[n] = sum_b sum_t grad_out[t] k[t - n]: the products of 64 steps t and 64 steps u, summed along diagonals
// W[n] = w[T - 1 - n], 0 for n < 0. x is k or grad_out. A block computes N_TILES * 8 batches.
//
// A warp computes 64 rows of all columns. The matrix fragments of lane (g, q) consist of every fourth value of W, at g - q + 4m. To
// advance by 8 columns, a lane loads two new values and keeps the other fourteen in registers.
//
// Tensor cores truncate their sums, and over thousands of additions these errors would accumulate. So an accumulator sums only
// three products, and ordinary float32 additions sum the results.

#include "mma.cuh"

constexpr int THREADS = 128, ROWS = 64, BLOCK = THREADS / 32 * ROWS;    // rows per warp and per block
constexpr int CHUNK = 64, N = 8 * N_TILES, WINDOW = CHUNK + BLOCK;      // columns per chunk; batches; lags per chunk
constexpr int STRIDE = CHUNK + 4, WIDE = CHUNK + 8;                     // so that a fragment's lanes read 32 different banks
constexpr int TILE = 64, LINES = 32, DIAGONALS = 2 * TILE;              // grad_w: steps per tile; pairs of rows at a time

struct Split { unsigned big, small; };                                  // x = big + small, both in tf32

// Rounds to nearest: drops the 13 bits that tf32 lacks
static __device__ __forceinline__ unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }

static __device__ __forceinline__ Split split(float x) {
    const unsigned big = tf32(x);
    return {big, tf32(x - __uint_as_float(big))};
}

// total += a b with the accuracy of float32, for fragments a of 16 rows and b of 8 columns
static __device__ __forceinline__ void multiply_add(float (&total)[4], Split a0, Split a1, Split a2, Split a3, Split b0,
                                                    Split b1) {
    float sum[4] = {};
    mma(sum, a0.small, a1.small, a2.small, a3.small, b0.big, b1.big, sum);
    mma(sum, a0.big, a1.big, a2.big, a3.big, b0.small, b1.small, sum);
    mma(sum, a0.big, a1.big, a2.big, a3.big, b0.big, b1.big, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += sum[i];
}

// total += rows of the matrix (this lane's values are window[4m]) times CHUNK steps of the columns x. It is not unrolled beyond
// eight steps per iteration: the compiler would hoist more loads than there are registers.
static __device__ __forceinline__ void multiply_chunk(float (&total)[ROWS / 16][N_TILES][4], const float* window,
                                                      const float (*x)[STRIDE], int g, int q) {
    constexpr int KEPT = ROWS / 4 - 2;
    Split values[2 + KEPT], *const a = values + 1;                      // a[m] is window[4m]
#pragma unroll
    for (int m = 1; m <= KEPT; ++m) a[m] = split(window[4 * m]);
#pragma unroll 1
    for (int u = q; u < CHUNK; u += 8, window -= 8) {
        a[0] = split(window[0]), a[-1] = split(window[-4]);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const Split b0 = split(x[8 * n + g][u]), b1 = split(x[8 * n + g][u + 4]);
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i)
                multiply_add(total[i][n], a[4 * i], a[4 * i + 2], a[4 * i - 1], a[4 * i + 1], b0, b1);
        }
#pragma unroll
        for (int m = KEPT; m >= 1; --m) a[m] = a[m - 2];
    }
}

// Starts this thread's asynchronous copies: a quarter of 64 steps of a row, starting at step u, with zeros from step `end` on
static __device__ __forceinline__ void fetch_quarter(float* to, const float* row, int u, int end) {
#pragma unroll
    for (int step = threadIdx.x % 4 * 4; step < 64; step += 16)
        copy_async<16>(&to[step], u + step < end ? row + u + step : row, u + step < end);
}

// Starts the copies of the weights for the lags between the CHUNK columns from u on and the BLOCK rows from t on
template <bool TRANSPOSED>
static __device__ __forceinline__ void fetch_lags(float* lags, const float* w_row, int t, int u, int T) {
#pragma unroll 1
    for (int i = threadIdx.x; i < WINDOW; i += THREADS) {
        const int lag = TRANSPOSED ? u - t - (i - CHUNK) : t - u + (i - CHUNK);
        const bool inside = 0 <= lag && lag < T;
        copy_async<4>(&lags[i], inside ? w_row + (T - 1 - lag) : w_row, inside);
    }
}

template <bool TRANSPOSED>
static __device__ __forceinline__ void multiply(const float* w, const float* x, float* out, int B, int C, int T, float eps) {
    __shared__ __align__(16) float columns[2][N][STRIDE];
    __shared__ float lags[2][WINDOW];
    const int groups = (B - 1) / N + 1, blocks = (T - 1) / BLOCK + 1, rank = blockIdx.x / (C * groups);
    const int c = blockIdx.x % (C * groups) / groups, b = blockIdx.x % groups * N;
    const int t = (TRANSPOSED ? rank : blocks - 1 - rank) * BLOCK;     // the longest sums first
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int row = (threadIdx.x / 32 + blockIdx.x) % (THREADS / 32) * ROWS;    // spreads long and short sums over all schedulers
    const int first = TRANSPOSED ? t / CHUNK : 0, end = ((TRANSPOSED ? T : min(T, t + BLOCK)) - 1) / CHUNK + 1;
    const float* const w_row = w + (long long)c * T;
    float total[ROWS / 16][N_TILES][4] = {};
    const int column = threadIdx.x / 4, own_end = column < N && b + column < B ? T : 0;
    const float* const own = own_end ? x + ((long long)(b + column) * C + c) * T : x;
    const auto fetch = [&](int chunk) {
        if (column < N) fetch_quarter(columns[chunk & 1][column], own, chunk * CHUNK, own_end);
        fetch_lags<TRANSPOSED>(lags[chunk & 1], w_row, t, chunk * CHUNK, T);
        commit_copies();
    };
    fetch(first);
    for (int chunk = first; chunk < end; ++chunk) {
        if (chunk + 1 < end) fetch(chunk + 1);
        else commit_copies();
        await_copies<1>();
        __syncthreads();
        const int u = chunk * CHUNK;
        const bool reached = TRANSPOSED ? u + CHUNK > t + row : t + row + ROWS > u;
        if (reached && t + row < T) multiply_chunk(total, lags[chunk & 1] + CHUNK + row + g - q, columns[chunk & 1], g, q);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int step = t + row + 16 * i + g + part / 2 * 8, batch = b + 8 * n + 2 * q + part % 2;
                if (step < T && batch < B) out[((long long)batch * C + c) * T + step] = total[i][n][part] + eps;
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
forward(const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out, int B, int C, int T, float eps) {
    multiply<false>(w, k, out, B, C, T, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
grad_k(const float* __restrict__ w, const float* __restrict__ grad_out, float* __restrict__ grad, int B, int C, int T) {
    multiply<true>(w, grad_out, grad, B, C, T, 0.0f);
}

// sums (C,tiles,DIAGONALS): column x + 63 of tile d is that tile's contribution to grad_w at lag 64 d + x, -63 <= x <= 63
extern "C" __global__ void __launch_bounds__(THREADS, 4)
grad_w_tiles(const float* __restrict__ k, const float* __restrict__ grad_out, float* __restrict__ sums, int B, int C, int T) {
    constexpr int HALF = TILE / 2;
    __shared__ __align__(16) float lines[2][2][LINES][WIDE];
    const int c = blockIdx.x % C, d = blockIdx.x / C, tiles = (T - 1) / TILE + 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int i_0 = warp / 2 * HALF, j_0 = warp % 2 * HALF;            // this warp's quarter of the tile
    const long long count = (long long)B * (tiles - d);
    float total[HALF / 16][HALF / 8][4] = {};
    const auto fetch = [&](long long first) {           // pairs of a tile of k and the tile of grad_out d tiles later
        const long long pair = first + threadIdx.x / 4, b = pair / (tiles - d), row = pair < count ? (b * C + c) * T : 0;
        const int u = int(pair % (tiles - d)) * TILE, end = pair < count ? T : 0;
        float(*const to)[LINES][WIDE] = lines[first / LINES & 1];
        fetch_quarter(to[0][threadIdx.x / 4], grad_out + row, u + d * TILE, end);
        fetch_quarter(to[1][threadIdx.x / 4], k + row, u, end);
        commit_copies();
    };
    fetch(0);
    for (long long first = 0; first < count; first += LINES) {
        const int now = first / LINES & 1;
        if (first + LINES < count) fetch(first + LINES);
        else commit_copies();
        await_copies<1>();
        __syncthreads();
        const float(*const gs)[WIDE] = lines[now][0], (*const ks)[WIDE] = lines[now][1];
#pragma unroll 1
        for (int line = q; line < LINES; line += 8) {
            Split a[HALF / 16][4];
#pragma unroll
            for (int m = 0; m < HALF / 16; ++m)
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    a[m][part] = split(gs[line + part / 2 * 4][i_0 + 16 * m + g + part % 2 * 8]);
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n) {
                const Split b0 = split(ks[line][j_0 + 8 * n + g]), b1 = split(ks[line + 4][j_0 + 8 * n + g]);
#pragma unroll
                for (int m = 0; m < HALF / 16; ++m) multiply_add(total[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b0, b1);
            }
        }
        __syncthreads();
    }
    float(*const tile)[TILE + 1] = reinterpret_cast<float(*)[TILE + 1]>(lines);
#pragma unroll
    for (int m = 0; m < HALF / 16; ++m)
#pragma unroll
        for (int n = 0; n < HALF / 8; ++n)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                tile[i_0 + 16 * m + g + part / 2 * 8][j_0 + 8 * n + 2 * q + part % 2] = total[m][n][part];
    __syncthreads();
    const int x = int(threadIdx.x) - (TILE - 1);
    float sum = 0.0f;
    for (int i = max(0, x); i < min(TILE, TILE + x); ++i) sum += tile[i][i - x];
    sums[((long long)c * tiles + d) * DIAGONALS + threadIdx.x] = sum;
}

// grad_w (C,T): each lag is the sum of the contributions of two tiles
extern "C" __global__ void grad_w(const float* __restrict__ sums, float* __restrict__ grad, int C, int T) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)C * T) return;
    const int lag = T - 1 - at % T, d = lag / TILE, x = lag % TILE, tiles = (T - 1) / TILE + 1;
    const float* const own = sums + (at / T * tiles + d) * DIAGONALS + TILE - 1 + x;
    grad[at] = *own + (d + 1 < tiles && x > 0 ? own[DIAGONALS - TILE] : 0.0f);
}
