// Version 0: the recurrence as written. A thread processes one row of a head's state; everything stays in global memory.
//
// Backward uses one block per head. For each chunk, from the last to the first, it recomputes the states into `history`, row by
// row. Then, for each step, its threads process rows of G (gv, gsa), synchronise, and process columns (gr, gk, gb, gw, ga, and the
// new G). Macros: CHUNK, BFLOAT16.

#include "wkv7.cuh"

// Updates a row of the state by one step; `before` and `after` may be the same memory
static __device__ void advance(const float* before, float* after, const float* log_w, const Number* k, float v,
                               const Number* a, const Number* b, int N) {
    float sa = 0;
    for (int j = 0; j < N; ++j) sa += before[j] * load(a + j);
    for (int j = 0; j < N; ++j) after[j] = before[j] * expf(log_w[j]) + sa * load(b + j) + v * load(k + j);
}

template <bool KEEP>
static __device__ void run(const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a,
                           const Number* b, const float* state, Number* y, float* after, float* states, int heads, int T,
                           int H, int N) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= (long long)heads * N) return;
    const int head = row / N, i = row % N, chunks = (T - 1) / CHUNK + 1;
    float* S = after + row * N;
    for (int j = 0; j < N; ++j) S[j] = state[row * N + j];
    for (int t = 0; t < T; ++t) {
        const long long x = place(head, t, T, H, N);
        if (KEEP && t % CHUNK == 0) {
            float* saved = states + matrix((long long)head * chunks + t / CHUNK, N) + (long long)i * N;
            for (int j = 0; j < N; ++j) saved[j] = S[j];
        }
        advance(S, S, log_w + x, k + x, load(v + x + i), a + x, b + x, N);
        float sum = 0;
        for (int j = 0; j < N; ++j) sum += S[j] * load(r + x + j);
        store(y + x + i, sum);
    }
}

// r, log_w, k, v, a, b, y (B,T,H,N); state, after (B,H,N,N)
extern "C" __global__ void forward(const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a,
                                   const Number* b, const float* state, Number* y, float* after, int heads, int T, int H,
                                   int N) {
    run<false>(r, log_w, k, v, a, b, state, y, after, nullptr, heads, T, H, N);
}

// forward that also saves the state before each chunk in `states` (B,H,chunks,N,N)
extern "C" __global__ void forward_keeping(const Number* r, const float* log_w, const Number* k, const Number* v,
                                           const Number* a, const Number* b, const float* state, Number* y, float* after,
                                           float* states, int heads, int T, int H, int N) {
    run<true>(r, log_w, k, v, a, b, state, y, after, states, heads, T, H, N);
}

// history (B,H,CHUNK+1,N,N): the states of a chunk; sums (B,H,2,N): each row's sa and gsa. G_of_all: at first grad_state, at the
// end the initial state's gradient.
extern "C" __global__ void backward(const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a,
                                    const Number* b, const float* states, const Number* grad_y, Number* grad_r,
                                    float* grad_log_w, Number* grad_k, Number* grad_v, Number* grad_a, Number* grad_b,
                                    float* G_of_all, float* history, float* sums, int T, int H, int N) {
    const int head = blockIdx.x, chunks = (T - 1) / CHUNK + 1;
    float *G = G_of_all + matrix(head, N), *S = history + matrix((long long)head * (CHUNK + 1), N);
    float *sa = sums + 2LL * head * N, *gsa = sa + N;
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const int first = chunk * CHUNK, end = min(T, first + CHUNK);
        for (int i = threadIdx.x; i < N; i += blockDim.x) {
            const float* saved = states + matrix((long long)head * chunks + chunk, N) + (long long)i * N;
            for (int j = 0; j < N; ++j) S[(long long)i * N + j] = saved[j];
            for (int t = first; t < end; ++t) {
                const long long x = place(head, t, T, H, N);
                float* row = S + matrix(t - first, N) + (long long)i * N;
                advance(row, row + matrix(1, N), log_w + x, k + x, load(v + x + i), a + x, b + x, N);
            }
        }
        for (int t = end - 1; t >= first; --t) {
            const long long x = place(head, t, T, H, N);
            const float *before = S + matrix(t - first, N), *after = before + matrix(1, N);
            for (int i = threadIdx.x; i < N; i += blockDim.x) {
                const float gy = load(grad_y + x + i);
                float sa_i = 0, gsa_i = 0, gv = 0;
                for (int j = 0; j < N; ++j) {
                    const long long ij = (long long)i * N + j;
                    G[ij] += gy * load(r + x + j);
                    sa_i += before[ij] * load(a + x + j);
                    gsa_i += G[ij] * load(b + x + j);
                    gv += G[ij] * load(k + x + j);
                }
                sa[i] = sa_i, gsa[i] = gsa_i;
                store(grad_v + x + i, gv);
            }
            __syncthreads();
            for (int j = threadIdx.x; j < N; j += blockDim.x) {
                const float w = expf(log_w[x + j]), a_j = load(a + x + j);
                float gr = 0, gk = 0, gb = 0, gw = 0, ga = 0;
                for (int i = 0; i < N; ++i) {
                    const long long ij = (long long)i * N + j;
                    gr += after[ij] * load(grad_y + x + i);
                    gk += G[ij] * load(v + x + i);
                    gb += G[ij] * sa[i];
                    gw += G[ij] * before[ij];
                    ga += before[ij] * gsa[i];
                    G[ij] = G[ij] * w + gsa[i] * a_j;
                }
                store(grad_r + x + j, gr);
                store(grad_k + x + j, gk);
                store(grad_b + x + j, gb);
                store(grad_a + x + j, ga);
                grad_log_w[x + j] = gw * w;
            }
            __syncthreads();
        }
    }
}
