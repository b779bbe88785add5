// Version 0: the formula. One output per thread; all reads from global memory.
//
// Adjacent threads compute adjacent t, so they read the same k and adjacent w.

constexpr int PART = 128;

static __device__ long long thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }

// The sum over 0 <= j < n of x[step * j] * y[j], in partial sums, to reduce rounding error
static __device__ float dot(const float* x, int step, const float* y, int n) {
    float total = 0;
    for (int j_0 = 0; j_0 < n; j_0 += PART) {
        float part = 0;
        for (int j = j_0; j < min(n, j_0 + PART); ++j) part += x[step * j] * y[j];
        total += part;
    }
    return total;
}

// out[b,c,t] = eps + sum_{u<=t} w[c,(T-1)-(t-u)] * k[b,c,u]
extern "C" __global__ void forward(const float* __restrict__ w, const float* __restrict__ k, float* __restrict__ out,
                                   int B, int C, int T, float eps) {
    const long long i = thread(), row = i / T;
    if (row >= (long long)B * C) return;
    const int t = i % T;
    out[i] = eps + dot(w + row % C * T + (T - 1) - t, 1, k + row * T, t + 1);
}

// grad_k[b,c,u] = sum_{t>=u} w[c,(T-1)-(t-u)] * grad_out[b,c,t]
extern "C" __global__ void grad_k(const float* __restrict__ w, const float* __restrict__ grad_out,
                                  float* __restrict__ grad_k, int B, int C, int T) {
    const long long i = thread(), row = i / T;
    if (row >= (long long)B * C) return;
    const int u = i % T;
    grad_k[i] = dot(w + row % C * T + (T - 1), -1, grad_out + row * T + u, T - u);
}

// grad_w[c,(T-1)-n] = sum_b sum_{t>=n} grad_out[b,c,t] * k[b,c,t-n]
extern "C" __global__ void grad_w(const float* __restrict__ k, const float* __restrict__ grad_out,
                                  float* __restrict__ grad_w, int B, int C, int T) {
    const long long i = thread(), c = i / T;
    if (c >= C) return;
    const int n = T - 1 - i % T;
    float total = 0;
    for (int b = 0; b < B; ++b) {
        const long long row = ((long long)b * C + c) * T;
        total += dot(grad_out + row + n, 1, k + row, T - n);
    }
    grad_w[i] = total;
}
