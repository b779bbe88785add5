// Version 2: one pass over the state per step. The loop that updates S at step t also computes y of step t and sa of step t + 1.
// Each sum is four independent chains of additions, and the two run concurrently, not in sequence as in version 1. Meanwhile the
// next step's vectors are loaded from global memory into the second of two buffers, so a step needs only one barrier.
//
// Backward is that of version 1 with the same changes. Iteration t moves G from step t to step t - 1: by rows, with the sums of
// step t - 1, and by columns, with the sums of step t, for which it needs gsa from iteration t + 1. So a buffer contains w and a of
// step t, but r, k and b of step t - 1. After the last step w = 1 and a = 0; iteration 0 has no rows. As in version 1, the chunk's
// states are in `history`. With bfloat16, backward spills 48 bytes on sm_80. Macros: N, CHUNK, BFLOAT16.

#include "wkv7.cuh"

struct alignas(16) Four { float of[4]; };

struct alignas(16) Columns { float w[N], a[N], r[N], k[N], b[N]; };
struct alignas(16) Rows { float v[N], sa[N], gy[N], gsa[N]; };

// Element n of each vector of a step, held in registers until it is stored to a buffer
struct Numbers {
    float w, a, r, k, b, v, sa, gy;

    __device__ void put(Columns& columns, int n) const {
        columns.w[n] = w, columns.a[n] = a, columns.r[n] = r, columns.k[n] = k, columns.b[n] = b;
    }
    __device__ void put(Rows& rows, int n) const { rows.v[n] = v, rows.sa[n] = sa, rows.gy[n] = gy; }
};

static __device__ Four four(const float* from) { return *reinterpret_cast<const Four*>(from); }

static __device__ float total(const Four& parts) {
    return (parts.of[0] + parts.of[1]) + (parts.of[2] + parts.of[3]);
}

template <bool KEEP>
static __device__ void run(
        const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a, const Number* b,
        const float* state, Number* y, float* after, float* sa_of_all, float* states, int T, int H) {
    __shared__ Columns buffers[2];               // r, w, k, b of a step, and a of the next
    const int head = blockIdx.x, i = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const long long row = matrix(head, N) + i * N;
    const auto fetch = [&](int t) -> Numbers {
        if (t >= T) return {};
        const long long x = place(head, t, T, H, N) + i;
        const float a_next = t + 1 < T ? load(a + x + (long long)H * N) : 0;
        return {expf(log_w[x]), a_next, load(r + x), load(k + x), load(b + x), load(v + x)};
    };
    float S[N], v_i = 0;
    Four sas = {};
    buffers[1].a[i] = load(a + place(head, 0, T, H, N) + i);
    {
        const Numbers first = fetch(0);
        first.put(buffers[0], i);
        v_i = first.v;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) S[j] = state[row + j], sas.of[j % 4] += S[j] * buffers[1].a[j];
    __syncthreads();
    for (int t = 0; t < T; ++t) {
        if (KEEP && t % CHUNK == 0) {
            float* saved = states + matrix((long long)head * chunks + t / CHUNK, N) + i;
#pragma unroll
            for (int j = 0; j < N; ++j) saved[j * N] = S[j];
        }
        const Numbers next = fetch(t + 1);
        const Columns& step = buffers[t & 1];
        const float sa = total(sas);
        Four ys = {};
        sas = {};
#pragma unroll
        for (int j = 0; j < N; j += 4) {
            const Four w = four(step.w + j), b = four(step.b + j), k = four(step.k + j);
            const Four r = four(step.r + j), a_next = four(step.a + j);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S[j + e] = S[j + e] * w.of[e] + sa * b.of[e] + v_i * k.of[e];
                ys.of[e] += S[j + e] * r.of[e];
                sas.of[e] += S[j + e] * a_next.of[e];
            }
        }
        const long long x = place(head, t, T, H, N) + i;
        store(y + x, total(ys));
        if (KEEP) sa_of_all[x] = sa;
        next.put(buffers[(t + 1) & 1], i);
        v_i = next.v;
        __syncthreads();
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
    __shared__ Columns columns[2];
    __shared__ Rows rows[2], past[2];
    const int head = blockIdx.x, n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const long long all = matrix(head, N);
    history += matrix((long long)head * CHUNK, N) + n;

    // Recomputes column n of the chunk's states into `history`, and computes gr
    const auto recompute = [&](int chunk) {
        const int first = chunk * CHUNK, end = min(T, first + CHUNK);
        const float* saved = states + matrix((long long)head * chunks + chunk, N) + n * N;
        const auto fetch = [&](int t) -> Numbers {
            const long long x = place(head, t, T, H, N) + n;
            return {expf(log_w[x]), 0, 0, load(k + x), load(b + x), load(v + x), sa[x], load(grad_y + x)};
        };
        float S[N];
#pragma unroll
        for (int i = 0; i < N; ++i) S[i] = saved[i];
        Numbers now = fetch(first);
        now.put(past[first & 1], n);
        __syncthreads();
        for (int t = first; t < end; ++t) {
            const Numbers next = fetch(min(t + 1, end - 1));
            float* before = history + matrix(t - first, N);
            Four grs = {};
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const Four vs = four(past[t & 1].v + i), sas = four(past[t & 1].sa + i), gys = four(past[t & 1].gy + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    before[(i + e) * N] = S[i + e];
                    S[i + e] = S[i + e] * now.w + sas.of[e] * now.b + vs.of[e] * now.k;
                    grs.of[e] += S[i + e] * gys.of[e];
                }
            }
            store(grad_r + place(head, t, T, H, N) + n, total(grs));
            now = next;
            now.put(past[(t + 1) & 1], n);
            __syncthreads();
        }
    };

    // The vectors of iteration t: w, a, v and sa of step t; r, k, b and gy of step t - 1
    const auto fetch = [&](int t) -> Numbers {
        const long long x = place(head, t, T, H, N) + n, last = x - (long long)H * N;
        Numbers found = {1};
        if (t < T) found.w = expf(log_w[x]), found.a = load(a + x), found.v = load(v + x), found.sa = sa[x];
        if (t > 0) found.r = load(r + last), found.k = load(k + last), found.b = load(b + last), found.gy = load(grad_y + last);
        return found;
    };

    float G_row[N], G[N], gsa = 0, r_n = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) G_row[j] = grad_state[all + n * N + j], G[j] = grad_state[all + j * N + n];
    Numbers now = fetch(T);
    now.put(columns[T & 1], n);
    __syncthreads();
    for (int t = T; t >= 0; --t) {
        const int own = t & 1, other = own ^ 1;
        const Numbers next = fetch(max(t - 1, 0));
        if (t < T) {
            if (t == T - 1 || t % CHUNK == CHUNK - 1) recompute(t / CHUNK);
            const float* before = history + matrix(t % CHUNK, N);
            const Rows& step = rows[own];
            Four gks = {}, gbs = {}, gws = {}, gas = {};
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const Four gy = four(step.gy + i), v = four(step.v + i), sa = four(step.sa + i), gsas = four(step.gsa + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float S_before = before[(i + e) * N];
                    G[i + e] += gy.of[e] * r_n;
                    gks.of[e] += G[i + e] * v.of[e];
                    gbs.of[e] += G[i + e] * sa.of[e];
                    gws.of[e] += G[i + e] * S_before;
                    gas.of[e] += S_before * gsas.of[e];
                    G[i + e] = G[i + e] * now.w + gsas.of[e] * now.a;
                }
            }
            const long long x = place(head, t, T, H, N) + n;
            store(grad_k + x, total(gks));
            store(grad_b + x, total(gbs));
            store(grad_a + x, total(gas));
            grad_log_w[x] = total(gws) * now.w;
        }
        if (t > 0) {
            const Columns& step = columns[own];
            Four gvs = {}, gsas = {};
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                const Four w = four(step.w + j), a = four(step.a + j), r = four(step.r + j);
                const Four k = four(step.k + j), b = four(step.b + j);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    G_row[j + e] = G_row[j + e] * w.of[e] + gsa * a.of[e] + now.gy * r.of[e];
                    gvs.of[e] += G_row[j + e] * k.of[e];
                    gsas.of[e] += G_row[j + e] * b.of[e];
                }
            }
            store(grad_v + place(head, t - 1, T, H, N) + n, total(gvs));
            gsa = total(gsas);
            next.put(columns[other], n);
            next.put(rows[other], n);
            rows[other].gy[n] = now.gy;
            rows[other].gsa[n] = gsa;
        }
        r_n = now.r;
        now = next;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < N; ++i) grad_state_before[all + i * N + n] = G[i];
}
