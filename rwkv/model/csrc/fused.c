// What both generations have between their products: the token shift, and the squared ReLU, with their gradients.
//
// The token shift. Each step's x is mixed with the step's before, for each share (C):
//
//     m = from + (to - from) share         RWKV-4: from = before, to = x        RWKV-7: from = x, to = before
//
// before: x of the step before; of a text's first step, last_x. With g, the gradients of the mixes,
//
//     gshare = sum over all steps of g (to - from)       gto = sum over the mixes of g share       gfrom = sum of g (1 - share)
//
// A row is one step of one text: x and the mixes are (rows,C), rows = B T. ROWS rows are a task, which adds up its own gshare; the
// caller's thread then adds up those of all tasks.
//
// The squared ReLU: max(x, 0)^2, and gx = 2 max(x, 0) g. NaN stays NaN.

#include "../../../kernels/native/csrc/threads.h"
#include "../../../kernels/native/csrc/vectors.h"
#include "totals.h"

enum { ROWS = 32, MOST_MIXES = 6, PIECE = 16384 };

// The arguments of a call, as fused_c.py lists them.
struct call {
    int64_t rows, T, C, n_mixes, of_before;              // of_before: whether the shares are those of the step before
    const void *x;
    const float *last_x;                 // (B,C), or null for zeros
    const float *share[MOST_MIXES];
    void *m[MOST_MIXES];                 // in backward g
    void *gx;                            // of backward alone, as all below
    float *glast_x;                      // (B,C), or null
    float *of_tasks, *gshare;            // (tasks,n_mixes + 1,C): of each task its gshare, and gx that is not yet whole; (n_mixes,C)
};

INLINE floats before(enum form form, const struct call *call, int64_t row, int64_t t, int64_t c, int64_t lanes) {
    if (t) return read_some(form, call->x, (row - 1) * call->C + c, lanes);
    return call->last_x ? read_some(FLOAT32, call->last_x, row / call->T * call->C + c, lanes) : same(0.0f);
}

// Some channels of a step: what its mixes go from, and to - from.
struct line { floats from, change; };

INLINE struct line line_of(enum form form, const struct call *call, int64_t row, int64_t t, int64_t c, int64_t lanes) {
    floats past = before(form, call, row, t, c, lanes), now = read_some(form, call->x, row * call->C + c, lanes);
    return call->of_before ? (struct line){now, past - now} : (struct line){past, now - past};
}

INLINE void mix(enum form form, enum form form_m, int64_t n, const struct call *call, int64_t row, int64_t t, int64_t c,
                int64_t lanes) {
    struct line line = line_of(form, call, row, t, c, lanes);
    UNROLLED for (int64_t j = 0; j < n; j++)
        write_some(form_m, call->m[j], row * call->C + c, lanes,
                   fused(line.change, read_some(FLOAT32, call->share[j], c, lanes), line.from));
}

struct sides { floats now, before; };    // the gradients of x and of before

INLINE struct sides sides_of(enum form form_m, int64_t n, const struct call *call, int64_t row, int64_t c, int64_t lanes) {
    floats all = same(0.0f), to = same(0.0f);
    UNROLLED for (int64_t j = 0; j < n; j++) {
        floats g = read_some(form_m, call->m[j], row * call->C + c, lanes);
        all += g;
        to = fused(g, read_some(FLOAT32, call->share[j], c, lanes), to);
    }
    return call->of_before ? (struct sides){all - to, to} : (struct sides){to, all - to};
}

// Back through a row. The gradient of x in the row before is whole only now: until then it lies in `waiting` (C).
INLINE void back_through(enum form form, enum form form_m, int64_t n, const struct call *call, int64_t row, int64_t t,
                         int64_t is_first, int64_t c, int64_t lanes, float *gshare, float *waiting) {
    int64_t C = call->C;
    struct sides sides = sides_of(form_m, n, call, row, c, lanes);
    if (!is_first)
        write_some(form, call->gx, (row - 1) * C + c, lanes,
                   read_some(FLOAT32, waiting, c, lanes) + (t ? sides.before : same(0.0f)));
    write_some(FLOAT32, waiting, c, lanes, sides.now);
    if (t == 0 && call->glast_x) write_some(FLOAT32, call->glast_x, row / call->T * C + c, lanes, sides.before);
    floats change = line_of(form, call, row, t, c, lanes).change;
    UNROLLED for (int64_t j = 0; j < n; j++) {
        floats sum = is_first ? same(0.0f) : read_some(FLOAT32, gshare, j * C + c, lanes);
        sum = fused(read_some(form_m, call->m[j], row * C + c, lanes), change, sum);
        write_some(FLOAT32, gshare, j * C + c, lanes, sum);
    }
}

// The last row of a task: what the next row's before gives belongs to it, too.
INLINE void end_of(enum form form, enum form form_m, int64_t n, const struct call *call, int64_t end, int64_t c, int64_t lanes,
                   const float *waiting) {
    floats of_next = end % call->T ? sides_of(form_m, n, call, end, c, lanes).before : same(0.0f);
    write_some(form, call->gx, (end - 1) * call->C + c, lanes, read_some(FLOAT32, waiting, c, lanes) + of_next);
}

// `work` for all channels, with c and lanes: whole vectors, and then the rest
#define EACH_VECTOR(C, work)                                                                                                      \
    do {                                                                                                                          \
        int64_t c = 0;                                                                                                            \
        for (const int64_t lanes = LANES; c + LANES <= (C); c += LANES) work;                                                     \
        for (const int64_t lanes = (C) - c; c < (C); c += LANES) work;                                                            \
    } while (0)

INLINE void run_task(enum form form, enum form form_m, int64_t n, int back, const struct call *call, int64_t task) {
    int64_t C = call->C, first = task * ROWS, end = first + ROWS < call->rows ? first + ROWS : call->rows;
    float *gshare = back ? call->of_tasks + task * (n + 1) * C : 0, *waiting = back ? gshare + n * C : 0;
    for (int64_t row = first, t = first % call->T; row < end; row++, t = t + 1 < call->T ? t + 1 : 0) {
        if (back) EACH_VECTOR(C, back_through(form, form_m, n, call, row, t, row == first, c, lanes, gshare, waiting));
        else EACH_VECTOR(C, mix(form, form_m, n, call, row, t, c, lanes));
    }
    if (back) EACH_VECTOR(C, end_of(form, form_m, n, call, end, c, lanes, waiting));
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
    ENTRY(mixes_backward_##name)(const struct call *call, int64_t threads) {                                                      \
        int64_t n = call->n_mixes, C = call->C;                                                                                   \
        share(backward_##name, call, threads);                                                                                    \
        total(call->gshare, call->of_tasks, (call->rows + ROWS - 1) / ROWS, n * C, (n + 1) * C);                                  \
    }

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
