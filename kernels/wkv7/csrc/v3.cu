// Rung 3: enough threads. Tiles of 4 x N / LANES numbers in a thread's registers; the backward split, its keys in all chunks at once.
//
//   tile      4 rows of a matrix M by N / LANES columns: a number that is read from shared memory serves 4 products, and the
//             LANES threads of 4 rows add up by shuffles, 4 numbers by 4 or 8
//   advance   what every kernel here does at a step: M <- M decay + x xs^T + u us^T, then P = M p and Q = M q
//   rows      M is G, from the last step to the first: gv and gsa
//   keys      M is S^T from the first step of a chunk to its last, gr and ga; then G^T back again, gk and gb. Forward has kept sa
//             and the state before each chunk, rows gsa and G after each: no chunk waits for another.
//
// log_w's gradient needs no S and G of one moment, but that after the chunk's last step. With X_j = sum_i G_ij S_ij after step t,
// G with the share of y_t, multiplying the recurrences of S and of G gives
//
//     X = gw w + b gb + k gk = gw' w' + a' ga' + r gr           ('): of step t + 1
//
// N, CHUNK, LANES and BFLOAT16 are given by whoever compiles this.

#include "wkv7.cuh"

constexpr int ROWS = 4, COLUMNS = N / LANES, THREADS = N / ROWS * LANES;
static_assert(COLUMNS % 4 == 0 && LANES >= ROWS, "a tile is made of squares of 4 x 4, and a lane writes a row");

struct alignas(16) Four { float of[4]; };

struct alignas(16) Vector { float of[N]; };

// What a step does with M, in shared memory, and in a thread on its way there: M <- M decay + x xs^T + u us^T; M p and M q
template <class T> struct Step { T decay, x, xs, u, us, p, q; };

static __device__ Four four(const float* from) { return *reinterpret_cast<const Four*>(from); }

// Thread n has element n; those from N on have none
static __device__ void put(Step<Vector>& to, const Step<float>& from) {
    const int n = threadIdx.x;
    if (n >= N) return;
    to.decay.of[n] = from.decay, to.x.of[n] = from.x, to.xs.of[n] = from.xs, to.u.of[n] = from.u, to.us.of[n] = from.us;
    to.p.of[n] = from.p, to.q.of[n] = from.q;
}

// Sums over the LANES threads of a tile's rows: lane i gets that of row i % ROWS. Each adds up half of what it has and gives the
// rest away, until it has one number.
static __device__ float added_up(const Four& x, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const float low = (odd ? x.of[1] : x.of[0]) + __shfl_xor_sync(~0u, odd ? x.of[0] : x.of[1], 1);
    const float high = (odd ? x.of[3] : x.of[2]) + __shfl_xor_sync(~0u, odd ? x.of[2] : x.of[3], 1);
    float sum = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
#pragma unroll
    for (int bits = ROWS; bits < LANES; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    return sum;
}

// All rows' numbers, of which each lane has one
static __device__ Four of_rows(float x) {
    return {__shfl_sync(~0u, x, 0, ROWS), __shfl_sync(~0u, x, 1, ROWS), __shfl_sync(~0u, x, 2, ROWS), __shfl_sync(~0u, x, 3, ROWS)};
}

struct Tile {
    float of[ROWS][COLUMNS];
    int lane, row;                               // its first row; lane i < ROWS writes what belongs to row + i

    __device__ __forceinline__ Tile() : lane(threadIdx.x % LANES), row(threadIdx.x / LANES * ROWS) {}

    // Of the tile's column m, a multiple of 4: neighbouring lanes read neighbouring fours
    __device__ __forceinline__ int column(int m) const { return m * LANES + lane * 4; }

    // each(i, M_im, x_im) for the elements of a matrix x, or of its transpose
    template <bool TRANSPOSED, class Each> __device__ void with(const float* x, const Each& each) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Four some = four(x + (TRANSPOSED ? (column(m) + i) * N + row : (row + i) * N + column(m)));
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    TRANSPOSED ? each(e, of[e][m + i], some.of[e]) : each(i, of[i][m + e], some.of[e]);
            }
    }
    template <bool TRANSPOSED> __device__ void read(const float* from) {
        with<TRANSPOSED>(from, [](int, float& own, float x) { own = x; });
    }
    __device__ void write(float* to) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int m = 0; m < COLUMNS; m += 4)
                *reinterpret_cast<Four*>(to + (row + i) * N + column(m)) =
                    {of[i][m], of[i][m + 1], of[i][m + 2], of[i][m + 3]};
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
    // The decay is one of columns, or with BY_ROW of rows. P and Q are of the lane's row.
    template <bool BY_ROW> __device__ void advance(const Step<Vector>& step, const Four& x, float& P, float& Q) {
        const Four u = four(step.u.of + row), decay_of_rows = four(step.decay.of + row);
        Four Ps = {}, Qs = {};
#pragma unroll
        for (int m = 0; m < COLUMNS; m += 4) {
            const int at = column(m);
            const Four decay = BY_ROW ? decay_of_rows : four(step.decay.of + at), xs = four(step.xs.of + at);
            const Four us = four(step.us.of + at), p = four(step.p.of + at), q = four(step.q.of + at);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& M = of[i][m + e];
                    M = M * decay.of[BY_ROW ? i : e] + x.of[i] * xs.of[e] + u.of[i] * us.of[e];
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
        S.advance<false>(steps[t & 1], of_rows(sa), y_t, sa_next);
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

// With sa (B,T,H,N), and states (B,H,chunks,N,N): those before each chunk
extern "C" __global__ void __launch_bounds__(THREADS) forward_keeping(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ state, Number* __restrict__ y, float* __restrict__ after, float* __restrict__ sa,
        float* __restrict__ states, int T, int H) {
    run<true>(r, log_w, k, v, a, b, state, y, after, sa, states, T, H);
}

// gsa (B,T,H,N); Gs (B,H,chunks,N,N): G after each chunk's last step, with the share of its y
extern "C" __global__ void __launch_bounds__(THREADS) backward_rows(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ a, const Number* __restrict__ b, const Number* __restrict__ grad_y,
        const float* __restrict__ grad_state, Number* __restrict__ grad_v, float* __restrict__ gsa_of_all,
        float* __restrict__ Gs, float* __restrict__ grad_state_before, int T, int H) {
    __shared__ Step<Vector> steps[2];
    const int head = blockIdx.x, n = threadIdx.x, chunks = (T - 1) / CHUNK + 1;
    // From step t, after the last of which nothing decays, to the sums of t - 1
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
        G.advance<false>(steps[t & 1], of_rows(gsa), gv, gsa_last);
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

// A block takes a chunk of a head. Rows of M are columns of the state.
extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(
        const Number* __restrict__ r, const float* __restrict__ log_w, const Number* __restrict__ k,
        const Number* __restrict__ v, const Number* __restrict__ a, const Number* __restrict__ b,
        const float* __restrict__ sa, const float* __restrict__ states, const Number* __restrict__ grad_y,
        const float* __restrict__ gsa, const float* __restrict__ Gs, Number* __restrict__ grad_r, float* grad_log_w,
        Number* __restrict__ grad_k, Number* __restrict__ grad_a, Number* __restrict__ grad_b, int T, int H) {
    __shared__ Step<Vector> steps[2];
    const int n = threadIdx.x, chunks = (T - 1) / CHUNK + 1, head = blockIdx.x / chunks;
    const int first = blockIdx.x % chunks * CHUNK, end = min(T, first + CHUNK);
    const long long stride = (long long)H * N;
    Tile M;
    const bool writes = M.lane < ROWS;
    const int own = M.row + M.lane % ROWS;

    const auto fetch_forwards = [&](int t) -> Step<float> {
        if (n >= N || t >= end) return {};
        const long long x = place(head, t, T, H, N) + n;
        const float gsa_next = t + 1 < end ? gsa[x + stride] : 0;
        return {expf(log_w[x]), load(b + x), sa[x], load(k + x), load(v + x), load(grad_y + x), gsa_next};
    };
    M.read<true>(states + matrix(blockIdx.x, N));
    if (n < N) steps[1 ^ (first & 1)].q.of[n] = gsa[place(head, first, T, H, N) + n];
    put(steps[first & 1], fetch_forwards(first));
    __syncthreads();
    const float ga_first = M.times(steps[1 ^ (first & 1)].q);
    if (writes) store(grad_a + place(head, first, T, H, N) + own, ga_first);
    __syncthreads();
    for (int t = first; t < end; ++t) {
        const Step<float> next = fetch_forwards(t + 1);
        const long long x = place(head, t, T, H, N) + own;
        const bool more = writes && t + 1 < end;
        const float r_t = more ? load(r + x) : 0, a_next = more ? load(a + x + stride) : 0;
        const Step<Vector>& step = steps[t & 1];
        float gr, ga_next;
        M.advance<true>(step, four(step.x.of + M.row), gr, ga_next);
        if (writes) store(grad_r + x, gr);
        if (more) {
            store(grad_a + x + stride, ga_next);
            grad_log_w[x] = r_t * gr + a_next * ga_next;     // as yet
        }
        put(steps[(t + 1) & 1], next);
        __syncthreads();
    }

    // From step t + 1 to the sums of t, but first from G as it is
    const auto fetch_backwards = [&](int t) -> Step<float> {
        if (n >= N || t < first) return {};
        const long long x = place(head, t, T, H, N) + n;
        Step<float> found = {1, 0, 0, 0, 0, load(v + x), sa[x]};
        if (t + 1 < end) {
            found.decay = expf(log_w[x + stride]), found.x = load(a + x + stride), found.xs = gsa[x + stride];
            found.u = load(r + x), found.us = load(grad_y + x);
        }
        return found;
    };
    Four SG = {};
    M.with<true>(Gs + matrix(blockIdx.x, N), [&](int i, float& own, float G) { SG.of[i] += own * G, own = G; });
    float X = added_up(SG, M.lane);
    put(steps[(end - 1) & 1], fetch_backwards(end - 1));
    __syncthreads();
    for (int t = end - 1; t >= first; --t) {
        const Step<float> next = fetch_backwards(t - 1);
        const long long x = place(head, t, T, H, N) + own;
        const float k_t = writes ? load(k + x) : 0, b_t = writes ? load(b + x) : 0;
        if (writes && t + 1 < end) X += grad_log_w[x];
        const Step<Vector>& step = steps[t & 1];
        float gk, gb;
        M.advance<true>(step, four(step.x.of + M.row), gk, gb);
        if (writes) {
            X -= k_t * gk + b_t * gb;
            grad_log_w[x] = X;
            store(grad_k + x, gk);
            store(grad_b + x, gb);
        }
        put(steps[(t - 1) & 1], next);
        __syncthreads();
    }
}
