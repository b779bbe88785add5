// Online softmax: computes the largest x and the sum of e^(x - largest) in one pass. blockDim.x threads process one row. A block
// has blockDim.y rows; more than one only if a row's threads are a single warp, so that no barrier is needed.
//
// A row may start at any multiple of 4 bytes. Its first columns, up to a multiple of 16 bytes, and its last columns are accessed
// one by one, those in between as float4. All tensors start at multiples of 16 bytes, so a row has the same alignment in each.
//
// The maximum starts at -FLT_MAX instead of -inf, so that -inf contributes e^-inf = 0. Only a row that consists of -inf has a sum
// of 0, and becomes 0/0. A NaN or +inf makes the sum, and so the row, NaN.

constexpr float LOWEST = -3.402823466e38f;

struct Online {
    float largest, sum;
    __device__ void add(float x) { add(x, expf(x - fmaxf(largest, x))); }
    __device__ void add(const float4& x) {
        const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), now = fmaxf(largest, most);
        add(most, expf(x.x - now) + expf(x.y - now) + expf(x.z - now) + expf(x.w - now));
    }
    // merges a maximum x and its sum into this one; the result is relative to the larger maximum
    __device__ void add(float x, float share) {
        const float now = fmaxf(largest, x);
        sum = sum * expf(largest - now) + share;
        largest = now;
    }
    __device__ void join(const Online& other) {
        add(other.largest, other.sum * expf(other.largest - fmaxf(largest, other.largest)));
    }
    __device__ Online from(int bits) const {
        return {__shfl_xor_sync(~0u, largest, bits), __shfl_xor_sync(~0u, sum, bits)};
    }
};

struct Sum {
    float sum;
    __device__ void join(const Sum& other) { sum += other.sum; }
    __device__ Sum from(int bits) const { return {__shfl_xor_sync(~0u, sum, bits)}; }
};

// All threads of a row get the same value, summed in the same order
template <class Part> static __device__ void join_warp(Part& part) {
#pragma unroll
    for (int bits = 16; bits; bits /= 2) part.join(part.from(bits));
}

template <class Part> static __device__ void join_row(Part& part, const Part& nothing) {
    __shared__ Part of_warp[WARPS];
    join_warp(part);
    if (blockDim.x == 32) return;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) of_warp[threadIdx.x / 32] = part;
    __syncthreads();
    part = lane < warps ? of_warp[lane] : nothing;
    join_warp(part);
}

// The number of columns before the first multiple of 16 bytes
static __device__ int head(long long row, int M) { return min(M, static_cast<int>(-row & 3)); }

// Processes this thread's columns of a row: one(i) for single columns, four(i) for groups of four
template <class One, class Four> static __device__ void each(long long row, int M, const One& one, const Four& four) {
    const int first = head(row, M), last = first + (M - first) / 4 * 4, edge = first + M - last;
    for (int i = threadIdx.x; i < edge; i += blockDim.x) one(i < first ? i : last + i - first);
#pragma unroll 4
    for (int i = first + 4 * threadIdx.x; i < last; i += 4 * blockDim.x) four(i);
}

static __device__ const float4& four_of(const float* x) { return *reinterpret_cast<const float4*>(x); }

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(
        const float* __restrict__ x, float* __restrict__ y, int N, int M) {
    const long long n = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y, row = n * M;
    if (n >= N) return;
    Online online = {LOWEST, 0};
    x += row, y += row;
    each(row, M, [&](int i) { online.add(x[i]); }, [&](int i) { online.add(four_of(x + i)); });
    join_row(online, {LOWEST, 0});
    const float largest = online.largest, share = 1 / online.sum;
    each(row, M, [&](int i) { y[i] = expf(x[i] - largest) * share; }, [&](int i) {
        const float4 four = four_of(x + i);
        *reinterpret_cast<float4*>(y + i) = make_float4(expf(four.x - largest) * share, expf(four.y - largest) * share,
                                                        expf(four.z - largest) * share, expf(four.w - largest) * share);
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) backward(
        const float* __restrict__ y, const float* __restrict__ grad_y, float* __restrict__ grad_x, int N, int M) {
    const long long n = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y, row = n * M;
    if (n >= N) return;
    Sum dot = {0};
    y += row, grad_y += row, grad_x += row;
    each(row, M, [&](int i) { dot.sum += y[i] * grad_y[i]; }, [&](int i) {
        const float4 share = four_of(y + i), grad = four_of(grad_y + i);
        dot.sum += (share.x * grad.x + share.y * grad.y) + (share.z * grad.z + share.w * grad.w);
    });
    join_row(dot, {0});
    each(row, M, [&](int i) { grad_x[i] = y[i] * (grad_y[i] - dot.sum); }, [&](int i) {
        const float4 share = four_of(y + i), grad = four_of(grad_y + i);
        *reinterpret_cast<float4*>(grad_x + i) = make_float4(share.x * (grad.x - dot.sum), share.y * (grad.y - dot.sum),
                                                             share.z * (grad.z - dot.sum), share.w * (grad.w - dot.sum));
    });
}
