// Building blocks of a decoding step, shared by all generations. A step reads R tokens, one per row. A row that starts from the
// state of the previous row holds the next token of the same sequence. A step is a series of phases: loops whose tiles are divided
// among the threads, each followed by a barrier (threads.h). Each row has a workspace of `size` floats and a state of `state_size`
// floats. All widths are multiples of 8; buffers in the workspace are padded to multiples of 32. c_step.py fills the structs.

#pragma once
#include "../../../../kernels/matvec/csrc/products.h"
#include "../../../../kernels/native/csrc/threads.h"

enum {
    TILE_CHANNELS = 128,     // channels per tile in loops over channels
    PIECE = 4 * BLOCK,       // inputs prepared (quantized or rounded) per tile
    TILES_PER_THREAD = 8,    // tiles of a product per thread; with fewer, threads idle while one finishes the last tile
    WIDE_TILES_PER_THREAD = 2,           // the same for sparse products by input, for which wide tiles are faster
    MAX_JOBS = 7,            // largest number of products in a phase
};

typedef const float *vector;

struct norm {
    vector weight, bias;
    double eps;
};

// How W is stored, and which product reads it. BY_OUTPUT: (N,K); BY_INPUT: (K,N). The two DENSE products, matmul and
// matmul_by_columns, have bit-identical results; so have the two SPARSE ones, matmul_in_order and matmul_sparse. An int8 W is
// DENSE_BY_OUTPUT or SPARSE_BY_INPUT, with identical results.
enum order { DENSE_BY_OUTPUT, SPARSE_BY_INPUT, DENSE_BY_INPUT, SPARSE_BY_OUTPUT };

struct matrix {                          // a layer's weight, in a format of kernels/matvec
    int64_t kind, N, K;
    const void *w, *scale, *shift;
    int64_t levels, offset;              // int8: how prepare_input quantizes x
    int64_t order;
};

// The fields that every generation's model begins with. The last line: offsets of buffers in a row's workspace, x (C); normal (C),
// the normalized x; floats and q, the prepared inputs of up to three products, of `widest` numbers each.
struct common {
    int64_t L, V, C;
    int64_t embedding_kind;              // W_FLOAT32, WX_BFLOAT16 or GGUF's blocks
    const void *embedding;
    struct norm ln_out;
    struct matrix head;
    int64_t state_size, size;            // numbers in a row's state and workspace
    int64_t x, normal, floats, q, widest;
};

// Arguments. model: the generation's struct, which starts with struct common. sources, slots (R): the indices in `states` of each
// row's state before and after its token; if they differ, the source state is preserved. work (R,size). logits: (V) after the last
// row of each sequence; with all_logits, after each row.
struct call {
    const struct common *model;
    int64_t R, all_logits;
    const int64_t *tokens, *sources, *slots;
    float *states, *work, *logits;
};

// A thread's view of a step. R: number of rows in the matrix products.
struct step {
    struct phase phase;
    const struct call *call;
    const struct common *common;
    int64_t threads, R;
};

// A phase: the threads together run the body once for each tile from 0 to total - 1, then wait at the barrier.
#define FOR_EACH_TILE(tile, step, total) for (int64_t tile = -1; (tile = next_tile(&(step)->phase, tile, total)) >= 0;)

INLINE int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
INLINE float *row_work(const struct step *s, int64_t row) { return s->call->work + row * s->common->size; }

INLINE int starts_sequence(const struct step *s, int64_t row) {
    return row == 0 || s->call->sources[row] != s->call->slots[row - 1];
}

INLINE int ends_sequence(const struct step *s, int64_t row) { return row + 1 == s->call->R || starts_sequence(s, row + 1); }

INLINE int has_logits(const struct step *s, int64_t row) { return s->call->all_logits || ends_sequence(s, row); }

// Returns the index of a row's logits: the number of earlier rows that have logits.
INLINE int64_t logits_index(const struct step *s, int64_t row) {
    int64_t n = 0;
    for (int64_t r = 0; r < row; r++) n += has_logits(s, r);
    return n;
}

// Runs the body for each row of the sequence that starts at row `first`; does nothing if no sequence starts there.
#define FOR_EACH_TOKEN(row, s, first) \
    for (int64_t row = first, more = starts_sequence(s, row); more; more = !ends_sequence(s, row), row++)

// Returns `size` floats at `offset` of a row's new state, initialized from the source state. size: a multiple of 8.
INLINE float *row_state(const struct step *s, int64_t row, int64_t offset, int64_t size) {
    int64_t source = s->call->sources[row], slot = s->call->slots[row];
    float *after = s->call->states + slot * s->common->state_size + offset;
    const float *before = s->call->states + source * s->common->state_size + offset;
    if (source != slot)
        for (int64_t j = 0; j < size; j += 8) store(after + j, load(before + j));
    return after;
}

INLINE float square_root(float x) { return __builtin_elementwise_sqrt(x); }

INLINE float mean_of(vector x, int64_t width) {
    floats sums = splat(0.0f);
    for (int64_t j = 0; j < width; j += 8) sums += load(x + j);
    return hsum(sums) / (float)width;
}

INLINE float variance_of(vector x, int64_t width, float mean) {
    floats squares = splat(0.0f);
    for (int64_t j = 0; j < width; j += 8) {
        floats deviation = load(x + j) - mean;
        squares = fma(deviation, deviation, squares);
    }
    return hsum(squares) / (float)width;
}

// y = (x - mean) / sqrt(variance + eps) weight + bias
INLINE void layer_norm(const struct norm *norm, vector x, float *y, int64_t C) {
    float mean = mean_of(x, C), factor = 1.0f / square_root(variance_of(x, C, mean) + (float)norm->eps);
    for (int64_t j = 0; j < C; j += 8)
        store(y + j, fma((load(x + j) - mean) * factor, load(norm->weight + j), load(norm->bias + j)));
}

// y (n,C) = last + (x - last) mu, for mu (n,C); then last = x
INLINE void token_shift(int n, vector mu, vector x, float *last, float *y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) {
        floats previous = load(last + j), current = load(x + j), delta = current - previous;
        for (int i = 0; i < n; i++) store(y + i * C + j, fma(delta, load(mu + i * C + j), previous));
        store(last + j, current);
    }
}

INLINE void add(float *x, vector y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) store(x + j, load(x + j) + load(y + j));
}

// x = embedding of the row's token; NaN if the token is out of range
INLINE void embed(const struct step *s, int64_t row, float *x) {
    const struct common *m = s->common;
    int64_t token = s->call->tokens[row], C = m->C;
    int is_token = token >= 0 && token < m->V;
    if (is_token && m->embedding_kind >= W_Q8_0) {
        unpack_blocks((enum kind)m->embedding_kind, m->embedding, C, token, x);
        return;
    }
    for (int64_t j = 0; j < C; j += 8) {
        if (!is_token) store(x + j, splat(__builtin_nanf("")));
        else store(x + j, load_as(m->embedding_kind == W_FLOAT32 ? FLOAT32 : BFLOAT16, m->embedding, token * C + j));
    }
}

// A product y = f(W x). x and y point to row 0. The row stride of x is common->size floats, that of y is y_row.
enum activation { IDENTITY, RELU2, TANH, SIGMOID };

struct job {
    const struct matrix *matrix;
    vector x;
    float *y;
    int64_t y_row;
    enum activation f;
};

INLINE floats activate(enum activation f, floats y) {
    if (f == TANH) return tanh(y);
    if (f == SIGMOID) return sigmoid(y);
    return max(splat(0.0f), y) * max(splat(0.0f), y);
}

INLINE int rounds_x(const struct job *job) {
    const struct matrix *m = job->matrix;
    return m->kind == W_INT8 || (rounds_input((enum kind)m->kind) && m->order == DENSE_BY_OUTPUT);
}

// Returns the prepared input of job i in a row's workspace.
INLINE float *prepared_floats(const struct step *s, int64_t row, int i) {
    return row_work(s, row) + s->common->floats + i * s->common->widest;
}

INLINE uint8_t *prepared_q(const struct step *s, int64_t row, int i) {
    return (uint8_t *)(row_work(s, row) + s->common->q) + i * s->common->widest * 2;
}

INLINE int64_t input_pieces(const struct matrix *m) { return m->kind == W_INT8 ? 1 : tiles(m->K, PIECE); }

// Returns the job to which a phase's *tile belongs, and reduces *tile to its index within that job.
static inline int find_job(int64_t *tile, int n, const int64_t *counts) {
    int i = 0;
    for (; i < n - 1 && *tile >= counts[i]; i++) *tile -= counts[i];
    return i;
}

static inline void prepare_inputs(struct step *s, int n, const struct job *jobs) {
    int64_t counts[MAX_JOBS], total = 0;
    for (int i = 0; i < n; i++) total += counts[i] = rounds_x(&jobs[i]) ? s->R * input_pieces(jobs[i].matrix) : 0;
    if (total) FOR_EACH_TILE(number, s, total) {
        int64_t tile = number;
        int i = find_job(&tile, n, counts);
        const struct matrix *m = jobs[i].matrix;
        int64_t pieces = input_pieces(m), row = tile / pieces, first = tile % pieces * PIECE;
        int64_t size = pieces == 1 ? m->K : min_int64(PIECE, m->K - first);
        prepare_input((enum kind)m->kind, jobs[i].x + row * s->common->size, m->K, first, size, m->levels, m->offset,
                prepared_floats(s, row, i), prepared_q(s, row, i));
    }
}

static inline struct product make_product(const struct step *s, const struct job *job, int i) {
    const struct matrix *m = job->matrix;
    return (struct product){
        .kind = (enum kind)m->kind, .w = m->w, .scale = m->scale, .shift = m->shift,
        .x = rounds_x(job) ? prepared_floats(s, 0, i) : job->x, .q = prepared_q(s, 0, i), .y = job->y, .R = s->R, .K = m->K,
        .x_row = s->common->size, .q_row = 4 * s->common->size,
        .y_row = job->y_row, .offset = m->offset, .apply_x_scale = 1,
    };
}

// Outputs per tile, rounded up to a multiple of the unit of the product.
INLINE int64_t matrix_tile(const struct step *s, const struct matrix *m) {
    static const int64_t units[] = {8, 64, COLUMN_TILE, 16};
    int uses_amx = m->kind == W_INT8 && s->R >= AMX_ROWS && timemix_has_amx();
    int64_t unit = uses_amx ? AMX_OUTPUTS : units[m->order];
    int64_t per_thread = m->order == SPARSE_BY_INPUT ? WIDE_TILES_PER_THREAD : TILES_PER_THREAD;
    return tiles(tiles(m->N, per_thread * s->threads), unit) * unit;
}

INLINE void multiply_tile(const struct product *product, const struct matrix *m, int64_t begin, int64_t end) {
    switch ((enum order)m->order) {
    case DENSE_BY_OUTPUT: matmul(product, begin, end); break;
    case SPARSE_BY_INPUT: (m->kind == W_INT8 ? matmul_int8_by_input : matmul_sparse)(product, m->N, begin, end); break;
    case DENSE_BY_INPUT: matmul_by_columns(product, m->N, begin, end); break;
    case SPARSE_BY_OUTPUT: matmul_in_order(product, begin, end); break;
    }
}

// Computes n independent products in one phase.
static inline void multiply(struct step *s, int n, const struct job *jobs) {
    int64_t counts[MAX_JOBS], total = 0;
    prepare_inputs(s, n, jobs);
    for (int i = 0; i < n; i++) total += counts[i] = tiles(jobs[i].matrix->N, matrix_tile(s, jobs[i].matrix));
    FOR_EACH_TILE(number, s, total) {
        int64_t tile = number;
        int i = find_job(&tile, n, counts);
        const struct job *job = &jobs[i];
        struct product product = make_product(s, job, i);
        int64_t N = job->matrix->N, each = matrix_tile(s, job->matrix), begin = tile * each, end = min_int64(N, begin + each);
        multiply_tile(&product, job->matrix, begin, end);
        if (job->f == IDENTITY) continue;
        for (int64_t row = 0; row < s->R; row++)
            for (float *y = job->y + row * job->y_row + begin; y < job->y + row * job->y_row + end; y += 8)
                store(y, activate(job->f, load(y)));
    }
}

// logits = head(ln_out(x)) for the rows that have logits
static inline void compute_logits(struct step *s) {
    const struct common *m = s->common;
    FOR_EACH_TILE(row, s, s->call->R)
        if (has_logits(s, row))
            layer_norm(&m->ln_out, row_work(s, row) + m->x, row_work(s, logits_index(s, row)) + m->normal, m->C);
    s->R = logits_index(s, s->call->R);
    multiply(s, 1, &(struct job){&m->head, s->call->work + m->normal, s->call->logits, m->V, IDENTITY});
}

struct step_call {
    const struct call *call;
    struct barrier *barrier;
    int64_t threads;
};

// Defines the function that Python calls for a step, and exports the structs' sizes. Use: STEP(generation) { what each thread does
// with struct step *s }
#define STEP(generation) \
    EXPORT_SIZE(generation##_norm, struct norm) \
    EXPORT_SIZE(generation##_matrix, struct matrix) \
    EXPORT_SIZE(generation##_common, struct common) \
    EXPORT_SIZE(generation##_layer, struct layer) \
    EXPORT_SIZE(generation##_model, struct model) \
    static void step_body(struct step *s); \
    static void step_worker(struct tasks *tasks, int64_t thread) { \
        const struct step_call *c = tasks->call; \
        struct step step = {{c->barrier, 0}, c->call, c->call->model, c->threads, c->call->R}; \
        (void)thread, step_body(&step); \
    } \
    ENTRY(generation##_step, struct call) { \
        struct barrier barrier = {0, 0}; \
        parallel_for(step_worker, &(struct step_call){call, &barrier, threads}, threads); \
    } \
    static void step_body(struct step *s)
