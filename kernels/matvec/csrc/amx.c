// int8 products of many rows with AMX (Advanced Matrix Extensions), whose instructions multiply 16 x 64 by 64 x 16 integers.
//
// The instructions read x in place, but require W in a different order. For each group of outputs, a piece of W is packed once and
// multiplied by up to GROUP_ROWS rows. Integer sums are exact, so the results are bit-identical to matmul and matmul_int8_by_input.

#include "tile.h"

#if defined __AVX512BF16__ && defined __linux__

#define WITH_AMX __attribute__((target("amx-tile,amx-int8")))

enum {
    TILE = 16,                           // outputs of a tile of W, and at most as many rows of a tile of x
    TILE_INPUTS = 64,
    TILES = 4,
    GROUP_OUTPUTS = TILES * TILE,
    PIECE = 16 * TILE_INPUTS,            // inputs packed at a time; the packed weights stay in L2
    GROUP_ROWS = 512,                    // largest number of rows multiplied by the same packed weights
};

typedef wide_ints packed_tile[TILE];     // a vector has four consecutive inputs of each of 16 outputs

struct group {
    packed_tile weights[PIECE / TILE_INPUTS][TILES];
    wide_ints zero_points[TILES];        // sums of the offset times W
    wide_ints sums[GROUP_ROWS][TILES];
};

struct configuration {                   // the operand of ldtilecfg
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

WITH_AMX static void store_configuration(struct configuration *c) { _tile_storeconfig(c); }
WITH_AMX static void load_configuration(const struct configuration *c) { _tile_loadconfig(c); }

// Configures the tile registers for `rows` rows of x, in two tiles. Registers 4 and 5: x; 6 and 7: W; 0 and 1: sums of the first
// tile of x; 2 and 3: sums of the second.
WITH_AMX static void configure(int64_t rows) {
    struct configuration c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = 64;
        c.rows[i] = (uint8_t)(i >= 6 ? TILE : i == 2 || i == 3 || i == 5 ? rows / 2 : rows - rows / 2);
    }
    _tile_loadconfig(&c);
}

// Packs inputs k to k + 63 of outputs n to n + 63, W stored by output. The first `skipped` inputs become 0.
INLINE void pack_by_output(const struct product *p, int64_t n, int64_t width, int64_t k, int64_t skipped,
                           packed_tile *packed) {
    bytes mask;
    for (int i = 0; i < TILE_INPUTS; i++) mask[i] = i < skipped ? 0 : -1;
    for (int t = 0; t < TILES; t++) {
        UNROLL for (int o = 0; o < TILE; o++) {
            int64_t output = n + smaller(t * TILE + o, width - 1);
            const int8_t *w = (const int8_t *)p->w + output * p->K + k;
            packed[t][o] = (wide_ints)(load_bytes(w, TILE_INPUTS) & mask);
        }
        transpose_wide(packed[t]);
    }
}

// The same for a W stored by input. Interleaving changes the outputs' order, which order_outputs restores.
INLINE void pack_by_input(const struct product *p, int64_t N, int64_t n, int64_t width, int64_t k, int64_t skipped,
                          packed_tile *packed) {
    for (int i = 0; i < TILE_INPUTS; i += 4) {
        bytes rows[4];
        UNROLL for (int j = 0; j < 4; j++)
            rows[j] = i + j < skipped ? (bytes)0 : load_bytes((const int8_t *)p->w + (k + i + j) * N + n, width);
        wide_ints quads[TILES];
        interleave(rows, (bytes *)quads);
        UNROLL for (int t = 0; t < TILES; t++) packed[t][i / 4] = quads[t];
    }
}

// Packs inputs first to last - 1. If K is not a multiple of TILE_INPUTS, the last tile begins at K - TILE_INPUTS.
static void pack(const struct product *p, int64_t N, int64_t n, int64_t width, int64_t first, int64_t last, struct group *group) {
    bytes offset = (bytes)(int8_t)p->offset;
    for (int64_t k = first; k < last; k += TILE_INPUTS) {
        packed_tile *packed = group->weights[(k - first) / TILE_INPUTS];
        int64_t skipped = k + TILE_INPUTS > p->K ? k + TILE_INPUTS - p->K : 0;
        if (N) pack_by_input(p, N, n, width, k - skipped, skipped, packed);
        else pack_by_output(p, n, width, k - skipped, skipped, packed);
        UNROLL for (int t = 0; t < TILES; t++)
            UNROLL for (int i = 0; i < TILE; i++)
                group->zero_points[t] = dot_add(group->zero_points[t], offset, (bytes)packed[t][i]);
    }
}

// Adds the products of inputs first to last - 1 of two tiles of x and two tiles of W. The first tile of x has `upper` rows. If
// `first` is 0, the sums start at 0.
WITH_AMX static void multiply_tiles(const struct product *p, const uint8_t *q, int64_t upper, int64_t first, int64_t last,
                                    const packed_tile (*w)[TILES], wide_ints (*sums)[TILES]) {
    int64_t sums_row = sizeof *sums, w_row = sizeof(wide_ints);
    wide_ints *lower = sums[upper];
    if (first) {
        _tile_loadd(0, sums[0], sums_row);
        _tile_loadd(1, sums[0] + 1, sums_row);
        _tile_loadd(2, lower, sums_row);
        _tile_loadd(3, lower + 1, sums_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = first; k < last; k += TILE_INPUTS, w++) {
        const uint8_t *x = q + smaller(k, p->K - TILE_INPUTS);
        _tile_loadd(4, x, p->q_row);
        _tile_loadd(6, (*w)[0], w_row);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, (*w)[1], w_row);
        _tile_dpbusd(1, 4, 7);
        _tile_loadd(5, x + upper * p->q_row, p->q_row);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums[0], sums_row);
    _tile_stored(1, sums[0] + 1, sums_row);
    _tile_stored(2, lower, sums_row);
    _tile_stored(3, lower + 1, sums_row);
}

// Restores the order of the outputs of a W stored by input: the 128-bit parts of sums[t] belong to outputs 4 t, 16 + 4 t, 32 + 4 t
// and 48 + 4 t.
INLINE void order_outputs(wide_ints *sums) {
    wide_ints halves[TILES];
    UNROLL for (int i = 0; i < TILES; i += 2)
        UNROLL for (int odd = 0; odd < 2; odd++) halves[i + odd] = every(4, odd, sums[i], sums[i + 1]);
    UNROLL for (int i = 0; i < 2; i++)
        UNROLL for (int odd = 0; odd < 2; odd++) sums[i + 2 * odd] = every(8, odd, halves[i], halves[i + 2]);
}

static void write_outputs(const struct product *p, int64_t N, int64_t first, int64_t rows, int64_t n, int64_t width,
                          struct group *group) {
    wide scales[TILES];
    for (int t = 0; t < TILES; t++)
        scales[t] = t * TILE < width ? load_wide((const float *)p->scale + n + t * TILE, width - t * TILE) : wide_splat(0.0f);
    for (int64_t i = 0; i < rows; i++) {
        wide x_scale = wide_splat(p->apply_x_scale ? p->x[(first + i) * p->x_row] : 1.0f), outputs[TILES];
        wide_ints *sums = group->sums[i];
        UNROLL for (int t = 0; t < TILES; t++) sums[t] -= group->zero_points[t];
        if (N) order_outputs(sums);
        UNROLL for (int t = 0; t < TILES; t++) outputs[t] = __builtin_convertvector(sums[t], wide) * scales[t] * x_scale;
        memcpy(p->y + (first + i) * p->y_row + n, outputs, (size_t)width * sizeof(float));
    }
}

// Computes outputs n to n + width - 1 of `rows` rows, at least two.
WITH_AMX static void multiply_group(const struct product *p, int64_t N, int64_t begin, int64_t rows, int64_t n, int64_t width,
                                    int64_t *configured_rows) {
    struct group group;
    int64_t pairs = ratio_up(rows, 2 * TILE);
    memset(group.zero_points, 0, sizeof group.zero_points);
    for (int64_t first = 0; first < p->K; first += PIECE) {
        int64_t last = smaller(first + PIECE, p->K);
        pack(p, N, n, width, first, last, &group);
        for (int64_t pair = 0, row = 0, pair_rows; pair < pairs; pair++, row += pair_rows) {
            pair_rows = (rows - row) / (pairs - pair);
            if (pair_rows != *configured_rows) configure(*configured_rows = pair_rows);
            for (int t = 0; t < TILES; t += 2)
                multiply_tiles(p, p->q + (begin + row) * p->q_row, pair_rows - pair_rows / 2, first, last,
                               (const packed_tile (*)[TILES])(group.weights[0] + t), (wide_ints (*)[TILES])(group.sums[row] + t));
        }
    }
    write_outputs(p, N, begin, rows, n, width, &group);
}

void matmul_amx(const struct product *p, int64_t N, int64_t begin, int64_t end) {
    struct configuration before;         // another library may have configured this thread's tiles
    int64_t groups = ratio_up(p->R, GROUP_ROWS), configured_rows = 0;
    store_configuration(&before);
    for (int64_t n = begin; n < end; n += GROUP_OUTPUTS)
        for (int64_t group = 0, row = 0, rows; group < groups; group++, row += rows) {
            rows = (p->R - row) / (groups - group);
            multiply_group(p, N, row, rows, n, smaller(GROUP_OUTPUTS, end - n), &configured_rows);
        }
    load_configuration(&before);
}

#endif
