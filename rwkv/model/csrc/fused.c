// What both generations have between their products: the token shift, and the squared ReLU, with their gradients.
//
// The token shift. Each step's x is mixed with the step's before, for each mu (C):
//
//     m = before + (x - before) mu          before: x of the step before; of a text's first step, last_x
//
// and with g, the gradients of the mixes,
//
//     gmu = sum over all steps of g (x - before)       gx = sum over the mixes of g mu       gbefore = sum of g (1 - mu)
//
// A row is one step of one text: x and the mixes are (rows,C), rows = B T. ROWS rows are a task, which adds up its own gmu.
//
// The squared ReLU: max(x, 0)^2, and gx = 2 max(x, 0) g. NaN stays NaN.

#include "../../../kernels/native/csrc/threads.h"
#include "../../../kernels/native/csrc/vectors.h"

enum { ROWS = 32, MOST_MIXES = 6, PIECE = 16384 };

// The arguments of a call, as fused_c.py lists them.
struct call {
    int64_t rows, T, C, n_mixes;
    const void *x;
    const float *last_x;                 // (B,C), or null for zeros
    const float *mu[MOST_MIXES];
    void *m[MOST_MIXES];                 // in backward g
    void *gx;                            // of backward alone, as all below
    float *glast_x, *gmu;                // (B,C), or null; (tasks,n_mixes,C)
};

INLINE floats before(enum form form, const struct call *call, int64_t row, int64_t c, int64_t lanes) {
    if (row % call->T) return read_some(form, call->x, (row - 1) * call->C + c, lanes);
    return call->last_x ? read_some(FLOAT32, call->last_x, row / call->T * call->C + c, lanes) : same(0.0f);
}

INLINE void mix_row(enum form form, enum form form_m, int64_t n, const struct call *call, int64_t row) {
    for (int64_t c = 0, lanes; c < call->C; c += LANES) {
        lanes = call->C - c < LANES ? call->C - c : LANES;
        int64_t i = row * call->C + c;
        floats past = before(form, call, row, c, lanes), change = read_some(form, call->x, i, lanes) - past;
        UNROLLED for (int64_t j = 0; j < n; j++)
            write_some(form_m, call->m[j], i, lanes, fused(change, read_some(FLOAT32, call->mu[j], c, lanes), past));
    }
}

struct sides { floats now, before; };    // the gradients of x and of before

INLINE struct sides sides_of(enum form form_m, int64_t n, const struct call *call, int64_t row, int64_t c, int64_t lanes) {
    floats all = same(0.0f), now = same(0.0f);
    UNROLLED for (int64_t j = 0; j < n; j++) {
        floats g = read_some(form_m, call->m[j], row * call->C + c, lanes);
        all += g;
        now = fused(g, read_some(FLOAT32, call->mu[j], c, lanes), now);
    }
    return (struct sides){now, all - now};
}

// Back through rows first to end - 1, for some channels. What the next row's before gives belongs to a row, too.
INLINE void back_through(enum form form, enum form form_m, int64_t n, const struct call *call, int64_t first, int64_t end,
                         int64_t c, int64_t lanes, float *gmu) {
    floats sums[MOST_MIXES];
    UNROLLED for (int64_t j = 0; j < n; j++) sums[j] = same(0.0f);
    floats of_next = end % call->T ? sides_of(form_m, n, call, end, c, lanes).before : same(0.0f);
    for (int64_t row = end - 1; row >= first; row--) {
        int64_t i = row * call->C + c;
        struct sides sides = sides_of(form_m, n, call, row, c, lanes);
        write_some(form, call->gx, i, lanes, sides.now + of_next);
        floats change = read_some(form, call->x, i, lanes) - before(form, call, row, c, lanes);
        UNROLLED for (int64_t j = 0; j < n; j++) sums[j] = fused(read_some(form_m, call->m[j], i, lanes), change, sums[j]);
        of_next = row % call->T ? sides.before : same(0.0f);
        if (row % call->T == 0 && call->glast_x)
            write_some(FLOAT32, call->glast_x, row / call->T * call->C + c, lanes, sides.before);
    }
    UNROLLED for (int64_t j = 0; j < n; j++) write_some(FLOAT32, gmu, j * call->C + c, lanes, sums[j]);
}

INLINE void run_task(enum form form, enum form form_m, int64_t n, int back, const struct call *call, int64_t task) {
    int64_t first = task * ROWS, end = first + ROWS < call->rows ? first + ROWS : call->rows;
    if (!back) {
        for (int64_t row = first; row < end; row++) mix_row(form, form_m, n, call, row);
        return;
    }
    float *gmu = call->gmu + task * n * call->C;
    int64_t c = 0;
    for (; c + LANES <= call->C; c += LANES) back_through(form, form_m, n, call, first, end, c, LANES, gmu);
    if (c < call->C) back_through(form, form_m, n, call, first, end, c, call->C - c, gmu);
}

// As many mixes as a generation has are compiled apart: RWKV-4's two and three, RWKV-7's one and six.
INLINE void run(enum form form, enum form form_m, int back, struct tasks *tasks) {
    const struct call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) * ROWS < call->rows;) {
        switch (call->n_mixes) {
        case 1: run_task(form, form_m, 1, back, call, task); break;
        case 2: run_task(form, form_m, 2, back, call, task); break;
        case 3: run_task(form, form_m, 3, back, call, task); break;
        case 6: run_task(form, form_m, 6, back, call, task); break;
        }
    }
}

#define BOTH(name, form, form_m)                                                                                                  \
    static void forward_##name(struct tasks *tasks, int64_t thread) { (void)thread, run(form, form_m, 0, tasks); }                \
    static void backward_##name(struct tasks *tasks, int64_t thread) { (void)thread, run(form, form_m, 1, tasks); }               \
    ENTRY(mixes_forward_##name)(const struct call *call, int64_t threads) { share(forward_##name, call, threads); }               \
    ENTRY(mixes_backward_##name)(const struct call *call, int64_t threads) { share(backward_##name, call, threads); }

BOTH(float32, FLOAT32, FLOAT32)
BOTH(bfloat16, BFLOAT16, BFLOAT16)
BOTH(autocast, FLOAT32, BFLOAT16)        // x in float32, the mixes in bfloat16

// size numbers in pieces of PIECE, each a task; g is null in forward, and out its result in both.
struct relu_call {
    int64_t size;
    const void *x, *g;
    void *out;
};

INLINE void squared_relu(enum form form, struct tasks *tasks) {
    const struct relu_call *call = tasks->call;
    for (int64_t task; (task = next_task(tasks)) * PIECE < call->size;) {
        int64_t first = task * PIECE, end = first + PIECE < call->size ? first + PIECE : call->size;
        for (int64_t i = first; i < end; i += LANES) {
            int64_t lanes = end - i < LANES ? end - i : LANES;
            floats x = read_some(form, call->x, i, lanes), relu = x < 0.0f ? same(0.0f) : x;
            write_some(form, call->out, i, lanes, call->g ? 2.0f * relu * read_some(form, call->g, i, lanes) : relu * relu);
        }
    }
}

static void relu_float32(struct tasks *tasks, int64_t thread) { (void)thread, squared_relu(FLOAT32, tasks); }
static void relu_bfloat16(struct tasks *tasks, int64_t thread) { (void)thread, squared_relu(BFLOAT16, tasks); }
ENTRY(squared_relu_float32)(const struct relu_call *call, int64_t threads) { share(relu_float32, call, threads); }
ENTRY(squared_relu_bfloat16)(const struct relu_call *call, int64_t threads) { share(relu_bfloat16, call, threads); }
