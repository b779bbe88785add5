// Products of an int8 W stored by input, (K,N), with nonnegative inputs, most of which are zero after a ReLU.
//
// The weights of four inputs are interleaved in registers, so that one instruction adds up four products of an output. With few
// rows, only the weights of inputs that are nonzero in some row are read. Integer sums are exact, so the results are bit-identical
// to matmul on the transpose.

#include "tile.h"

enum {
    LINE = 64,                           // bytes in a cache line, for prefetching
    QUAD = 4,                            // inputs whose products are added up by one instruction
    OUTPUTS = 4 * WIDE,                  // outputs of a group: their weights for one input fill a vector
    GROUP_VECTORS = 4,                   // vectors of a group's sums
    FEW_ROWS = 16,
    GROUPS = SPARSE_TILE / OUTPUTS,      // few rows: groups of a tile
    CHUNK = 512,                         // few rows: inputs from which the nonzero ones are collected at a time
    BLOCK_QUADS = 4,                     // few rows: quads multiplied for all outputs of a tile before the next ones
    MANY_ROWS = 64,                      // many rows: rows multiplied by the same interleaved weights
    MANY_OUTPUTS = 128,                  // many rows: outputs of a tile, so that whole cache lines of weights are used
    MANY_GROUPS = MANY_OUTPUTS / OUTPUTS,
    MANY_QUADS = 64,                     // many rows: quads whose interleaved weights stay in L1
#ifdef __AVX512F__
    TOGETHER = 6,                        // rows whose sums are in registers at the same time
#else
    TOGETHER = 2,
#endif
};

typedef wide_ints group_sums[GROUP_VECTORS];

// Nonzero inputs: the offsets of their weights, and their values in each row. The last quad is padded with zeros.
struct nonzero_quads {
    int64_t quads, offsets[CHUNK + BLOCK_QUADS * QUAD];
    uint8_t x[FEW_ROWS][CHUNK];
};

// Collects inputs k to end - 1 that are nonzero in any of the rows. end - k is a multiple of 8.
static void find_nonzero_quads(const struct product *p, int64_t N, int64_t first, int64_t rows, int64_t k, int64_t end,
                               struct nonzero_quads *nonzero) {
    const uint8_t *q = p->q + first * p->q_row;
    int64_t n = 0;
    for (; k < end; k += 8) {
        uint64_t any = 0, eight;
        for (int64_t i = 0; i < rows; i++) {
            memcpy(&eight, q + i * p->q_row + k, sizeof eight);
            any |= eight;
        }
        while (any) {
            int byte = __builtin_ctzll(any) / 8;
            any &= ~((uint64_t)255 << 8 * byte);
            nonzero->offsets[n] = (k + byte) * N;
            for (int64_t i = 0; i < rows; i++) nonzero->x[i][n] = q[i * p->q_row + k + byte];
            n++;
        }
    }
    int64_t last = n ? nonzero->offsets[n - 1] : 0;
    for (int64_t i = n; i < n + BLOCK_QUADS * QUAD + QUAD - 1 && i < CHUNK + BLOCK_QUADS * QUAD; i++) nonzero->offsets[i] = last;
    for (; n % QUAD; n++)
        for (int64_t i = 0; i < rows; i++) nonzero->x[i][n] = 0;
    nonzero->quads = n / QUAD;
}

typedef bytes quad_weights[GROUP_VECTORS];

// Loads and interleaves the weights of quads of inputs for a group of `width` outputs. w: the weights of the first output.
INLINE void load_sparse(const int8_t *w, int64_t width, const int64_t *offsets, int64_t quads, quad_weights *weights) {
    for (int64_t quad = 0; quad < quads; quad++) {
        bytes rows[QUAD];
        UNROLL for (int i = 0; i < QUAD; i++) rows[i] = load_bytes(w + offsets[quad * QUAD + i], width);
        interleave(rows, weights[quad]);
    }
}

// load_sparse for consecutive inputs.
INLINE void load_dense(const int8_t *w, int64_t N, int64_t width, int64_t quads, quad_weights *weights) {
    for (int64_t quad = 0; quad < quads; quad++) {
        bytes rows[QUAD];
        UNROLL for (int i = 0; i < QUAD; i++) rows[i] = load_bytes(w + (quad * QUAD + i) * N, width);
        interleave(rows, weights[quad]);
    }
}

// Adds the products of quads to a group's sums, for up to TOGETHER rows. x, sums: the first row's; x_row, sums_row: row strides.
INLINE void add_products(int rows, const quad_weights *weights, int64_t quads, const uint8_t *x, int64_t x_row, group_sums *sums,
                         int64_t sums_row) {
    wide_ints acc[TOGETHER][GROUP_VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < GROUP_VECTORS; v++) acc[i][v] = sums[i * sums_row][v];
    for (int64_t quad = 0; quad < quads; quad++)
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, x + i * x_row + quad * QUAD, sizeof four);
            UNROLL for (int v = 0; v < GROUP_VECTORS; v++)
                acc[i][v] = dot_add(acc[i][v], (bytes)((wide_ints)four), weights[quad][v]);
        }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < GROUP_VECTORS; v++) sums[i * sums_row][v] = acc[i][v];
}

// add_products for any number of rows.
static void add_products_of_rows(int64_t n_rows, const quad_weights *weights, int64_t quads, const uint8_t *x, int64_t x_row,
                                 group_sums *sums, int64_t sums_row) {
    int64_t parts = ratio_up(n_rows, TOGETHER);
    for (int64_t part = 0, row = 0, n; part < parts; part++, row += n) {
        n = (n_rows - row) / (parts - part);
        WITH_ROWS(n, if (rows <= TOGETHER) add_products(rows, weights, quads, x + row * x_row, x_row, sums + row * sums_row,
                                                        sums_row));
    }
}

// Writes outputs n to n + width - 1 of `rows` rows. sums: the first row's; sums_row: the row stride, in groups.
static void write_outputs(const struct product *p, int64_t first, int64_t rows, int64_t n, int64_t width, const group_sums *sums,
                          int64_t sums_row) {
    for (int64_t row = first; row < first + rows; row++, sums += sums_row) {
        float x_scale = p->apply_x_scale ? p->x[row * p->x_row] : 1.0f;
        for (int64_t o = 0; o < width; o++) {
            int64_t in_group = o % OUTPUTS, lane = in_group / 16 * 4 + in_group % 4;
            int32_t sum = sums[o / OUTPUTS][in_group % 16 / 4][lane];
            p->y[row * p->y_row + n + o] = (float)sum * ((const float *)p->scale)[n + o] * x_scale;
        }
    }
}

// Multiplies a few inputs for all outputs of a tile before the next inputs, as matmul_sparse does.
static void few_rows(const struct product *p, int64_t N, int64_t first, int64_t rows, int64_t n, int64_t width) {
    group_sums sums[FEW_ROWS * GROUPS];
    struct nonzero_quads nonzero;
    memset(sums, 0, (size_t)(rows * GROUPS) * sizeof sums[0]);
    for (int64_t k = 0; k < p->K; k += CHUNK) {
        find_nonzero_quads(p, N, first, rows, k, smaller(k + CHUNK, p->K), &nonzero);
        for (int64_t quad = 0; quad < nonzero.quads; quad += BLOCK_QUADS) {
            int64_t quads = smaller(BLOCK_QUADS, nonzero.quads - quad);
            for (int64_t g = 0; g * OUTPUTS < width; g++) {
                quad_weights weights[BLOCK_QUADS];
                const int8_t *w = (const int8_t *)p->w + n + g * OUTPUTS;
                const int64_t *offsets = nonzero.offsets + quad * QUAD;
                if (g * OUTPUTS % LINE == 0)
                    for (int64_t i = 0; i < quads * QUAD; i++) __builtin_prefetch(w + offsets[BLOCK_QUADS * QUAD + i], 0, 2);
                if (width - g * OUTPUTS >= OUTPUTS) load_sparse(w, OUTPUTS, offsets, quads, weights);
                else load_sparse(w, width - g * OUTPUTS, offsets, quads, weights);
                add_products_of_rows(rows, (const quad_weights *)weights, quads, nonzero.x[0] + quad * QUAD, CHUNK, sums + g,
                                     GROUPS);
            }
        }
    }
    write_outputs(p, first, rows, n, width, (const group_sums *)sums, GROUPS);
}

static void many_rows(const struct product *p, int64_t N, int64_t first, int64_t rows, int64_t n, int64_t width) {
    group_sums sums[MANY_ROWS * MANY_GROUPS];
    quad_weights weights[MANY_QUADS];
    memset(sums, 0, (size_t)(rows * MANY_GROUPS) * sizeof sums[0]);
    for (int64_t k = 0; k < p->K; k += MANY_QUADS * QUAD) {
        int64_t quads = smaller(MANY_QUADS, (p->K - k) / QUAD);
        for (int64_t g = 0; g * OUTPUTS < width; g++) {
            const int8_t *w = (const int8_t *)p->w + k * N + n + g * OUTPUTS;
            if (g * OUTPUTS % LINE == 0)
                for (int64_t i = 0; i < quads * QUAD; i++) __builtin_prefetch(w + (quads * QUAD + i) * N, 0, 2);
            if (width - g * OUTPUTS >= OUTPUTS) load_dense(w, N, OUTPUTS, quads, weights);
            else load_dense(w, N, width - g * OUTPUTS, quads, weights);
            add_products_of_rows(rows, (const quad_weights *)weights, quads, p->q + first * p->q_row + k, p->q_row, sums + g,
                                 MANY_GROUPS);
        }
    }
    write_outputs(p, first, rows, n, width, (const group_sums *)sums, MANY_GROUPS);
}

void matmul_int8_by_input(const struct product *p, int64_t N, int64_t begin, int64_t end) {
    int is_few = p->R <= FEW_ROWS;
    if (!is_few && can_use_amx(p)) {
        matmul_amx(p, N, begin, end);
        return;
    }
    int64_t outputs = is_few ? SPARSE_TILE : MANY_OUTPUTS, most_rows = is_few ? FEW_ROWS : MANY_ROWS;
    for (int64_t n = begin; n < end; n += outputs)
        for (int64_t first = 0; first < p->R; first += most_rows)
            (is_few ? few_rows : many_rows)(p, N, first, smaller(most_rows, p->R - first), n, smaller(outputs, end - n));
}
