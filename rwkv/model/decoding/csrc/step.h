// What the steps of all generations are made of: R rows read a token each. Rows that follow one another with the same place of a
// state are the tokens of one text, in order. A step is a row of phases, each a loop over tiles that threads take from a counter
// (threads.h). What a row works with lies together, `work.size` numbers after that of the row before, and its state likewise. All
// widths are multiples of 8, and places have room for a multiple of PART. c_step.py fills the structs.

#pragma once
#include "../../../../kernels/matvec/csrc/products.h"
#include "../../../../kernels/native/csrc/threads.h"

enum {
    CHANNELS = 128,          // of a tile of what is computed channel by channel
    PIECE = 4 * BLOCK,       // of an input that is prepared
    SHARES = 8,              // tiles of a product for each thread: of fewer, the last keeps the others waiting
    MOST_JOBS = 7,           // products of a phase
};

typedef const float *vector;

struct norm {
    vector weight, bias;
    double eps;
};

struct matrix {                          // a layer's weight in a form of kernels/matvec
    int64_t kind, N, K;
    const void *w, *scale, *shift;
    int64_t steps, offset;               // of int8, of the rounding of x
    int64_t by_input;                    // it is stored (K,N), for inputs that are mostly 0
};

// What all models have. Places of a row: x (C); normal (C), a norm of x; floats and q, what `prepare` makes of the inputs of up to
// three products, `widest` numbers each.
struct common {
    int64_t L, V, C;
    int64_t embedding_is_bfloat16;
    const void *embedding;
    struct norm ln_out;
    struct matrix head;
    int64_t state_size, size;            // of a row
    int64_t x, normal, floats, q, widest;
};

// The arguments of a call. model: the generation's struct, which begins with the common part. places: of each row, that of its state
// in `states`. work: (R,size). logits: of each text (V), after its last row.
struct call {
    const struct common *model;
    int64_t R;
    const int64_t *tokens, *places;
    float *states, *work, *logits;
};

// A thread's part in a step. R: rows of the products.
struct step {
    struct turn turn;
    const struct call *call;
    const struct common *common;
    int64_t threads, R;
};

// A phase: for (each tile of `total`).
#define EACH_TILE(tile, step, total) for (int64_t tile = -1; (tile = next_tile(&(step)->turn, tile, total)) >= 0;)

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
INLINE float *work_of(const struct step *s, int64_t row) { return s->call->work + row * s->common->size; }
INLINE float *state_of(const struct step *s, int64_t row) { return s->call->states + s->call->places[row] * s->common->state_size; }

INLINE int begins_text(const struct step *s, int64_t row) { return row == 0 || s->call->places[row] != s->call->places[row - 1]; }
INLINE int ends_text(const struct step *s, int64_t row) { return row + 1 == s->call->R || begins_text(s, row + 1); }

INLINE int64_t text_of(const struct step *s, int64_t row) {
    int64_t text = 0;
    for (int64_t r = 1; r <= row; r++) text += begins_text(s, r);
    return text;
}

// for (each row of the text that begins at row `first`); none where no text begins there
#define EACH_TOKEN(row, s, first) \
    for (int64_t row = first, more = begins_text(s, row); more; more = !ends_text(s, row), row++)

INLINE float root(float x) { return __builtin_elementwise_sqrt(x); }

INLINE float mean_of(vector x, int64_t width) {
    floats sums = same(0.0f);
    for (int64_t j = 0; j < width; j += 8) sums += at(x + j);
    return sum_of(sums) / (float)width;
}

INLINE float mean_of_squares(vector x, int64_t width, float mean) {
    floats squares = same(0.0f);
    for (int64_t j = 0; j < width; j += 8) {
        floats away = at(x + j) - mean;
        squares = fused(away, away, squares);
    }
    return sum_of(squares) / (float)width;
}

// y = (x - mean) / deviation weight + bias
INLINE void normalize(const struct norm *norm, vector x, float *y, int64_t C) {
    float mean = mean_of(x, C), factor = 1.0f / root(mean_of_squares(x, C, mean) + (float)norm->eps);
    for (int64_t j = 0; j < C; j += 8)
        put(y + j, fused((at(x + j) - mean) * factor, at(norm->weight + j), at(norm->bias + j)));
}

// y (n,C) = last + (x - last) shares, for shares (n,C); then last = x
INLINE void mix(int n, vector shares, vector x, float *last, float *y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) {
        floats before = at(last + j), now = at(x + j), away = now - before;
        for (int i = 0; i < n; i++) put(y + i * C + j, fused(away, at(shares + i * C + j), before));
        put(last + j, now);
    }
}

INLINE void add(float *x, vector y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) put(x + j, at(x + j) + at(y + j));
}

// NaN for a number that is no token
INLINE void embed(const struct step *s, int64_t row, float *x) {
    const struct common *m = s->common;
    int64_t token = s->call->tokens[row], C = m->C;
    for (int64_t j = 0; j < C; j += 8) {
        if (token < 0 || token >= m->V) put(x + j, same(__builtin_nanf("")));
        else put(x + j, read(m->embedding_is_bfloat16 ? BFLOAT16 : FLOAT32, m->embedding, token * C + j));
    }
}

// y = f(W x): of row 0, the rows of x and y that follow are x_row and y_row numbers apart
enum function { IDENTITY, RELU2, TANH, SIGMOID };

struct job {
    const struct matrix *matrix;
    vector x;
    float *y;
    int64_t y_row;
    enum function f;
};

INLINE floats apply(enum function f, floats y) {
    if (f == TANH) return tanh_of(y);
    if (f == SIGMOID) return sigmoid(y);
    return larger(same(0.0f), y) * larger(same(0.0f), y);
}

INLINE int is_rounded(const struct job *job) { return job->matrix->kind >= OF_BFLOAT16_BOTH && !job->matrix->by_input; }

// Where the prepared input of job i is, in a row.
INLINE float *floats_of(const struct step *s, int64_t row, int i) { return work_of(s, row) + s->common->floats + i * s->common->widest; }
INLINE uint8_t *q_of(const struct step *s, int64_t row, int i) {
    return (uint8_t *)(work_of(s, row) + s->common->q) + i * s->common->widest * 2;
}

INLINE int64_t pieces_of(const struct matrix *m) { return m->kind == OF_INT8 ? 1 : tiles(m->K, PIECE); }

// What a phase of several jobs has as its tiles: those of the first, then those of the next.
static inline int job_of(int64_t *tile, int n, const int64_t *of_each) {
    int i = 0;
    for (; i < n - 1 && *tile >= of_each[i]; i++) *tile -= of_each[i];
    return i;
}

static inline void prepare_inputs(struct step *s, int n, const struct job *jobs) {
    int64_t of_each[MOST_JOBS], total = 0;
    for (int i = 0; i < n; i++) total += of_each[i] = is_rounded(&jobs[i]) ? s->R * pieces_of(jobs[i].matrix) : 0;
    if (total) EACH_TILE(number, s, total) {
        int64_t tile = number;
        int i = job_of(&tile, n, of_each);
        const struct matrix *m = jobs[i].matrix;
        int64_t pieces = pieces_of(m), row = tile / pieces, first = tile % pieces * PIECE;
        int64_t size = pieces == 1 ? m->K : least(PIECE, m->K - first);
        prepare((enum kind)m->kind, jobs[i].x + row * s->common->size, m->K, first, size, m->steps, m->offset,
                floats_of(s, row, i), q_of(s, row, i));
    }
}

static inline struct product product_of(const struct step *s, const struct job *job, int i) {
    const struct matrix *m = job->matrix;
    return (struct product){
        .kind = (enum kind)m->kind, .w = m->w, .scale = m->scale, .shift = m->shift, .x = is_rounded(job) ? floats_of(s, 0, i) : job->x,
        .q = q_of(s, 0, i), .y = job->y, .R = s->R, .K = m->K, .x_row = s->common->size, .q_row = 4 * s->common->size,
        .y_row = job->y_row, .offset = m->offset, .in_steps = 1,
    };
}

// Outputs of a tile: SHARES tiles for each thread, in whole vectors
INLINE int64_t outputs_of(const struct step *s, int64_t N, int64_t unit) { return tiles(tiles(N, SHARES * s->threads), unit) * unit; }

INLINE int64_t outputs_of_tile(const struct step *s, const struct matrix *m) { return outputs_of(s, m->N, m->by_input ? OUTPUTS : 8); }

// Products that do not depend on each other.
static inline void multiply(struct step *s, int n, const struct job *jobs) {
    int64_t of_each[MOST_JOBS], total = 0;
    prepare_inputs(s, n, jobs);
    for (int i = 0; i < n; i++) total += of_each[i] = tiles(jobs[i].matrix->N, outputs_of_tile(s, jobs[i].matrix));
    EACH_TILE(number, s, total) {
        int64_t tile = number;
        int i = job_of(&tile, n, of_each);
        const struct job *job = &jobs[i];
        struct product product = product_of(s, job, i);
        int64_t N = job->matrix->N, each = outputs_of_tile(s, job->matrix), begin = tile * each, end = least(N, begin + each);
        if (job->matrix->by_input) products_of_sparse(&product, N, begin, end);
        else products(&product, begin, end);
        if (job->f == IDENTITY) continue;
        for (int64_t row = 0; row < s->R; row++)
            for (float *y = job->y + row * job->y_row + begin; y < job->y + row * job->y_row + end; y += 8) put(y, apply(job->f, at(y)));
    }
}

// The same with matrices that are stored by input.
static inline void multiply_by_input(struct step *s, int n, const struct job *jobs) {
    int64_t of_each[MOST_JOBS], total = 0;
    for (int i = 0; i < n; i++) total += of_each[i] = tiles(jobs[i].matrix->N, outputs_of(s, jobs[i].matrix->N, PART));
    EACH_TILE(number, s, total) {
        int64_t tile = number;
        int i = job_of(&tile, n, of_each);
        struct product product = product_of(s, &jobs[i], i);
        int64_t N = jobs[i].matrix->N, each = outputs_of(s, N, PART);
        products_by_input(&product, tile * each, least(N, (tile + 1) * each));
    }
}

// logits = head(ln_out(x)), of each text's last row
static inline void end(struct step *s) {
    const struct common *m = s->common;
    EACH_TILE(row, s, s->call->R)
        if (ends_text(s, row)) normalize(&m->ln_out, work_of(s, row) + m->x, work_of(s, text_of(s, row)) + m->normal, m->C);
    s->R = 1 + text_of(s, s->call->R - 1);
    multiply(s, 1, &(struct job){&m->head, s->call->work + m->normal, s->call->logits, m->V, IDENTITY});
}

// A step of a generation: STEP(name) { s: the thread's struct step }
struct shared {
    const struct call *call;
    struct phases *phases;
    int64_t threads;
};

#define STEP(name) \
    static void name##_of(struct step *s); \
    static void name##_in(struct tasks *tasks, int64_t thread) { \
        const struct shared *shared = tasks->call; \
        struct step step = {{shared->phases, 0}, shared->call, shared->call->model, shared->threads, shared->call->R}; \
        (void)thread, name##_of(&step); \
    } \
    ENTRY(name)(const struct call *call, int64_t threads) { \
        struct phases phases = {0, 0}; \
        share(name##_in, &(struct shared){call, &phases, threads}, threads); \
    } \
    static void name##_of(struct step *s)
