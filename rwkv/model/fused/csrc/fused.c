// Token shift and squared ReLU, with gradients, for both generations.
//
// Token shift interpolates between each step's x and the previous step's, once per mu (C):
//
//     m = from + (to - from) mu            RWKV-4: from = previous, to = x      RWKV-7: from = x, to = previous
//
// previous: x of the preceding step, or last_x at a sequence's first step. If g is the gradient of a mix m,
//
//     gmu = sum over steps of g (to - from)          gto = sum over mixes of g mu          gfrom = sum over mixes of g (1 - mu)
//
// A row is one step of one sequence: x and m are (rows,C), rows = B T. A task is ROWS rows and computes a partial sum of gmu; the
// entry function then adds the tasks' sums.
//
// Squared ReLU: max(x, 0)^2, gx = 2 max(x, 0) g. NaN stays NaN.

#include "../../../../kernels/native/csrc/threads.h"
#include "../../../../kernels/native/csrc/vectors.h"
#include "partial_sums.h"

enum { ROWS = 32, MAX_MIXES = 6, PIECE = 16384 };

// Arguments, in the order of ../c.py.
struct call {
    int64_t rows, T, C, n_mixes, to_previous;            // to_previous: mu weights the previous step, as in RWKV-7
    const void *x;
    const float *last_x;                 // (B,C), or null for zeros
    const float *mu[MAX_MIXES];
    void *m[MAX_MIXES];                  // backward: g
    void *gx;                            // the rest: backward only
    float *glast_x;                      // (B,C), or null
    float *partial, *gmu;                // (tasks,n_mixes + 1,C): each task's gmu and pending gx; (n_mixes,C)
};

INLINE floats load_previous(enum dtype dtype, const struct call *call, int64_t row, int64_t t, int64_t c, int64_t lanes) {
    if (t) return load_partial(dtype, call->x, (row - 1) * call->C + c, lanes);
    return call->last_x ? load_partial(FLOAT32, call->last_x, row / call->T * call->C + c, lanes) : splat(0.0f);
}

// `from` and `to - from` for a vector of channels of one step.
struct operands { floats from, delta; };

INLINE struct operands load_operands(enum dtype dtype, const struct call *call, int64_t row, int64_t t, int64_t c,
                                     int64_t lanes) {
    floats previous = load_previous(dtype, call, row, t, c, lanes), x = load_partial(dtype, call->x, row * call->C + c, lanes);
    return call->to_previous ? (struct operands){x, previous - x} : (struct operands){previous, x - previous};
}

INLINE void mix(enum dtype dtype, enum dtype mix_dtype, int64_t n, const struct call *call, int64_t row, int64_t t, int64_t c,
                int64_t lanes) {
    struct operands operands = load_operands(dtype, call, row, t, c, lanes);
    UNROLL for (int64_t j = 0; j < n; j++)
        store_partial(mix_dtype, call->m[j], row * call->C + c, lanes,
                   fma(operands.delta, load_partial(FLOAT32, call->mu[j], c, lanes), operands.from));
}

// One step's contributions to the gradients of its own x and of the previous step's x.
struct gradients { floats x, previous; };

INLINE struct gradients sum_mixes(enum dtype mix_dtype, int64_t n, const struct call *call, int64_t row, int64_t c,
                                  int64_t lanes) {
    floats sum = splat(0.0f), to = splat(0.0f);          // sum: gto + gfrom
    UNROLL for (int64_t j = 0; j < n; j++) {
        floats g = load_partial(mix_dtype, call->m[j], row * call->C + c, lanes);
        sum += g;
        to = fma(g, load_partial(FLOAT32, call->mu[j], c, lanes), to);
    }
    return call->to_previous ? (struct gradients){sum - to, to} : (struct gradients){to, sum - to};
}

// Backward of a row. Completes and stores gx of the previous row, whose own part is in `pending` (C), and puts this row's there.
INLINE void backward_row(enum dtype dtype, enum dtype mix_dtype, int64_t n, const struct call *call, int64_t row, int64_t t,
                         int64_t is_first, int64_t c, int64_t lanes, float *gmu, float *pending) {
    int64_t C = call->C;
    struct gradients g = sum_mixes(mix_dtype, n, call, row, c, lanes);
    if (!is_first)
        store_partial(dtype, call->gx, (row - 1) * C + c, lanes,
                      load_partial(FLOAT32, pending, c, lanes) + (t ? g.previous : splat(0.0f)));
    store_partial(FLOAT32, pending, c, lanes, g.x);
    if (t == 0 && call->glast_x) store_partial(FLOAT32, call->glast_x, row / call->T * C + c, lanes, g.previous);
    floats delta = load_operands(dtype, call, row, t, c, lanes).delta;
    UNROLL for (int64_t j = 0; j < n; j++) {
        floats sum = is_first ? splat(0.0f) : load_partial(FLOAT32, gmu, j * C + c, lanes);
        sum = fma(load_partial(mix_dtype, call->m[j], row * C + c, lanes), delta, sum);
        store_partial(FLOAT32, gmu, j * C + c, lanes, sum);
    }
}

// Completes and stores gx of a task's last row: adds the contribution of the next row, which belongs to another task.
INLINE void backward_end(enum dtype dtype, enum dtype mix_dtype, int64_t n, const struct call *call, int64_t end, int64_t c,
                         int64_t lanes, const float *pending) {
    floats next = end % call->T ? sum_mixes(mix_dtype, n, call, end, c, lanes).previous : splat(0.0f);
    store_partial(dtype, call->gx, (end - 1) * call->C + c, lanes, load_partial(FLOAT32, pending, c, lanes) + next);
}

// Runs `work` for all channels from c to c + lanes - 1: full vectors first, then the remainder.
#define FOR_EACH_VECTOR(C, work)                                                                                                  \
    do {                                                                                                                          \
        int64_t c = 0;                                                                                                            \
        for (const int64_t lanes = LANES; c + LANES <= (C); c += LANES) work;                                                     \
        for (const int64_t lanes = (C) - c; c < (C); c += LANES) work;                                                            \
    } while (0)

INLINE void run_task(enum dtype dtype, enum dtype mix_dtype, int64_t n, int backward, const struct call *call, int64_t task) {
    int64_t C = call->C, first = task * ROWS, end = first + ROWS < call->rows ? first + ROWS : call->rows;
    float *gmu = backward ? call->partial + task * (n + 1) * C : 0, *pending = backward ? gmu + n * C : 0;
    for (int64_t row = first, t = first % call->T; row < end; row++, t = t + 1 < call->T ? t + 1 : 0) {
        if (backward) FOR_EACH_VECTOR(C, backward_row(dtype, mix_dtype, n, call, row, t, row == first, c, lanes, gmu, pending));
        else FOR_EACH_VECTOR(C, mix(dtype, mix_dtype, n, call, row, t, c, lanes));
    }
    if (backward) FOR_EACH_VECTOR(C, backward_end(dtype, mix_dtype, n, call, end, c, lanes, pending));
}

// Compiled separately for each number of mixes in use: two and three in RWKV-4, one and six in RWKV-7.
INLINE void run(enum dtype dtype, enum dtype mix_dtype, int backward, struct tasks *tasks) {
    const struct call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) * ROWS < call->rows;) {
        switch (call->n_mixes) {
        case 1: run_task(dtype, mix_dtype, 1, backward, call, task); break;
        case 2: run_task(dtype, mix_dtype, 2, backward, call, task); break;
        case 3: run_task(dtype, mix_dtype, 3, backward, call, task); break;
        case 6: run_task(dtype, mix_dtype, 6, backward, call, task); break;
        }
    }
}

#define BOTH(name, dtype, mix_dtype)                                                                                              \
    static void forward_##name(struct tasks *tasks, int64_t thread) { (void)thread, run(dtype, mix_dtype, 0, tasks); }            \
    static void backward_##name(struct tasks *tasks, int64_t thread) { (void)thread, run(dtype, mix_dtype, 1, tasks); }           \
    ENTRY(mixes_forward_##name, struct call) { parallel_for(forward_##name, call, threads); }                                     \
    ENTRY(mixes_backward_##name, struct call) {                                                                                   \
        int64_t n = call->n_mixes, C = call->C;                                                                                   \
        parallel_for(backward_##name, call, threads);                                                                             \
        sum_partials(call->gmu, call->partial, (call->rows + ROWS - 1) / ROWS, n * C, (n + 1) * C);                               \
    }

BOTH(float32, FLOAT32, FLOAT32)
BOTH(bfloat16, BFLOAT16, BFLOAT16)
BOTH(autocast, FLOAT32, BFLOAT16)        // x in float32, the mixes in bfloat16

// Squared ReLU of `size` numbers, PIECE per task. Forward: g is null and out is the square; backward: out is gx.
struct relu_call {
    int64_t size;
    const void *x, *g;
    void *out;
};

INLINE void squared_relu(enum dtype dtype, struct tasks *tasks) {
    const struct relu_call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) * PIECE < call->size;) {
        int64_t first = task * PIECE, end = first + PIECE < call->size ? first + PIECE : call->size;
        for (int64_t i = first; i < end; i += LANES) {
            int64_t lanes = end - i < LANES ? end - i : LANES;
            floats x = load_partial(dtype, call->x, i, lanes), relu = x < 0.0f ? splat(0.0f) : x;
            store_partial(dtype, call->out, i, lanes,
                          call->g ? 2.0f * relu * load_partial(dtype, call->g, i, lanes) : relu * relu);
        }
    }
}

static void relu_float32(struct tasks *tasks, int64_t thread) { (void)thread, squared_relu(FLOAT32, tasks); }
static void relu_bfloat16(struct tasks *tasks, int64_t thread) { (void)thread, squared_relu(BFLOAT16, tasks); }
ENTRY(squared_relu_float32, struct relu_call) { parallel_for(relu_float32, call, threads); }
ENTRY(squared_relu_bfloat16, struct relu_call) { parallel_for(relu_bfloat16, call, threads); }
