// RWKV-7's time mixing between its matrix products: gates and output, with gradients. A row is one step of one sequence; tensors
// are (rows,C), with C in H heads of N channels, and vectors (C). z are the outputs of the low-rank gates: zw = tanh(m_w w1) w2,
// za = (m_a a1) a2, zv = (m_v v1) v2.
//
// Gates:
//     decay = sigmoid(w0 + zw)      rate = sigmoid(a0 + za)      gate = sigmoid(v0 + zv)         log_w = -e^-0.5 decay
//     kk = k k_k / |k k_k| (per head)           a = -kk        b = kk rate
//     new k = k (1 + (rate - 1) k_a)            new v = v + (v_first - v) gate                   layer 0: new v = v
//
// Output, from the operator's y:
//     normal = (y - mean) / sqrt(variance + EPS) (per head)           bonus = sum over the head of r k r_k
//     out = normal weight + bias + bonus v                            gated = out g
//
// g_x denotes the gradient of x. Backward recomputes what forward does not save. A task is ROWS rows and computes partial sums of
// the vectors' gradients.

#include "../../../../kernels/native/csrc/threads.h"
#include "../../../../kernels/native/csrc/vectors.h"
#include "../../fused/csrc/partial_sums.h"
#include "rwkv7.h"

enum { ROWS = 32 };

// Arguments, in the order of ../fused_c.py. v_first, zv and v0 are null in layer 0.
struct gates_call {
    int64_t rows, H, N;
    const void *k, *v, *v_first, *zw, *za, *zv;
    const float *k_k, *k_a, *w0, *a0, *v0;
    float *inverse;                      // (rows,H): 1 / |k k_k|
    float *log_w;                        // backward: its gradient, as for the next four
    void *new_k, *new_v, *a, *b;
    const void *extra_k, *extra_v;       // the rest: backward only; extra_*: added to the gradients of new k and v, or null
    void *g_k, *g_v, *g_v_first, *g_zw, *g_za, *g_zv;
    float *partial, *g_vectors;          // (tasks,5,C) and (5,C): gradients of k_k, k_a, w0, a0, v0
};

struct output_call {
    int64_t rows, H, N;
    const void *y, *r, *k, *v, *g;
    const float *r_k, *weight, *bias;
    void *gated;                         // backward: its gradient
    void *g_y, *g_r, *g_k, *g_v, *g_g;   // the rest: backward only
    float *partial, *g_vectors;          // (tasks,3,C) and (3,C): gradients of r_k, weight, bias
};

// Up to LANES channels of a head: the index of the first in (rows,C) and in (C), and their number.
struct span { int64_t i, c, lanes; };

#define FOR_EACH_SPAN(span, first, channel, N)                                                                                    \
    for (struct span span = {first, channel, (N) < LANES ? (N) : LANES}; span.i < (first) + (N); span.i += LANES,                 \
         span.c += LANES, span.lanes = (first) + (N) - span.i < LANES ? (first) + (N) - span.i : LANES)

INLINE floats load_vector(const float *p, const struct span *span) {
    return load_partial(FLOAT32, p, span->c, span->lanes);
}

INLINE floats load_span(enum dtype dtype, const void *p, const struct span *span) {
    return load_partial(dtype, p, span->i, span->lanes);
}

INLINE void store_span(enum dtype dtype, void *p, const struct span *span, floats x) {
    store_partial(dtype, p, span->i, span->lanes, x);
}

INLINE void accumulate(float *p, const struct span *span, floats x) {
    store_partial(FLOAT32, p, span->c, span->lanes, load_partial(FLOAT32, p, span->c, span->lanes) + x);
}

// q = k k_k; factor = 1 + (rate - 1) k_a
struct gates { floats k, q, decay, rate, factor; };

INLINE struct gates load_gates(enum dtype dtype, const struct gates_call *call, const struct span *span) {
    struct gates gates = {.k = load_span(dtype, call->k, span)};
    gates.q = gates.k * load_vector(call->k_k, span);
    gates.decay = sigmoid(load_span(dtype, call->zw, span) + load_vector(call->w0, span));
    gates.rate = sigmoid(load_span(dtype, call->za, span) + load_vector(call->a0, span));
    gates.factor = fma(gates.rate - 1.0f, load_vector(call->k_a, span), splat(1.0f));
    return gates;
}

INLINE floats load_gate(enum dtype dtype, const struct gates_call *call, const struct span *span) {
    return sigmoid(load_span(dtype, call->zv, span) + load_vector(call->v0, span));
}

INLINE void gates_forward(enum dtype dtype, const struct gates_call *call, int64_t row, int64_t head) {
    int64_t N = call->N, c = head * N, i = row * call->H * N + c;
    floats squares = splat(0.0f);
    FOR_EACH_SPAN(span, i, c, N) {
        floats q = load_span(dtype, call->k, &span) * load_vector(call->k_k, &span);
        squares = fma(q, q, squares);
    }
    float norm = __builtin_sqrtf(hsum(squares));
    float inverse = 1.0f / (norm < LEAST_NORM ? LEAST_NORM : norm);
    call->inverse[row * call->H + head] = inverse;
    FOR_EACH_SPAN(span, i, c, N) {
        struct gates gates = load_gates(dtype, call, &span);
        floats kk = gates.q * inverse, v = load_span(dtype, call->v, &span);
        store_span(FLOAT32, call->log_w, &span, FASTEST_LOG_W * gates.decay);
        store_span(dtype, call->new_k, &span, gates.k * gates.factor);
        store_span(dtype, call->a, &span, -kk);
        store_span(dtype, call->b, &span, kk * gates.rate);
        if (call->v_first)
            store_span(dtype, call->new_v, &span,
                       fma(load_span(dtype, call->v_first, &span) - v, load_gate(dtype, call, &span), v));
    }
}

// The gradient of new k or new v, plus the extra gradient unless that is null.
INLINE floats load_sum(enum dtype dtype, const void *p, const void *extra, const struct span *span) {
    return extra ? load_span(dtype, p, span) + load_span(dtype, extra, span) : load_span(dtype, p, span);
}

INLINE void gates_backward(enum dtype dtype, const struct gates_call *call, int64_t row, int64_t head, float *g_vectors) {
    int64_t N = call->N, C = call->H * N, c = head * N, i = row * C + c;
    float inverse = call->inverse[row * call->H + head];
    floats dot = splat(0.0f);
    FOR_EACH_SPAN(span, i, c, N) {
        floats kk = load_span(dtype, call->k, &span) * load_vector(call->k_k, &span) * inverse;
        floats rate = sigmoid(load_span(dtype, call->za, &span) + load_vector(call->a0, &span));
        floats g_kk = fma(load_span(dtype, call->b, &span), rate, -load_span(dtype, call->a, &span));
        dot = fma(g_kk, kk, dot);
    }
    float g_kk_dot_kk = hsum(dot);
    FOR_EACH_SPAN(span, i, c, N) {
        struct gates gates = load_gates(dtype, call, &span);
        floats kk = gates.q * inverse, g_b = load_span(dtype, call->b, &span);
        floats g_kk = fma(g_b, gates.rate, -load_span(dtype, call->a, &span));
        floats g_q = fnmadd(kk, splat(g_kk_dot_kk), g_kk) * inverse;
        floats g_new_k = load_sum(dtype, call->new_k, call->extra_k, &span), g_factor = gates.k * g_new_k;
        floats g_rate = fma(g_b, kk, g_factor * load_vector(call->k_a, &span));
        floats g_za = g_rate * gates.rate * (1.0f - gates.rate);
        floats g_zw = load_span(FLOAT32, call->log_w, &span) * FASTEST_LOG_W * gates.decay * (1.0f - gates.decay);
        store_span(dtype, call->g_k, &span, fma(g_new_k, gates.factor, g_q * load_vector(call->k_k, &span)));
        store_span(dtype, call->g_za, &span, g_za);
        store_span(dtype, call->g_zw, &span, g_zw);
        accumulate(g_vectors, &span, g_q * gates.k);
        accumulate(g_vectors + C, &span, g_factor * (gates.rate - 1.0f));
        accumulate(g_vectors + 2 * C, &span, g_zw);
        accumulate(g_vectors + 3 * C, &span, g_za);
        floats g_new_v = load_sum(dtype, call->new_v, call->extra_v, &span);
        if (!call->v_first) {
            store_span(dtype, call->g_v, &span, g_new_v);
            continue;
        }
        floats gate = load_gate(dtype, call, &span), g_first = g_new_v * gate;
        floats delta = load_span(dtype, call->v_first, &span) - load_span(dtype, call->v, &span);
        floats g_zv = g_first * delta * (1.0f - gate);
        store_span(dtype, call->g_v_first, &span, g_first);
        store_span(dtype, call->g_v, &span, g_new_v - g_first);
        store_span(dtype, call->g_zv, &span, g_zv);
        accumulate(g_vectors + 4 * C, &span, g_zv);
    }
}

// A head's mean of y, 1 / sqrt(variance + EPS), and the bonus.
struct head { float mean, inverse, bonus; };

INLINE struct head load_head(enum dtype dtype, const struct output_call *call, int64_t i, int64_t c) {
    floats sum = splat(0.0f), squares = splat(0.0f), bonus = splat(0.0f);
    FOR_EACH_SPAN(span, i, c, call->N) {
        sum += load_span(dtype, call->y, &span);
        bonus = fma(load_span(dtype, call->r, &span) * load_span(dtype, call->k, &span), load_vector(call->r_k, &span), bonus);
    }
    float mean = hsum(sum) / (float)call->N;
    FOR_EACH_SPAN(span, i, c, call->N) {
        floats deviation = load_span(dtype, call->y, &span) - mean;
        deviation = load_partial(FLOAT32, &deviation, 0, span.lanes);    // sets the lanes beyond the head to zero
        squares = fma(deviation, deviation, squares);
    }
    return (struct head){mean, 1.0f / __builtin_sqrtf(hsum(squares) / (float)call->N + EPS), hsum(bonus)};
}

INLINE void output_forward(enum dtype dtype, const struct output_call *call, int64_t row, int64_t h) {
    int64_t c = h * call->N, i = row * call->H * call->N + c;
    struct head head = load_head(dtype, call, i, c);
    FOR_EACH_SPAN(span, i, c, call->N) {
        floats normal = (load_span(dtype, call->y, &span) - head.mean) * head.inverse;
        floats out = fma(normal, load_vector(call->weight, &span), load_vector(call->bias, &span));
        out = fma(load_span(dtype, call->v, &span), splat(head.bonus), out);
        store_span(dtype, call->gated, &span, out * load_span(dtype, call->g, &span));
    }
}

INLINE void output_backward(enum dtype dtype, const struct output_call *call, int64_t row, int64_t h, float *g_vectors) {
    int64_t N = call->N, C = call->H * N, c = h * N, i = row * C + c;
    struct head head = load_head(dtype, call, i, c);
    floats sum_bonus = splat(0.0f), sum_normal = splat(0.0f), dot_normal = splat(0.0f);      // sums of gradients over the head
    FOR_EACH_SPAN(span, i, c, N) {
        floats normal = (load_span(dtype, call->y, &span) - head.mean) * head.inverse;
        floats g_out = load_span(dtype, call->gated, &span) * load_span(dtype, call->g, &span);
        floats g_normal = g_out * load_vector(call->weight, &span);
        sum_bonus = fma(g_out, load_span(dtype, call->v, &span), sum_bonus);
        sum_normal += g_normal;
        dot_normal = fma(g_normal, normal, dot_normal);
    }
    float g_bonus = hsum(sum_bonus), mean = hsum(sum_normal) / (float)N, mean_dot = hsum(dot_normal) / (float)N;
    FOR_EACH_SPAN(span, i, c, N) {
        floats r = load_span(dtype, call->r, &span), k = load_span(dtype, call->k, &span), v = load_span(dtype, call->v, &span);
        floats g_gated = load_span(dtype, call->gated, &span), g_out = g_gated * load_span(dtype, call->g, &span);
        floats normal = (load_span(dtype, call->y, &span) - head.mean) * head.inverse, weight = load_vector(call->weight, &span);
        floats out = fma(normal, weight, load_vector(call->bias, &span)), r_k = load_vector(call->r_k, &span);
        store_span(dtype, call->g_g, &span, g_gated * fma(v, splat(head.bonus), out));
        store_span(dtype, call->g_v, &span, g_out * head.bonus);
        store_span(dtype, call->g_r, &span, k * r_k * g_bonus);
        store_span(dtype, call->g_k, &span, r * r_k * g_bonus);
        store_span(dtype, call->g_y, &span, head.inverse * fnmadd(normal, splat(mean_dot), fma(g_out, weight, splat(-mean))));
        accumulate(g_vectors, &span, r * k * g_bonus);
        accumulate(g_vectors + C, &span, g_out * normal);
        accumulate(g_vectors + 2 * C, &span, g_out);
    }
}

#define BOTH(name, dtype)                                                                                                         \
    FOR_EACH_HEAD(gates_forward_##name, gates_call, 0, gates_forward(dtype, call, row, h))                                        \
    FOR_EACH_HEAD(gates_backward_##name, gates_call, 5, gates_backward(dtype, call, row, h, g_vectors))                           \
    FOR_EACH_HEAD(output_forward_##name, output_call, 0, output_forward(dtype, call, row, h))                                     \
    FOR_EACH_HEAD(output_backward_##name, output_call, 3, output_backward(dtype, call, row, h, g_vectors))

// Defines the exported function rwkv7_`name`, which runs `work` for each head of each row.
#define FOR_EACH_HEAD(name, call_type, n_vectors, work)                                                                           \
    static void name##_tasks(struct tasks *tasks, int64_t thread) {                                                               \
        (void)thread;                                                                                                             \
        const struct call_type *call = tasks->call;                                                                               \
        int64_t size = n_vectors * call->H * call->N;                                                                             \
        for (int64_t task; (task = next_task(tasks)) * ROWS < call->rows;) {                                                      \
            int64_t first = task * ROWS, end = first + ROWS < call->rows ? first + ROWS : call->rows;                             \
            float *g_vectors = n_vectors ? call->partial + task * size : 0;                                                       \
            if (n_vectors) memset(g_vectors, 0, (size_t)size * sizeof(float));                                                    \
            for (int64_t row = first; row < end; row++)                                                                           \
                for (int64_t h = 0; h < call->H; h++) work;                                                                       \
        }                                                                                                                         \
    }                                                                                                                             \
    ENTRY(rwkv7_##name, struct call_type) {                                                                                       \
        int64_t tasks = (call->rows + ROWS - 1) / ROWS, size = n_vectors * call->H * call->N;                                     \
        parallel_for(name##_tasks, call, threads);                                                                                \
        if (n_vectors) sum_partials(call->g_vectors, call->partial, tasks, size, size);                                           \
    }

BOTH(float32, FLOAT32)
BOTH(bfloat16, BFLOAT16)
