// WKV-7 and its gradients: the passes of taichi_v3 with fused multiply-adds.
//
// For each batch row and head, with an N x N state S (rows i: value, columns j: key) and w = exp(log_w), a step is
//
//     S <- S (diag(w) + a b^T) + v k^T        y = S r         sa_t = S_{t-1} a_t
//
// Within a chunk of steps, let W_t be the product of w from the chunk's first step to t, S = S' diag(W_t) and G = dL/dS = G' /
// diag(W_t). With b' = b / W, k' = k / W, r' = r W and a'_t = a_t W_{t-1}, the steps have no decay. Each step of the four passes
// adds two outer products to a matrix, and multiplies it by two vectors:
//
//     forward   lanes i   S' += sa_t b'_t + v_t k'_t              y_t = S' r'_t              sa_{t+1} = S' a'_{t+1}
//     rows      lanes i   G' += gsa_{t+1} a'_{t+1} + gy_t r'_t    gv_t = G' k'_t             gsa_t = G' b'_t
//     states    lanes j   S' as in forward                        gr_t = W_t (S'^T gy_t)     ga_{t+1} = W_t (S'^T gsa_{t+1})
//     keys      lanes j   G' as in rows                           gk_t = (G'^T v_t) / W_t    gb_t = (G'^T sa_t) / W_t
//
// Backward visits every chunk twice. First the row pass runs from the last chunk to the first, and saves G after each chunk. Then,
// from the first chunk to the last, the state pass runs forwards through a chunk and saves S' after each step, and the key pass
// runs backwards through it. So the key pass has S' and G' of the same step for gl, the gradient of log_w:
//
//     gl_t = sum_i (S_{t-1} diag(w_t))_ij (G_t)_ij = sum_i (S'_{t-1})_ij (G'_t)_ij
//
// The running sum gl_{t+1} = gl_t - (r gr)_t - (a ga)_{t+1} + (b gb)_t + (k gk)_t would be cheaper, but suffers from cancellation:
// a small gl next to a large one would be the difference of two large sums, and a gl of 0 would not be exactly 0.
//
// A matrix is divided into strips as wide as a vector: LANES rows, with lanes along i, or LANES columns, with lanes along j. A
// strip stores its N vectors contiguously, and stays in the L1 cache for a chunk of steps.
//
// Sequences are (B,T,H,N), states (B,H,N,N). A task is a head (b,h).

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    CHUNK = 16,                          // steps; 1/W <= e^16 for log_w >= -1
};

// Arguments, in the order of c_v0.py. gx denotes the gradient of x; gl that of log_w.
struct call {
    int64_t B, T, H, N, scratch_size;    // scratch_size: numbers per thread
    float *scratch;
    const void *r, *log_w, *k, *v, *a, *b;
    const float *state;
    float *sa;                           // forward: output, or null; backward: input
    void *y;                             // backward: gy
    float *after;                        // state after the last step; backward: its gradient
    void *gr, *gl, *gk, *gv, *ga, *gb;   // the rest: backward only
        float *gstate;
};

// A head's position and buffers. Its step t starts at index first + t * stride of a sequence. matrix: S' or G' in strips; columns,
// rows: staged vectors of a chunk; gsa: for T + 1 steps, the last one 0; G: a strip of G' in the key pass; history: a strip of S'
// after each step of a chunk; saved: G after each chunk.
struct head {
    const struct call *call;
    int64_t first, stride, T, N;
    float *matrix, *columns, *rows, *gsa, *G, *history, *saved;
};

// Staged vectors (N) of a step. Along the key axis: b', k', r', the next step's a' (0 after the last step), W, 1/W. Along the
// value axis: sa, v, gy.
enum { B, K, R, A_NEXT, DECAY, INVERSE_DECAY, COLUMNS };
enum { SA, V, GY, ROWS };

INLINE float *column(const struct head *head, int64_t s, int name) { return head->columns + (s * COLUMNS + name) * head->N; }
INLINE float *row(const struct head *head, int64_t s, int name) { return head->rows + (s * ROWS + name) * head->N; }
INLINE int64_t index_of(const struct head *head, int64_t t) { return head->first + t * head->stride; }
INLINE int64_t chunk_steps(const struct head *head, int64_t t_0) { return head->T - t_0 < CHUNK ? head->T - t_0 : CHUNK; }

INLINE void stage_columns(enum dtype dtype, const struct head *head, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    for (int64_t s = 0; s < steps; s++) {
        int64_t is_last = t_0 + s == head->T - 1, i = index_of(head, t_0 + s), next = is_last ? i : i + head->stride;
        floats has_next = splat(is_last ? 0.0f : 1.0f);
        for (int64_t j = 0; j < head->N; j += LANES) {
            floats w = exp_neg(load_as(FLOAT32, call->log_w, i + j));
            if (s) w = w * load(column(head, s - 1, DECAY) + j);
            floats inverse_w = 1.0f / w;
            store(column(head, s, B) + j, load_as(dtype, call->b, i + j) * inverse_w);
            store(column(head, s, K) + j, load_as(dtype, call->k, i + j) * inverse_w);
            store(column(head, s, R) + j, load_as(dtype, call->r, i + j) * w);
            store(column(head, s, A_NEXT) + j, load_as(dtype, call->a, next + j) * w * has_next);
            store(column(head, s, DECAY) + j, w);
            store(column(head, s, INVERSE_DECAY) + j, inverse_w);
        }
    }
}

INLINE void stage_rows(enum dtype dtype, const struct head *head, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = index_of(head, t_0 + s);
        for (int64_t j = 0; j < head->N; j += LANES) {
            store(row(head, s, SA) + j, load(call->sa + i + j));
            store(row(head, s, V) + j, load_as(dtype, call->v, i + j));
            store(row(head, s, GY) + j, load_as(dtype, call->y, i + j));
        }
    }
}

// One step of a pass on a strip: to = from + p x^T + q y^T; dot_u and dot_v are the products of `to` with u and v. Each product has
// two accumulators, since with one the latency of its dependent additions would dominate.
INLINE void step(const float *from, float *to, int64_t N, floats p, floats q, const float *x, const float *y, const float *u,
                 const float *v, floats *dot_u, floats *dot_v) {
    floats sums_u[2] = {splat(0.0f), splat(0.0f)}, sums_v[2] = {splat(0.0f), splat(0.0f)};
    for (int64_t n = 0; n < N; n += 2)
        UNROLL for (int o = 0; o < 2; o++) {
            floats new = fma(q, splat(y[n + o]), fma(p, splat(x[n + o]), load(from + (n + o) * LANES)));
            store(to + (n + o) * LANES, new);
            sums_u[o] = fma(new, splat(u[n + o]), sums_u[o]);
            sums_v[o] = fma(new, splat(v[n + o]), sums_v[o]);
        }
    *dot_u = sums_u[0] + sums_u[1], *dot_v = sums_v[0] + sums_v[1];
}

// `step` that also computes dot_other: each lane's dot product of `to` with a second strip.
INLINE void step_with(const float *from, float *to, const float *other, int64_t N, floats p, floats q, const float *x,
                      const float *y, const float *u, const float *v, floats *dot_u, floats *dot_v, floats *dot_other) {
    floats sums_u[2] = {splat(0.0f), splat(0.0f)}, sums_v[2] = {splat(0.0f), splat(0.0f)};
    floats sums_other[2] = {splat(0.0f), splat(0.0f)};
    for (int64_t n = 0; n < N; n += 2)
        UNROLL for (int o = 0; o < 2; o++) {
            floats other_n = load(other + (n + o) * LANES);
            floats new = fma(q, splat(y[n + o]), fma(p, splat(x[n + o]), load(from + (n + o) * LANES)));
            store(to + (n + o) * LANES, new);
            sums_u[o] = fma(new, splat(u[n + o]), sums_u[o]);
            sums_v[o] = fma(new, splat(v[n + o]), sums_v[o]);
            sums_other[o] = fma(new, other_n, sums_other[o]);
        }
    *dot_u = sums_u[0] + sums_u[1], *dot_v = sums_v[0] + sums_v[1], *dot_other = sums_other[0] + sums_other[1];
}

INLINE floats strip_dot(const float *strip, int64_t N, const float *u) {
    floats sum = splat(0.0f);
    for (int64_t n = 0; n < N; n++) sum = fma(load(strip + n * LANES), splat(u[n]), sum);
    return sum;
}

// Multiplies a strip with lanes along i by the decays w of its columns.
INLINE void decay_columns(float *strip, int64_t N, const float *w) {
    for (int64_t n = 0; n < N; n++) store(strip + n * LANES, load(strip + n * LANES) * splat(w[n]));
}

// Multiplies a strip with lanes along j by the decays of its columns; from and to may be the same.
INLINE void decay(const float *from, float *to, int64_t N, floats w) {
    for (int64_t n = 0; n < N; n++) store(to + n * LANES, load(from + n * LANES) * w);
}

// Prefetches the inputs of a step one chunk ahead, since hardware prefetchers do not detect a stride of H heads.
INLINE void prefetch_columns(enum dtype dtype, const struct call *call, int64_t i) {
    prefetch(FLOAT32, call->log_w, i);
    prefetch(dtype, call->r, i);
    prefetch(dtype, call->k, i);
    prefetch(dtype, call->a, i);
    prefetch(dtype, call->b, i);
}

INLINE void prefetch_rows(enum dtype dtype, const struct call *call, int64_t i) {
    prefetch(FLOAT32, call->sa, i);
    prefetch(dtype, call->v, i);
    prefetch(dtype, call->y, i);
}

INLINE void forward_strip(enum dtype dtype, const struct head *head, int64_t lane, int64_t t_0, int64_t steps, float *sa) {
    const struct call *call = head->call;
    float *strip = head->matrix + lane * head->N;
    floats sa_t = load(sa + lane), y;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = index_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        prefetch_columns(dtype, call, later);
        prefetch(dtype, call->v, later);
        prefetch(dtype, call->y, later);
        if (call->sa) {
            prefetch(FLOAT32, call->sa, later);
            store(call->sa + i, sa_t);
        }
        step(strip, strip, head->N, sa_t, load_as(dtype, call->v, i), column(head, s, B), column(head, s, K),
             column(head, s, R), column(head, s, A_NEXT), &y, &sa_t);
        store_as(dtype, call->y, i, y);
    }
    store(sa + lane, sa_t);
    decay_columns(strip, head->N, column(head, steps - 1, DECAY));
}

INLINE void forward(enum dtype dtype, const struct head *head, const float *state, float *after) {
    int64_t N = head->N;
    float *a = head->columns, *sa = head->gsa;           // buffers for a and sa of one step
    for (int64_t j = 0; j < N; j += LANES) store(a + j, load_as(dtype, head->call->a, head->first + j));
    for (int64_t lane = 0; lane < N; lane += LANES) {
        transpose(head->matrix + lane * N, LANES, state + lane * N, N, LANES, N);
        store(sa + lane, strip_dot(head->matrix + lane * N, N, a));
    }
    for (int64_t t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        int64_t steps = chunk_steps(head, t_0);
        stage_columns(dtype, head, t_0, steps);
        for (int64_t lane = 0; lane < N; lane += LANES) forward_strip(dtype, head, lane, t_0, steps, sa);
    }
    for (int64_t lane = 0; lane < N; lane += LANES) transpose(after + lane * N, N, head->matrix + lane * N, LANES, N, LANES);
}

INLINE void row_strip(enum dtype dtype, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    float *strip = head->matrix + lane * N, *gsa = head->gsa + t_0 * N + lane;
    floats gsa_t = load(gsa + steps * N), gv;
    decay_columns(strip, N, column(head, steps - 1, DECAY));
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = index_of(head, t_0 + s) + lane, later = i - CHUNK * head->stride;
        prefetch_columns(dtype, call, later);
        prefetch(dtype, call->y, later);
        prefetch(dtype, call->gv, later);
        step(strip, strip, N, gsa_t, load_as(dtype, call->y, i), column(head, s, A_NEXT), column(head, s, R), column(head, s, K),
             column(head, s, B), &gv, &gsa_t);
        store_as(dtype, call->gv, i, gv);
        store(gsa + s * N, gsa_t);
    }
}

// Returns the saved G after the chunk that starts at step t_0, in strips with lanes along j.
INLINE float *saved_G(const struct head *head, int64_t t_0) { return head->saved + t_0 / CHUNK * head->N * head->N; }

// Copies the matrix from strips with lanes along i to strips with lanes along j.
INLINE void save_G(const struct head *head, float *saved) {
    int64_t N = head->N;
    for (int64_t j = 0; j < N; j += LANES)
        for (int64_t i = 0; i < N; i += LANES)
            transpose(saved + j * N + i * LANES, LANES, head->matrix + i * N + j * LANES, LANES, LANES, LANES);
}

// Row pass: gv, gsa and the initial state's gradient, which is G' of the first step plus that step's gsa a^T.
INLINE void row_pass(enum dtype dtype, const struct head *head, const float *gafter, float *gstate) {
    int64_t N = head->N;
    for (int64_t lane = 0; lane < N; lane += LANES) {
        transpose(head->matrix + lane * N, LANES, gafter + lane * N, N, LANES, N);
        store(head->gsa + head->T * N + lane, splat(0.0f));
    }
    for (int64_t t_0 = (head->T - 1) / CHUNK * CHUNK; t_0 >= 0; t_0 -= CHUNK) {
        int64_t steps = chunk_steps(head, t_0);
        stage_columns(dtype, head, t_0, steps);
        save_G(head, saved_G(head, t_0));
        for (int64_t lane = 0; lane < N; lane += LANES) row_strip(dtype, head, lane, t_0, steps);
    }
    float *a = head->columns;                            // a buffer for a of the first step
    for (int64_t j = 0; j < N; j += LANES) store(a + j, load_as(dtype, head->call->a, head->first + j));
    for (int64_t lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        floats gsa = load(head->gsa + lane);
        for (int64_t n = 0; n < N; n++) store(strip + n * LANES, fma(gsa, splat(a[n]), load(strip + n * LANES)));
        transpose(gstate + lane * N, N, strip, LANES, N, LANES);
    }
}

// State pass on a strip: gr, ga, and the history (S' after each step).
INLINE void state_strip(enum dtype dtype, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    const float *before = head->matrix + lane * N, *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gr, ga;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = index_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        float *after = head->history + s * N * LANES;
        prefetch_columns(dtype, call, later);
        prefetch_rows(dtype, call, later);
        prefetch(dtype, call->gr, later);
        prefetch(dtype, call->ga, later);
        step(before, after, N, load(column(head, s, B) + lane), load(column(head, s, K) + lane), row(head, s, SA),
             row(head, s, V), row(head, s, GY), gsa_next + s * N, &gr, &ga);
        floats w = load(column(head, s, DECAY) + lane);
        store_as(dtype, call->gr, i, gr * w);
        if (t_0 + s < head->T - 1) store_as(dtype, call->ga, i + head->stride, ga * w);
        before = after;
    }
}

// Key pass on a strip: gk, gb, gl.
INLINE void key_strip(enum dtype dtype, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    const float *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gk, gb, gl;
    decay(saved_G(head, t_0) + lane * N, head->G, N, load(column(head, steps - 1, DECAY) + lane));
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = index_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        const float *before = s ? head->history + (s - 1) * N * LANES : head->matrix + lane * N;
        prefetch(dtype, call->gk, later);
        prefetch(dtype, call->gb, later);
        prefetch(FLOAT32, call->gl, later);
        step_with(head->G, head->G, before, N, load(column(head, s, A_NEXT) + lane), load(column(head, s, R) + lane),
                    gsa_next + s * N, row(head, s, GY), row(head, s, V), row(head, s, SA), &gk, &gb, &gl);
        floats inverse_w = load(column(head, s, INVERSE_DECAY) + lane);
        store_as(dtype, call->gk, i, gk * inverse_w);
        store_as(dtype, call->gb, i, gb * inverse_w);
        store_as(FLOAT32, call->gl, i, gl);
    }
}

// State and key passes, chunk by chunk: gr, ga, gk, gb, gl.
INLINE void state_and_key_passes(enum dtype dtype, const struct head *head, const float *state) {
    int64_t N = head->N;
    for (int64_t lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        for (int64_t n = 0; n < N; n++) store(strip + n * LANES, load(state + n * N + lane));
        store_as(dtype, head->call->ga, head->first + lane, strip_dot(strip, N, head->gsa));
    }
    for (int64_t t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        int64_t steps = chunk_steps(head, t_0);
        stage_columns(dtype, head, t_0, steps);
        stage_rows(dtype, head, t_0, steps);
        for (int64_t lane = 0; lane < N; lane += LANES) {
            state_strip(dtype, head, lane, t_0, steps);
            key_strip(dtype, head, lane, t_0, steps);
            decay(head->history + (steps - 1) * N * LANES, head->matrix + lane * N, N,
                  load(column(head, steps - 1, DECAY) + lane));
        }
    }
}

INLINE struct head make_head(const struct call *call, int64_t task, int64_t thread) {
    int64_t N = call->N;
    struct head head = {.call = call, .first = (task / call->H * call->T * call->H + task % call->H) * N,
                        .stride = call->H * N, .T = call->T, .N = N};
    head.matrix = call->scratch + thread * call->scratch_size;
    head.columns = head.matrix + N * N;
    head.rows = head.columns + CHUNK * COLUMNS * N;
    head.gsa = head.rows + CHUNK * ROWS * N;             // forward: sa of one step
    head.G = head.gsa + (call->T + 1) * N;               // this and the rest: backward only
    head.history = head.G + N * LANES;
    head.saved = head.history + CHUNK * N * LANES;
    return head;
}

INLINE void forward_heads(enum dtype dtype, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) < call->B * call->H;) {
        struct head head = make_head(call, task, thread);
        int64_t matrix = task * call->N * call->N;
        forward(dtype, &head, call->state + matrix, call->after + matrix);
    }
}

INLINE void backward_heads(enum dtype dtype, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) < call->B * call->H;) {
        struct head head = make_head(call, task, thread);
        int64_t matrix = task * call->N * call->N;
        row_pass(dtype, &head, call->after + matrix, call->gstate + matrix);
        state_and_key_passes(dtype, &head, call->state + matrix);
    }
}

static void forward_float32(struct tasks *tasks, int64_t thread) { forward_heads(FLOAT32, tasks, thread); }
static void forward_bfloat16(struct tasks *tasks, int64_t thread) { forward_heads(BFLOAT16, tasks, thread); }
static void backward_float32(struct tasks *tasks, int64_t thread) { backward_heads(FLOAT32, tasks, thread); }
static void backward_bfloat16(struct tasks *tasks, int64_t thread) { backward_heads(BFLOAT16, tasks, thread); }

ENTRY(wkv7_forward_float32, struct call) { parallel_for(forward_float32, call, threads); }
ENTRY(wkv7_forward_bfloat16, struct call) { parallel_for(forward_bfloat16, call, threads); }
ENTRY(wkv7_backward_float32, struct call) { parallel_for(backward_float32, call, threads); }
ENTRY(wkv7_backward_bfloat16, struct call) { parallel_for(backward_bfloat16, call, threads); }
