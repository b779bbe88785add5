// For test_cuda_host.py: kernels with one mistake each, which cuda_host must report, and two kernels without mistakes.

extern "C" __global__ void reads_past_the_end(const float* x, float* y, int n) { y[0] = x[n]; }

extern "C" __global__ void reads_before_the_start(const float* x, float* y, int n) { y[0] = x[-1]; }

extern "C" __global__ void writes_past_the_end(const float* x, float* y, int n) { y[n + threadIdx.x] = x[0]; }

extern "C" __global__ void reads_past_shared_memory(const float* x, float* y, int n) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    const float* at = s + n;
    y[0] = *at;
}

extern "C" __global__ void reads_past_dynamic_shared_memory(const float* x, float* y, int n) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[threadIdx.x];
    y[0] = s[n];
}

extern "C" __global__ void loads_a_misaligned_float4(const float* x, float* y, int n) {
    y[0] = reinterpret_cast<const float4*>(x + 1)->x;
}

extern "C" __global__ void overflows(const float* x, float* y, int n) { y[0] = (n << 26) * n; }

extern "C" __global__ void waits_in_a_branch(const float* x, float* y, int n) {
    if (threadIdx.x > 0) __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void shuffles_with_a_lane_that_left(const float* x, float* y, int n) {
    if (threadIdx.x == 3) return;
    y[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
}

extern "C" __global__ void never_writes_shared_memory(const float* x, float* y, int n) {
    __shared__ float s[32];
    y[threadIdx.x] = x[threadIdx.x] + 0 * s[threadIdx.x];
}

// The result is correct only if the threads run in ascending order.
extern "C" __global__ void lacks_a_barrier(const float* x, float* y, int n) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[threadIdx.x / 2];
}

// y[i] = x[n - 1 - i]
extern "C" __global__ void reverses(const float* x, float* y, int n) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[n - 1 - threadIdx.x];
}

// y[i] = the sum of x
extern "C" __global__ void sums(const float* x, float* y, int n) {
    float total = x[threadIdx.x];
    for (int lanes = 1; lanes < n; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
    y[threadIdx.x] = total;
}
