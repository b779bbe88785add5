// Version 1: a row of the state in each thread's registers, a step's vectors in shared memory. A block processes one head.
//
// Backward also uses one block per head. Thread n holds row n of G, for gv and gsa, and column n of G, for the other gradients, so
// that all sums stay within a thread, at the cost of computing G twice. Before that, thread n recomputes column n of S through the
// chunk, which needs no sums across threads, since forward has saved sa; this yields gr and the states, which go into `history`.
// The row and the two columns exceed 255 registers: backward spills 60 to 120 bytes. Macros: N, CHUNK, BFLOAT16.

#include "wkv7.cuh"

struct Columns { float r[N], w[N], k[N], a[N], b[N]; };
struct Rows { float v[N], sa[N], gy[N], gsa[N]; };

template <bool KEEP>
static __device__ void run(
        const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a, const Number* b,
        const float* state, Number* y, float* after, float* sa_of_all, float* states, int T, int H) {
    __shared__ Columns step;
    const int head = blockIdx.x, i = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const long long row = matrix(head, N) + i * N;
    float S[N];
#pragma unroll
    for (int j = 0; j < N; ++j) S[j] = state[row + j];
    for (int t = 0; t < T; ++t) {
        const long long x = place(head, t, T, H, N) + i;
        __syncthreads();
        step.r[i] = load(r + x);
        step.w[i] = expf(log_w[x]);
        step.k[i] = load(k + x);
        step.a[i] = load(a + x);
        step.b[i] = load(b + x);
        __syncthreads();
        if (KEEP && t % CHUNK == 0) {
            float* saved = states + matrix((long long)head * chunks + t / CHUNK, N) + i;
#pragma unroll
            for (int j = 0; j < N; ++j) saved[j * N] = S[j];
        }
        const float v_i = load(v + x);
        float sa = 0, sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) sa += S[j] * step.a[j];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            S[j] = S[j] * step.w[j] + sa * step.b[j] + v_i * step.k[j];
            sum += S[j] * step.r[j];
        }
        store(y + x, sum);
        if (KEEP) sa_of_all[x] = sa;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) after[row + j] = S[j];
}

// r, log_w, k, v, a, b, y (B,T,H,N); state, after (B,H,N,N)
extern "C" __global__ void __launch_bounds__(N) forward(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ state, Number* __restrict__ y, float* __restrict__ after, int T, int H) {
    run<false>(r, log_w, k, v, a, b, state, y, after, nullptr, nullptr, T, H);
}

// forward that also saves sa (B,T,H,N), and the state before each chunk in `states` (B,H,chunks,N,N), as [j][i] to coalesce stores
extern "C" __global__ void __launch_bounds__(N) forward_keeping(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ state, Number* __restrict__ y, float* __restrict__ after, float* __restrict__ sa,
        float* __restrict__ states, int T, int H) {
    run<true>(r, log_w, k, v, a, b, state, y, after, sa, states, T, H);
}

// history (B,H,CHUNK,N,N): the states before each step of a chunk
extern "C" __global__ void __launch_bounds__(N) backward(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ sa, const float* __restrict__ states, const Number* __restrict__ grad_y,
        const float* __restrict__ grad_state, Number* __restrict__ grad_r, float* __restrict__ grad_log_w,
        Number* __restrict__ grad_k, Number* __restrict__ grad_v, Number* __restrict__ grad_a, Number* __restrict__ grad_b,
        float* __restrict__ grad_state_before, float* history, int T, int H) {
    __shared__ Columns columns;
    __shared__ Rows rows;
    const int head = blockIdx.x, n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const long long all = matrix(head, N);
    history += matrix((long long)head * CHUNK, N) + n;
    float G_row[N], G[N];
#pragma unroll
    for (int j = 0; j < N; ++j) G_row[j] = grad_state[all + n * N + j], G[j] = grad_state[all + j * N + n];
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const int first = chunk * CHUNK, end = min(T, first + CHUNK);
        const float* saved = states + matrix((long long)head * chunks + chunk, N) + n * N;
        float S[N];
#pragma unroll
        for (int i = 0; i < N; ++i) S[i] = saved[i];
        for (int t = first; t < end; ++t) {
            const long long x = place(head, t, T, H, N) + n;
            __syncthreads();
            rows.v[n] = load(v + x);
            rows.sa[n] = sa[x];
            rows.gy[n] = load(grad_y + x);
            __syncthreads();
            const float w = expf(log_w[x]), k_n = load(k + x), b_n = load(b + x);
            float *before = history + matrix(t - first, N), gr = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                before[i * N] = S[i];
                S[i] = S[i] * w + rows.sa[i] * b_n + rows.v[i] * k_n;
                gr += S[i] * rows.gy[i];
            }
            store(grad_r + x, gr);
        }
        for (int t = end - 1; t >= first; --t) {
            const long long x = place(head, t, T, H, N) + n;
            const float w = expf(log_w[x]), r_n = load(r + x), a_n = load(a + x), gy = load(grad_y + x);
            __syncthreads();
            columns.r[n] = r_n, columns.w[n] = w, columns.k[n] = load(k + x), columns.a[n] = a_n, columns.b[n] = load(b + x);
            rows.v[n] = load(v + x), rows.sa[n] = sa[x], rows.gy[n] = gy;
            __syncthreads();
            float gv = 0, gsa = 0;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                G_row[j] += gy * columns.r[j];
                gv += G_row[j] * columns.k[j];
                gsa += G_row[j] * columns.b[j];
            }
#pragma unroll
            for (int j = 0; j < N; ++j) G_row[j] = G_row[j] * columns.w[j] + gsa * columns.a[j];
            store(grad_v + x, gv);
            rows.gsa[n] = gsa;
            __syncthreads();
            const float* before = history + matrix(t - first, N);
            float gk = 0, gb = 0, gw = 0, ga = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float S_before = before[i * N];
                G[i] += rows.gy[i] * r_n;
                gk += G[i] * rows.v[i];
                gb += G[i] * rows.sa[i];
                gw += G[i] * S_before;
                ga += S_before * rows.gsa[i];
                G[i] = G[i] * w + rows.gsa[i] * a_n;
            }
            store(grad_k + x, gk);
            store(grad_b + x, gb);
            store(grad_a + x, ga);
            grad_log_w[x] = gw * w;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) grad_state_before[all + i * N + n] = G[i];
}
