// Version 3: enough threads. Each thread holds a tile of 4 x N / LANES numbers in registers. Backward consists of two kernels; one,
// backward_keys, processes all chunks in parallel.
//
//   tile      4 rows of a matrix M by N / LANES columns. A number loaded from shared memory is used in 4 products. The LANES
//             threads of the same 4 rows add up their sums by shuffles.
//   advance   a step of forward or rows: M <- M decay + x xs^T + u us^T, then P = M p and Q = M q
//   rows      (backward_rows) M is G, from the last step to the first: gv and gsa
//   keys      (backward_keys) M is S^T, from a chunk's first step to its last: gr and ga; then G^T, backwards: gk, gb and gl.
//             Forward saves sa and the state before each chunk, rows saves gsa and G after each chunk: chunks are independent.
//
// log_w's gradient is gl_j = w_j sum_i G_ij S'_ij, where S' is the state before the step. On its way forward, keys stores S at
// every GROUP-th step; on its way back, it recomputes the steps in between, so that S and G are in registers at the same time. (A
// running sum of r gr, a ga, b gb and k gk would not need S, but a small gl would be the difference of two large numbers.)
//
// Macros: N, CHUNK, GROUP, LANES, BFLOAT16.

#include "wkv7.cuh"

constexpr int ROWS = 4, COLUMNS = N / LANES, THREADS = N / ROWS * LANES;
static_assert(COLUMNS % 4 == 0 && LANES >= ROWS, "a tile is made of squares of 4 x 4, and a lane writes a row");

struct alignas(16) Four { float of[4]; };

struct alignas(16) Vector { float of[N]; };

// The operands of a step, M <- M decay + x xs^T + u us^T; M p and M q. T is Vector in shared memory, and float in registers
template <class T> struct Step { T decay, x, xs, u, us, p, q; };

static __device__ Four four(const float* from) { return *reinterpret_cast<const Four*>(from); }

// Stores element n of each operand, from thread n < N
static __device__ void put(Step<Vector>& to, const Step<float>& from) {
    const int n = threadIdx.x;
    if (n >= N) return;
    to.decay.of[n] = from.decay, to.x.of[n] = from.x, to.xs.of[n] = from.xs, to.u.of[n] = from.u, to.us.of[n] = from.us;
    to.p.of[n] = from.p, to.q.of[n] = from.q;
}

// Sums over the LANES threads of the same rows: lane i gets the sum of row i % ROWS. The first shuffles halve the number of sums
// per lane.
static __device__ float added_up(const Four& x, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const float low = (odd ? x.of[1] : x.of[0]) + __shfl_xor_sync(~0u, odd ? x.of[0] : x.of[1], 1);
    const float high = (odd ? x.of[3] : x.of[2]) + __shfl_xor_sync(~0u, odd ? x.of[2] : x.of[3], 1);
    float sum = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
#pragma unroll
    for (int bits = ROWS; bits < LANES; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    return sum;
}

// Gathers the numbers of the four rows, one from each of four lanes
static __device__ Four of_rows(float x) {
    return {__shfl_sync(~0u, x, 0, ROWS), __shfl_sync(~0u, x, 1, ROWS), __shfl_sync(~0u, x, 2, ROWS), __shfl_sync(~0u, x, 3, ROWS)};
}

struct Tile {
    float of[ROWS][COLUMNS];
    int lane, row;                               // row: the tile's first row; lane i < ROWS writes the results of row + i

    __device__ __forceinline__ Tile() : lane(threadIdx.x % LANES), row(threadIdx.x / LANES * ROWS) {}

    // The matrix column of the tile's column m, a multiple of 4: adjacent lanes read adjacent groups of four columns
    __device__ __forceinline__ int column(int m) const { return m * LANES + lane * 4; }

    // Loads the tile from a matrix or from its transpose
    template <bool TRANSPOSED> __device__ void read(const float* from) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Four some = four(from + (TRANSPOSED ? (column(m) + i) * N + row : (row + i) * N + column(m)));
#pragma unroll
                for (int e = 0; e < 4; ++e) (TRANSPOSED ? of[e][m + i] : of[i][m + e]) = some.of[e];
            }
    }
    __device__ void write(float* to) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int m = 0; m < COLUMNS; m += 4)
                *reinterpret_cast<Four*>(to + (row + i) * N + column(m)) =
                    {of[i][m], of[i][m + 1], of[i][m + 2], of[i][m + 3]};
    }
    // M <- M decay + x xs^T + u us^T, with one decay per row
    __device__ void update(const Four& decay, const Four& x, const Vector& xs, const Four& u, const Vector& us) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4) {
            const Four xs_m = four(xs.of + column(m)), us_m = four(us.of + column(m));
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& M = of[i][m + e];
                    M = M * decay.of[i] + x.of[i] * xs_m.of[e] + u.of[i] * us_m.of[e];
                }
        }
    }
    // Each row's dot product with the same row of another matrix
    __device__ float times(const Tile& other) const {
        Four sums = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int m = 0; m < COLUMNS; ++m) sums.of[i] += of[i][m] * other.of[i][m];
        return added_up(sums, lane);
    }
    __device__ float times(const Vector& q) const {
        Four sums = {};
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4) {
            const Four q_m = four(q.of + column(m));
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums.of[i] += of[i][m + e] * q_m.of[e];
        }
        return added_up(sums, lane);
    }
    // A step with one decay per column. P and Q are the results of row + lane % ROWS
    __device__ void advance(const Step<Vector>& step, const Four& x, float& P, float& Q) {
        const Four u = four(step.u.of + row);
        Four Ps = {}, Qs = {};
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4) {
            const int at = column(m);
            const Four decay = four(step.decay.of + at), xs = four(step.xs.of + at), us = four(step.us.of + at);
            const Four p = four(step.p.of + at), q = four(step.q.of + at);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& M = of[i][m + e];
                    M = M * decay.of[e] + x.of[i] * xs.of[e] + u.of[i] * us.of[e];
                    Ps.of[i] += M * p.of[e];
                    Qs.of[i] += M * q.of[e];
                }
        }
        P = added_up(Ps, lane);
        Q = added_up(Qs, lane);
    }
};

template <bool KEEP>
static __device__ void run(
        const Number* r, const float* log_w, const Number* k, const Number* v, const Number* a, const Number* b,
        const float* state, Number* y, float* after, float* sa_of_all, float* states, int T, int H) {
    __shared__ Step<Vector> steps[2];
    const int head = blockIdx.x, n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const auto fetch = [&](int t) -> Step<float> {
        if (n >= N || t >= T) return {};
        const long long x = place(head, t, T, H, N) + n;
        const float a_next = t + 1 < T ? load(a + x + (long long)H * N) : 0;
        return {expf(log_w[x]), 0, load(b + x), load(v + x), load(k + x), load(r + x), a_next};
    };
    Tile S;
    S.read<false>(state + matrix(head, N));
    if (n < N) steps[1].q.of[n] = load(a + place(head, 0, T, H, N) + n);
    put(steps[0], fetch(0));
    __syncthreads();
    float sa = S.times(steps[1].q);
    __syncthreads();
    for (int t = 0; t < T; ++t) {
        const Step<float> next = fetch(t + 1);
        if (KEEP && t % CHUNK == 0) S.write(states + matrix((long long)head * chunks + t / CHUNK, N));
        float y_t, sa_next;
        S.advance(steps[t & 1], of_rows(sa), y_t, sa_next);
        if (S.lane < ROWS) {
            const long long x = place(head, t, T, H, N) + S.row + S.lane;
            store(y + x, y_t);
            if (KEEP) sa_of_all[x] = sa;
        }
        sa = sa_next;
        put(steps[(t + 1) & 1], next);
        __syncthreads();
    }
    S.write(after + matrix(head, N));
}

// r, log_w, k, v, a, b, y (B,T,H,N); state, after (B,H,N,N)
extern "C" __global__ void __launch_bounds__(THREADS) forward(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ state, Number* __restrict__ y, float* __restrict__ after, int T, int H) {
    run<false>(r, log_w, k, v, a, b, state, y, after, nullptr, nullptr, T, H);
}

// forward that also saves sa (B,T,H,N), and the state before each chunk in `states` (B,H,chunks,N,N)
extern "C" __global__ void __launch_bounds__(THREADS) forward_keeping(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ state, Number* __restrict__ y, float* __restrict__ after, float* __restrict__ sa,
        float* __restrict__ states, int T, int H) {
    run<true>(r, log_w, k, v, a, b, state, y, after, sa, states, T, H);
}

// gsa_of_all (B,T,H,N); Gs (B,H,chunks,N,N): G after each chunk's last step, including the contribution of that step's y
extern "C" __global__ void __launch_bounds__(THREADS) backward_rows(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ a, const Number* __restrict__ b, const Number* __restrict__ grad_y,
        const float* __restrict__ grad_state, Number* __restrict__ grad_v, float* __restrict__ gsa_of_all,
        float* __restrict__ Gs, float* __restrict__ grad_state_before, int T, int H) {
    __shared__ Step<Vector> steps[2];
    const int head = blockIdx.x, n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    // The operands that move G from step t to step t - 1, and multiply it there; after the last step the decay is 1
    const auto fetch = [&](int t) -> Step<float> {
        if (n >= N) return {};
        const long long x = place(head, t, T, H, N) + n, last = x - (long long)H * N;
        Step<float> found = {1};
        if (t < T) found.decay = expf(log_w[x]), found.xs = load(a + x);
        if (t > 0) found.us = load(r + last), found.u = load(grad_y + last), found.p = load(k + last), found.q = load(b + last);
        return found;
    };
    Tile G;
    G.read<false>(grad_state + matrix(head, N));
    put(steps[T & 1], fetch(T));
    __syncthreads();
    float gsa = 0;
    for (int t = T; t >= 0; --t) {
        const Step<float> next = fetch(max(t - 1, 0));
        float gv, gsa_last;
        G.advance(steps[t & 1], of_rows(gsa), gv, gsa_last);
        if (t > 0 && G.lane < ROWS) {
            const long long x = place(head, t - 1, T, H, N) + G.row + G.lane;
            store(grad_v + x, gv);
            gsa_of_all[x] = gsa_last;
        }
        if (t > 0 && (t == T || t % CHUNK == 0)) G.write(Gs + matrix((long long)head * chunks + (t - 1) / CHUNK, N));
        gsa = gsa_last;
        put(steps[(t - 1) & 1], next);
        __syncthreads();
    }
    G.write(grad_state_before + matrix(head, N));
}

// A step's vectors along the value axis, as backward_keys needs them
struct Values { Vector sa, v, gy, gsa_next; };

// A block processes one chunk of a head after another. Rows of M are columns of the state. count: the number of chunks of all
// heads; starts (blocks,CHUNK/GROUP,N,N): the states before every GROUP-th step of a block's chunk
extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ sa, const float* __restrict__ states, const Number* __restrict__ grad_y,
        const float* __restrict__ gsa, const float* __restrict__ Gs, float* starts, Number* __restrict__ grad_r,
        float* __restrict__ grad_log_w, Number* __restrict__ grad_k, Number* __restrict__ grad_a, Number* __restrict__ grad_b,
        int count, int T, int H) {
    __shared__ Values values[GROUP];
    const int n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    const long long stride = (long long)H * N;
    starts += matrix((long long)blockIdx.x * (CHUNK / GROUP), N);
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
        const int head = index / chunks, first = index % chunks * CHUNK, end = min(T, first + CHUNK);
        const auto fetch = [&](int from) {
            __syncthreads();
            for (int t = from; n < N && t < min(end, from + GROUP); ++t) {
                const long long x = place(head, t, T, H, N) + n;
                Values& to = values[t - from];
                to.sa.of[n] = sa[x], to.v.of[n] = load(v + x), to.gy.of[n] = load(grad_y + x);
                to.gsa_next.of[n] = t + 1 < T ? gsa[x + stride] : 0;
            }
            __syncthreads();
        };
        Tile M;
        const bool writes = M.lane < ROWS;
        const long long own = place(head, 0, T, H, N) + M.row + M.lane % ROWS;
        const auto step_of_state = [&](Tile& S, int t, const Values& of_t) {
            const long long x = own + t * stride;
            S.update(of_rows(expf(log_w[x])), of_rows(load(b + x)), of_t.sa, of_rows(load(k + x)), of_t.v);
        };

        M.read<true>(states + matrix(index, N));
        __syncthreads();
        if (n < N) values[0].sa.of[n] = gsa[place(head, first, T, H, N) + n];
        __syncthreads();
        const float ga_first = M.times(values[0].sa);
        if (writes) store(grad_a + own + first * stride, ga_first);
        for (int t = first; t < end; ++t) {
            const int s = (t - first) % GROUP;
            if (s == 0) {
                fetch(t);
                M.write(starts + matrix((t - first) / GROUP, N));
            }
            step_of_state(M, t, values[s]);
            const float gr = M.times(values[s].gy), ga_next = M.times(values[s].gsa_next);
            if (writes) store(grad_r + own + t * stride, gr);
            if (writes && t + 1 < end) store(grad_a + own + (t + 1) * stride, ga_next);
        }

        M.read<true>(Gs + matrix(index, N));
        for (int from = first + (end - 1 - first) / GROUP * GROUP; from >= first; from -= GROUP) {
            fetch(from);
            Tile before[GROUP];
            before[0].read<false>(starts + matrix((from - first) / GROUP, N));
#pragma unroll
            for (int s = 1; s < GROUP; ++s)
                if (from + s < end) {
                    before[s] = before[s - 1];
                    step_of_state(before[s], from + s - 1, values[s - 1]);
                }
#pragma unroll
            for (int s = GROUP - 1; s >= 0; --s)
                if (from + s < end) {
                    const long long x = own + (from + s) * stride;
                    if (from + s + 1 < end)
                        M.update(of_rows(expf(log_w[x + stride])), of_rows(load(a + x + stride)), values[s].gsa_next,
                                 of_rows(load(r + x)), values[s].gy);
                    const float gk = M.times(values[s].v), gb = M.times(values[s].sa), gw = M.times(before[s]);
                    if (writes) {
                        store(grad_k + x, gk);
                        store(grad_b + x, gb);
                        grad_log_w[x] = gw * expf(log_w[x]);
                    }
                }
        }
    }
}
