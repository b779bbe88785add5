// What stands between the products of RWKV-7's time mixing, and its gradients. A row is one step of one text, (rows,C) in H heads
// of N channels; vectors are (C). z are the low-rank gates' products: zw = tanh(m_w w1) w2, za = (m_a a1) a2, zv = (m_v v1) v2.
//
// The gates:
//     decay = sigmoid(w0 + zw)      rate = sigmoid(a0 + za)      gate = sigmoid(v0 + zv)         log_w = -e^-0.5 decay
//     kk = k k_k / |k k_k| (of the head)        a = -kk        b = kk rate
//     new k = k (1 + (rate - 1) k_a)            new v = v + (v_first - v) gate                   in layer 0 new v = v
//
// The output, from y of the operator:
//     normal = (y - mean) / sqrt(variance + EPS) (of the head)        share = sum over the head of r k r_k
//     read = normal weight + bias + share v                           gated = read g
//
// g_ is the gradient of what stands behind it. Backward computes again what forward did not keep. ROWS rows are a task, which adds
// up its own gradients of the vectors.

#include "../../../kernels/native/csrc/threads.h"
#include "../../../kernels/native/csrc/vectors.h"
#include "totals.h"

enum { ROWS = 32 };

static const float FASTEST_LOG_W = -0.6065306597126334f, LEAST_NORM = 1e-12f, EPS = 64e-5f;

// The arguments of a call, as fused_c.py lists them. All of v_first, zv and v0 are null in layer 0.
struct gates_call {
    int64_t rows, H, N;
    const void *k, *v, *v_first, *zw, *za, *zv;
    const float *k_k, *k_a, *w0, *a0, *v0;
    float *inverse;                      // (rows,H): 1 / |k k_k|
    float *log_w;                        // in backward its gradient, as those of the next line
    void *new_k, *new_v, *a, *b;
    const void *more_k, *more_v;         // of backward alone, as all below: what is added to the gradients of new k and v, or null
    void *g_k, *g_v, *g_v_first, *g_zw, *g_za, *g_zv;
    float *of_tasks, *g_vectors;         // (tasks,5,C), (5,C): of k_k, k_a, w0, a0, v0
};

struct output_call {
    int64_t rows, H, N;
    const void *y, *r, *k, *v, *g;
    const float *r_k, *weight, *bias;
    void *gated;                         // in backward its gradient
    void *g_y, *g_r, *g_k, *g_v, *g_g;   // of backward alone, as below
    float *of_tasks, *g_vectors;         // (tasks,3,C), (3,C): of r_k, weight, bias
};

// Part of a head: its first number in (rows,C) and in (C), and how many of its lanes there are.
struct part { int64_t i, c, lanes; };

#define EACH_PART(part, first, channel, N)                                                                                        \
    for (struct part part = {first, channel, (N) < LANES ? (N) : LANES}; part.i < (first) + (N); part.i += LANES,                 \
         part.c += LANES, part.lanes = (first) + (N) - part.i < LANES ? (first) + (N) - part.i : LANES)

INLINE floats vector(const float *p, const struct part *part) { return read_some(FLOAT32, p, part->c, part->lanes); }
INLINE floats get(enum form form, const void *p, const struct part *part) { return read_some(form, p, part->i, part->lanes); }
INLINE void set(enum form form, void *p, const struct part *part, floats x) { write_some(form, p, part->i, part->lanes, x); }

INLINE void add(float *p, const struct part *part, floats x) {
    write_some(FLOAT32, p, part->c, part->lanes, read_some(FLOAT32, p, part->c, part->lanes) + x);
}

// The gates of a part.
struct gates { floats k, q, decay, rate, factor; };

INLINE struct gates gates_of(enum form form, const struct gates_call *call, const struct part *part) {
    struct gates gates = {.k = get(form, call->k, part)};
    gates.q = gates.k * vector(call->k_k, part);
    gates.decay = sigmoid(get(form, call->zw, part) + vector(call->w0, part));
    gates.rate = sigmoid(get(form, call->za, part) + vector(call->a0, part));
    gates.factor = fused(gates.rate - 1.0f, vector(call->k_a, part), same(1.0f));
    return gates;
}

INLINE floats gate_of(enum form form, const struct gates_call *call, const struct part *part) {
    return sigmoid(get(form, call->zv, part) + vector(call->v0, part));
}

INLINE void gates_forward(enum form form, const struct gates_call *call, int64_t row, int64_t head) {
    int64_t N = call->N, c = head * N, i = row * call->H * N + c;
    floats squares = same(0.0f);
    EACH_PART(part, i, c, N) {
        floats q = get(form, call->k, &part) * vector(call->k_k, &part);
        squares = fused(q, q, squares);
    }
    float norm = __builtin_sqrtf(sum_of(squares));
    float inverse = 1.0f / (norm < LEAST_NORM ? LEAST_NORM : norm);
    call->inverse[row * call->H + head] = inverse;
    EACH_PART(part, i, c, N) {
        struct gates gates = gates_of(form, call, &part);
        floats kk = gates.q * inverse, v = get(form, call->v, &part);
        set(FLOAT32, call->log_w, &part, FASTEST_LOG_W * gates.decay);
        set(form, call->new_k, &part, gates.k * gates.factor);
        set(form, call->a, &part, -kk);
        set(form, call->b, &part, kk * gates.rate);
        if (call->v_first)
            set(form, call->new_v, &part, fused(get(form, call->v_first, &part) - v, gate_of(form, call, &part), v));
    }
}

// Of the gradient of new k or v, in two parts where the second is given.
INLINE floats sum_at(enum form form, const void *p, const void *more, const struct part *part) {
    return more ? get(form, p, part) + get(form, more, part) : get(form, p, part);
}

INLINE void gates_backward(enum form form, const struct gates_call *call, int64_t row, int64_t head, float *g_vectors) {
    int64_t N = call->N, C = call->H * N, c = head * N, i = row * C + c;
    float inverse = call->inverse[row * call->H + head];
    floats products = same(0.0f);
    EACH_PART(part, i, c, N) {
        floats kk = get(form, call->k, &part) * vector(call->k_k, &part) * inverse;
        floats rate = sigmoid(get(form, call->za, &part) + vector(call->a0, &part));
        floats g_kk = fused(get(form, call->b, &part), rate, -get(form, call->a, &part));
        products = fused(g_kk, kk, products);
    }
    float along = sum_of(products);
    EACH_PART(part, i, c, N) {
        struct gates gates = gates_of(form, call, &part);
        floats kk = gates.q * inverse, g_b = get(form, call->b, &part);
        floats g_kk = fused(g_b, gates.rate, -get(form, call->a, &part)), g_q = less(kk, same(along), g_kk) * inverse;
        floats g_new_k = sum_at(form, call->new_k, call->more_k, &part), k_g = gates.k * g_new_k;
        floats g_rate = fused(g_b, kk, k_g * vector(call->k_a, &part));
        floats g_za = g_rate * gates.rate * (1.0f - gates.rate);
        floats g_zw = get(FLOAT32, call->log_w, &part) * FASTEST_LOG_W * gates.decay * (1.0f - gates.decay);
        set(form, call->g_k, &part, fused(g_new_k, gates.factor, g_q * vector(call->k_k, &part)));
        set(form, call->g_za, &part, g_za);
        set(form, call->g_zw, &part, g_zw);
        add(g_vectors, &part, g_q * gates.k);
        add(g_vectors + C, &part, k_g * (gates.rate - 1.0f));
        add(g_vectors + 2 * C, &part, g_zw);
        add(g_vectors + 3 * C, &part, g_za);
        floats g_new_v = sum_at(form, call->new_v, call->more_v, &part);
        if (!call->v_first) {
            set(form, call->g_v, &part, g_new_v);
            continue;
        }
        floats gate = gate_of(form, call, &part), g_first = g_new_v * gate;
        floats change = get(form, call->v_first, &part) - get(form, call->v, &part);
        floats g_zv = g_first * change * (1.0f - gate);
        set(form, call->g_v_first, &part, g_first);
        set(form, call->g_v, &part, g_new_v - g_first);
        set(form, call->g_zv, &part, g_zv);
        add(g_vectors + 4 * C, &part, g_zv);
    }
}

// Of a head of y: its mean and 1 / sqrt(variance + EPS), and the sum of r k r_k.
struct head { float mean, inverse, share; };

INLINE struct head head_of(enum form form, const struct output_call *call, int64_t i, int64_t c) {
    floats sum = same(0.0f), squares = same(0.0f), share = same(0.0f);
    EACH_PART(part, i, c, call->N) {
        sum += get(form, call->y, &part);
        share = fused(get(form, call->r, &part) * get(form, call->k, &part), vector(call->r_k, &part), share);
    }
    float mean = sum_of(sum) / (float)call->N;
    EACH_PART(part, i, c, call->N) {
        floats there = get(form, call->y, &part) - mean;
        there = read_some(FLOAT32, &there, 0, part.lanes);           // nothing in the lanes beyond the head
        squares = fused(there, there, squares);
    }
    return (struct head){mean, 1.0f / __builtin_sqrtf(sum_of(squares) / (float)call->N + EPS), sum_of(share)};
}

INLINE void output_forward(enum form form, const struct output_call *call, int64_t row, int64_t h) {
    int64_t c = h * call->N, i = row * call->H * call->N + c;
    struct head head = head_of(form, call, i, c);
    EACH_PART(part, i, c, call->N) {
        floats normal = (get(form, call->y, &part) - head.mean) * head.inverse;
        floats read = fused(normal, vector(call->weight, &part), vector(call->bias, &part));
        read = fused(get(form, call->v, &part), same(head.share), read);
        set(form, call->gated, &part, read * get(form, call->g, &part));
    }
}

INLINE void output_backward(enum form form, const struct output_call *call, int64_t row, int64_t h, float *g_vectors) {
    int64_t N = call->N, C = call->H * N, c = h * N, i = row * C + c;
    struct head head = head_of(form, call, i, c);
    floats of_share = same(0.0f), of_normal = same(0.0f), along = same(0.0f);
    EACH_PART(part, i, c, N) {
        floats normal = (get(form, call->y, &part) - head.mean) * head.inverse;
        floats g_read = get(form, call->gated, &part) * get(form, call->g, &part);
        floats g_normal = g_read * vector(call->weight, &part);
        of_share = fused(g_read, get(form, call->v, &part), of_share);
        of_normal += g_normal;
        along = fused(g_normal, normal, along);
    }
    float g_share = sum_of(of_share), mean = sum_of(of_normal) / (float)N, mean_along = sum_of(along) / (float)N;
    EACH_PART(part, i, c, N) {
        floats r = get(form, call->r, &part), k = get(form, call->k, &part), v = get(form, call->v, &part);
        floats g_gated = get(form, call->gated, &part), g_read = g_gated * get(form, call->g, &part);
        floats normal = (get(form, call->y, &part) - head.mean) * head.inverse, weight = vector(call->weight, &part);
        floats read = fused(normal, weight, vector(call->bias, &part)), r_k = vector(call->r_k, &part);
        set(form, call->g_g, &part, g_gated * fused(v, same(head.share), read));
        set(form, call->g_v, &part, g_read * head.share);
        set(form, call->g_r, &part, k * r_k * g_share);
        set(form, call->g_k, &part, r * r_k * g_share);
        set(form, call->g_y, &part, head.inverse * less(normal, same(mean_along), fused(g_read, weight, same(-mean))));
        add(g_vectors, &part, r * k * g_share);
        add(g_vectors + C, &part, g_read * normal);
        add(g_vectors + 2 * C, &part, g_read);
    }
}

#define BOTH(name, form)                                                                                                          \
    EACH_ROW(gates_forward_##name, gates_call, 0, gates_forward(form, call, row, h))                                              \
    EACH_ROW(gates_backward_##name, gates_call, 5, gates_backward(form, call, row, h, g_vectors))                                 \
    EACH_ROW(output_forward_##name, output_call, 0, output_forward(form, call, row, h))                                           \
    EACH_ROW(output_backward_##name, output_call, 3, output_backward(form, call, row, h, g_vectors))

// A function that Python calls: it does `work` for each head of each row.
#define EACH_ROW(name, call_type, n_vectors, work)                                                                                \
    static void name##_tasks(struct tasks *tasks, int64_t thread) {                                                               \
        (void)thread;                                                                                                             \
        const struct call_type *call = tasks->call;                                                                               \
        int64_t size = n_vectors * call->H * call->N;                                                                             \
        for (int64_t task; (task = next_task(tasks)) * ROWS < call->rows;) {                                                      \
            int64_t first = task * ROWS, end = first + ROWS < call->rows ? first + ROWS : call->rows;                             \
            float *g_vectors = n_vectors ? call->of_tasks + task * size : 0;                                                      \
            if (n_vectors) memset(g_vectors, 0, (size_t)size * sizeof(float));                                                    \
            for (int64_t row = first; row < end; row++)                                                                           \
                for (int64_t h = 0; h < call->H; h++) work;                                                                       \
        }                                                                                                                         \
    }                                                                                                                             \
    ENTRY(rwkv7_##name)(const struct call_type *call, int64_t threads) {                                                          \
        int64_t tasks = (call->rows + ROWS - 1) / ROWS, size = n_vectors * call->H * call->N;                                     \
        share(name##_tasks, call, threads);                                                                                       \
        if (n_vectors) total(call->g_vectors, call->of_tasks, tasks, size, size);                                                 \
    }

BOTH(float32, FLOAT32)
BOTH(bfloat16, BFLOAT16)
