// WKV-7 and its gradients: the passes of taichi_v3 with fused multiply-adds.
//
// Per row and head a step is, with S an N x N matrix, its rows i of the value and its columns j of the key, and w = exp(log_w),
//
//     S <- S (diag(w) + a b^T) + v k^T        y = S r         sa_t = S_{t-1} a_t
//
// Within a chunk of steps W_t is the product of w from the chunk's first step to t, S = S' diag(W_t) and G = dL/dS = G' /
// diag(W_t). With b' = b / W, k' = k / W, r' = r W and a'_t = a_t W_{t-1} no step has a decay, and each of four passes over a
// matrix adds two outer products to it, and multiplies it by two vectors:
//
//     forward   lanes i   S' += sa_t b'_t + v_t k'_t              y_t = S' r'_t              sa_{t+1} = S' a'_{t+1}
//     rows      lanes i   G' += gsa_{t+1} a'_{t+1} + gy_t r'_t    gv_t = G' k'_t             gsa_t = G' b'_t
//     states    lanes j   S' as in forward                        gr_t = W_t (S'^T gy_t)     ga_{t+1} = W_t (S'^T gsa_{t+1})
//     keys      lanes j   G' as in rows                           gk_t = (G'^T v_t) / W_t    gb_t = (G'^T sa_t) / W_t
//
// Backward goes twice through the sequences: from the last chunk to the first for rows, which keep G after each chunk; then
// forwards, a chunk at a time, for its states and, back from its end, for its keys. States keep S' after each step of the chunk,
// so that keys have both matrices of one moment for gl, the gradient of log_w:
//
//     gl_t = sum_i (S_{t-1} diag(w_t))_ij (G_t)_ij = sum_i (S'_{t-1})_ij (G'_t)_ij
//
// The running sum gl_{t+1} = gl_t - (r gr)_t - (a ga)_{t+1} + (b gb)_t + (k gk)_t costs less. But a small gl beside a large one is
// then the difference of two large sums, and where gl is 0 it is not.
//
// A matrix is cut into strips, which are as wide as a vector: LANES rows of it, with lanes along i, or LANES columns, along j. A
// strip is its vectors, N of them, one after the other, and stays in the first cache for a chunk of steps.
//
// Sequences are (B,T,H,N), states (B,H,N,N). A head (b,h) is a task.

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    CHUNK = 16,                          // steps: 1/W is at most e^16 where log_w >= -1
};

// The arguments of a call, as c_v0.py lists them.
struct call {
    int64_t B, T, H, N, scratch_size;    // scratch_size: numbers of scratch for each thread
    float *scratch;
    const void *r, *log_w, *k, *v, *a, *b;
    const float *state;
    float *sa;                           // forward writes it, unless it is null; backward reads it
    void *y;                             // in backward gy
    float *after;                        // the state after the last step; in backward its gradient
    void *gr, *gl, *gk, *gv, *ga, *gb;   // of backward alone, as gstate
    float *gstate;
};

// A head at work. Its step t begins at number `first + t * stride` of a sequence. matrix: of forward, rows or states; gsa: of T + 1
// steps, of which the last is 0; G: a strip of keys; history: a strip of S' after each step of a chunk; kept: G after each chunk.
struct head {
    const struct call *call;
    int64_t first, stride, T, N;
    float *matrix, *columns, *rows, *gsa, *G, *history, *kept;
};

// What a step needs of the key's axis and of the value's, N numbers of each: b', k', r', the next step's a' (0 after the last), W
// and 1/W; sa, v and gy
enum { B, K, R, A_NEXT, DECAY, OVER_DECAY, COLUMNS };
enum { SA, V, GY, ROWS };

INLINE float *column(const struct head *head, int64_t s, int name) { return head->columns + (s * COLUMNS + name) * head->N; }
INLINE float *row(const struct head *head, int64_t s, int name) { return head->rows + (s * ROWS + name) * head->N; }
INLINE int64_t number_of(const struct head *head, int64_t t) { return head->first + t * head->stride; }
INLINE int64_t steps_from(const struct head *head, int64_t t_0) { return head->T - t_0 < CHUNK ? head->T - t_0 : CHUNK; }

INLINE void stage_columns(enum form form, const struct head *head, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    for (int64_t s = 0; s < steps; s++) {
        int64_t is_last = t_0 + s == head->T - 1, i = number_of(head, t_0 + s), next = is_last ? i : i + head->stride;
        floats more = same(is_last ? 0.0f : 1.0f);
        for (int64_t j = 0; j < head->N; j += LANES) {
            floats w = exp_of(read(FLOAT32, call->log_w, i + j));
            if (s) w = w * at(column(head, s - 1, DECAY) + j);
            floats over_w = 1.0f / w;
            put(column(head, s, B) + j, read(form, call->b, i + j) * over_w);
            put(column(head, s, K) + j, read(form, call->k, i + j) * over_w);
            put(column(head, s, R) + j, read(form, call->r, i + j) * w);
            put(column(head, s, A_NEXT) + j, read(form, call->a, next + j) * w * more);
            put(column(head, s, DECAY) + j, w);
            put(column(head, s, OVER_DECAY) + j, over_w);
        }
    }
}

INLINE void stage_rows(enum form form, const struct head *head, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = number_of(head, t_0 + s);
        for (int64_t j = 0; j < head->N; j += LANES) {
            put(row(head, s, SA) + j, at(call->sa + i + j));
            put(row(head, s, V) + j, read(form, call->v, i + j));
            put(row(head, s, GY) + j, read(form, call->y, i + j));
        }
    }
}

// Puts `from`, a strip, plus p x^T + q y^T into `to`, and returns its products with u and v. Two sums for each, since one that
// waits for its last addition at every vector would be the slowest part.
INLINE void pass(const float *from, float *to, int64_t N, floats p, floats q, const float *x, const float *y, const float *u,
                 const float *v, floats *of_u, floats *of_v) {
    floats sums_u[2] = {same(0.0f), same(0.0f)}, sums_v[2] = {same(0.0f), same(0.0f)};
    for (int64_t n = 0; n < N; n += 2)
        UNROLLED for (int o = 0; o < 2; o++) {
            floats new = fused(q, same(y[n + o]), fused(p, same(x[n + o]), at(from + (n + o) * LANES)));
            put(to + (n + o) * LANES, new);
            sums_u[o] = fused(new, same(u[n + o]), sums_u[o]);
            sums_v[o] = fused(new, same(v[n + o]), sums_v[o]);
        }
    *of_u = sums_u[0] + sums_u[1], *of_v = sums_v[0] + sums_v[1];
}

// The same, and of each lane the sum of products with another strip.
INLINE void pass_beside(const float *from, float *to, const float *other, int64_t N, floats p, floats q, const float *x,
                        const float *y, const float *u, const float *v, floats *of_u, floats *of_v, floats *of_other) {
    floats sums_u[2] = {same(0.0f), same(0.0f)}, sums_v[2] = {same(0.0f), same(0.0f)};
    floats sums_other[2] = {same(0.0f), same(0.0f)};
    for (int64_t n = 0; n < N; n += 2)
        UNROLLED for (int o = 0; o < 2; o++) {
            floats of_o = at(other + (n + o) * LANES);
            floats new = fused(q, same(y[n + o]), fused(p, same(x[n + o]), at(from + (n + o) * LANES)));
            put(to + (n + o) * LANES, new);
            sums_u[o] = fused(new, same(u[n + o]), sums_u[o]);
            sums_v[o] = fused(new, same(v[n + o]), sums_v[o]);
            sums_other[o] = fused(new, of_o, sums_other[o]);
        }
    *of_u = sums_u[0] + sums_u[1], *of_v = sums_v[0] + sums_v[1], *of_other = sums_other[0] + sums_other[1];
}

INLINE floats product(const float *strip, int64_t N, const float *u) {
    floats sum = same(0.0f);
    for (int64_t n = 0; n < N; n++) sum = fused(at(strip + n * LANES), same(u[n]), sum);
    return sum;
}

// Of a strip with lanes along i, each column times its decay.
INLINE void decay_columns(float *strip, int64_t N, const float *w) {
    for (int64_t n = 0; n < N; n++) put(strip + n * LANES, at(strip + n * LANES) * same(w[n]));
}

// The same of one with lanes along j, from one place to another.
INLINE void decay(const float *from, float *to, int64_t N, floats w) {
    for (int64_t n = 0; n < N; n++) put(to + n * LANES, at(from + n * LANES) * w);
}

// H heads apart, the CPU does not guess what a chunk later is read or written.
INLINE void fetch_columns(enum form form, const struct call *call, int64_t i) {
    fetch(FLOAT32, call->log_w, i);
    fetch(form, call->r, i);
    fetch(form, call->k, i);
    fetch(form, call->a, i);
    fetch(form, call->b, i);
}

INLINE void fetch_rows(enum form form, const struct call *call, int64_t i) {
    fetch(FLOAT32, call->sa, i);
    fetch(form, call->v, i);
    fetch(form, call->y, i);
}

INLINE void forward_strip(enum form form, const struct head *head, int64_t lane, int64_t t_0, int64_t steps, float *sa) {
    const struct call *call = head->call;
    float *strip = head->matrix + lane * head->N;
    floats sa_t = at(sa + lane), y;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        fetch_columns(form, call, later);
        fetch(form, call->v, later);
        fetch(form, call->y, later);
        if (call->sa) {
            fetch(FLOAT32, call->sa, later);
            put(call->sa + i, sa_t);
        }
        pass(strip, strip, head->N, sa_t, read(form, call->v, i), column(head, s, B), column(head, s, K),
             column(head, s, R), column(head, s, A_NEXT), &y, &sa_t);
        write(form, call->y, i, y);
    }
    put(sa + lane, sa_t);
    decay_columns(strip, head->N, column(head, steps - 1, DECAY));
}

INLINE void forward(enum form form, const struct head *head, const float *state, float *after) {
    int64_t N = head->N;
    float *a = head->columns, *sa = head->gsa;           // of one step
    for (int64_t j = 0; j < N; j += LANES) put(a + j, read(form, head->call->a, head->first + j));
    for (int64_t lane = 0; lane < N; lane += LANES) {
        turn(head->matrix + lane * N, LANES, state + lane * N, N, LANES, N);
        put(sa + lane, product(head->matrix + lane * N, N, a));
    }
    for (int64_t t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        int64_t steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        for (int64_t lane = 0; lane < N; lane += LANES) forward_strip(form, head, lane, t_0, steps, sa);
    }
    for (int64_t lane = 0; lane < N; lane += LANES) turn(after + lane * N, N, head->matrix + lane * N, LANES, N, LANES);
}

INLINE void rows_strip(enum form form, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    float *strip = head->matrix + lane * N, *gsa = head->gsa + t_0 * N + lane;
    floats gsa_t = at(gsa + steps * N), gv;
    decay_columns(strip, N, column(head, steps - 1, DECAY));
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = number_of(head, t_0 + s) + lane, later = i - CHUNK * head->stride;
        fetch_columns(form, call, later);
        fetch(form, call->y, later);
        fetch(form, call->gv, later);
        pass(strip, strip, N, gsa_t, read(form, call->y, i), column(head, s, A_NEXT), column(head, s, R), column(head, s, K),
             column(head, s, B), &gv, &gsa_t);
        write(form, call->gv, i, gv);
        put(gsa + s * N, gsa_t);
    }
}

// G after the chunk that begins with step t_0, in strips of keys.
INLINE float *kept_after(const struct head *head, int64_t t_0) { return head->kept + t_0 / CHUNK * head->N * head->N; }

// From the strips of rows to those of keys.
INLINE void keep(const struct head *head, float *kept) {
    int64_t N = head->N;
    for (int64_t j = 0; j < N; j += LANES)
        for (int64_t i = 0; i < N; i += LANES)
            turn(kept + j * N + i * LANES, LANES, head->matrix + i * N + j * LANES, LANES, LANES, LANES);
}

// gv, and the gradient of the state before the first step: G' there, and gsa a^T of that step.
INLINE void rows(enum form form, const struct head *head, const float *gafter, float *gstate) {
    int64_t N = head->N;
    for (int64_t lane = 0; lane < N; lane += LANES) {
        turn(head->matrix + lane * N, LANES, gafter + lane * N, N, LANES, N);
        put(head->gsa + head->T * N + lane, same(0.0f));
    }
    for (int64_t t_0 = (head->T - 1) / CHUNK * CHUNK; t_0 >= 0; t_0 -= CHUNK) {
        int64_t steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        keep(head, kept_after(head, t_0));
        for (int64_t lane = 0; lane < N; lane += LANES) rows_strip(form, head, lane, t_0, steps);
    }
    float *a = head->columns;                            // of the first step
    for (int64_t j = 0; j < N; j += LANES) put(a + j, read(form, head->call->a, head->first + j));
    for (int64_t lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        floats gsa = at(head->gsa + lane);
        for (int64_t n = 0; n < N; n++) put(strip + n * LANES, fused(gsa, same(a[n]), at(strip + n * LANES)));
        turn(gstate + lane * N, N, strip, LANES, N, LANES);
    }
}

// Fills the history, in which S' before the chunk's first step is missing.
INLINE void states_strip(enum form form, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    const float *before = head->matrix + lane * N, *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gr, ga;
    for (int64_t s = 0; s < steps; s++) {
        int64_t i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        float *after = head->history + s * N * LANES;
        fetch_columns(form, call, later);
        fetch_rows(form, call, later);
        fetch(form, call->gr, later);
        fetch(form, call->ga, later);
        pass(before, after, N, at(column(head, s, B) + lane), at(column(head, s, K) + lane), row(head, s, SA), row(head, s, V),
             row(head, s, GY), gsa_next + s * N, &gr, &ga);
        floats w = at(column(head, s, DECAY) + lane);
        write(form, call->gr, i, gr * w);
        if (t_0 + s < head->T - 1) write(form, call->ga, i + head->stride, ga * w);
        before = after;
    }
}

INLINE void keys_strip(enum form form, const struct head *head, int64_t lane, int64_t t_0, int64_t steps) {
    const struct call *call = head->call;
    int64_t N = head->N;
    const float *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gk, gb, gl;
    decay(kept_after(head, t_0) + lane * N, head->G, N, at(column(head, steps - 1, DECAY) + lane));
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        const float *before = s ? head->history + (s - 1) * N * LANES : head->matrix + lane * N;
        fetch(form, call->gk, later);
        fetch(form, call->gb, later);
        fetch(FLOAT32, call->gl, later);
        pass_beside(head->G, head->G, before, N, at(column(head, s, A_NEXT) + lane), at(column(head, s, R) + lane),
                    gsa_next + s * N, row(head, s, GY), row(head, s, V), row(head, s, SA), &gk, &gb, &gl);
        floats over_w = at(column(head, s, OVER_DECAY) + lane);
        write(form, call->gk, i, gk * over_w);
        write(form, call->gb, i, gb * over_w);
        write(FLOAT32, call->gl, i, gl);
    }
}

// gr, ga, gk, gb and gl
INLINE void states_and_keys(enum form form, const struct head *head, const float *state) {
    int64_t N = head->N;
    for (int64_t lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        for (int64_t n = 0; n < N; n++) put(strip + n * LANES, at(state + n * N + lane));
        write(form, head->call->ga, head->first + lane, product(strip, N, head->gsa));
    }
    for (int64_t t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        int64_t steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        stage_rows(form, head, t_0, steps);
        for (int64_t lane = 0; lane < N; lane += LANES) {
            states_strip(form, head, lane, t_0, steps);
            keys_strip(form, head, lane, t_0, steps);
            decay(head->history + (steps - 1) * N * LANES, head->matrix + lane * N, N, at(column(head, steps - 1, DECAY) + lane));
        }
    }
}

INLINE struct head head_of(const struct call *call, int64_t number, int64_t thread) {
    int64_t N = call->N;
    struct head head = {.call = call, .first = (number / call->H * call->T * call->H + number % call->H) * N,
                        .stride = call->H * N, .T = call->T, .N = N};
    head.matrix = call->scratch + thread * call->scratch_size;
    head.columns = head.matrix + N * N;
    head.rows = head.columns + CHUNK * COLUMNS * N;
    head.gsa = head.rows + CHUNK * ROWS * N;             // forward has its sa here
    head.G = head.gsa + (call->T + 1) * N;               // in backward, as what follows
    head.history = head.G + N * LANES;
    head.kept = head.history + CHUNK * N * LANES;
    return head;
}

INLINE void forward_heads(enum form form, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    for (int64_t number; (number = next_task(tasks)) < call->B * call->H;) {
        struct head head = head_of(call, number, thread);
        int64_t matrix = number * call->N * call->N;
        forward(form, &head, call->state + matrix, call->after + matrix);
    }
}

INLINE void backward_heads(enum form form, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    for (int64_t number; (number = next_task(tasks)) < call->B * call->H;) {
        struct head head = head_of(call, number, thread);
        int64_t matrix = number * call->N * call->N;
        rows(form, &head, call->after + matrix, call->gstate + matrix);
        states_and_keys(form, &head, call->state + matrix);
    }
}

static void forward_float32(struct tasks *tasks, int64_t thread) { forward_heads(FLOAT32, tasks, thread); }
static void forward_bfloat16(struct tasks *tasks, int64_t thread) { forward_heads(BFLOAT16, tasks, thread); }
static void backward_float32(struct tasks *tasks, int64_t thread) { backward_heads(FLOAT32, tasks, thread); }
static void backward_bfloat16(struct tasks *tasks, int64_t thread) { backward_heads(BFLOAT16, tasks, thread); }

ENTRY(wkv7_forward_float32)(const struct call *call, int64_t threads) { share(forward_float32, call, threads); }
ENTRY(wkv7_forward_bfloat16)(const struct call *call, int64_t threads) { share(forward_bfloat16, call, threads); }
ENTRY(wkv7_backward_float32)(const struct call *call, int64_t threads) { share(backward_float32, call, threads); }
ENTRY(wkv7_backward_bfloat16)(const struct call *call, int64_t threads) { share(backward_bfloat16, call, threads); }
