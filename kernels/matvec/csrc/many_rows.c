// Products of many float32 rows with a bfloat16 W, for prompts on a CPU without bfloat16 instructions.
//
// y (R,N) = x (R,K) W^T. x is first copied into tiles of TILE_ROWS rows. W is converted to float32 and transposed, a panel of PANEL
// outputs and DEPTH inputs at a time, and each panel is multiplied by all tiles. An output is a sum of sums of DEPTH products, each
// added input by input, so a row's bits depend neither on the other rows nor on the level.

#include "tile.h"
#include "../../native/csrc/threads.h"

#ifdef __AVX512F__
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 6 };
#endif
enum {
    PANEL = 2 * WIDE, DEPTH = BLOCK,
    PANELS = 4, ROWS = 192,              // panels and rows of x that stay in L2; the panel in use stays in L1
};

// Copies x (R,K) to tiles (R / TILE_ROWS,K,TILE_ROWS), and pads the last tile with rows of zeros. A task is a tile.
struct tiles_call {
    int64_t R, K;
    const float *x;
    float *tiles;
};

static void arrange_tiles(struct tasks *tasks, int64_t thread) {
    const struct tiles_call *call = tasks->call;
    int64_t K = call->K;
    (void)thread;
    for (int64_t first; (first = next_task(tasks) * TILE_ROWS) < call->R;) {
        const float *x = call->x + first * K;
        float *tile = call->tiles + first * K;
        int64_t rows = smaller(call->R - first, TILE_ROWS);
        if (rows < TILE_ROWS) memset(tile, 0, (size_t)(K * TILE_ROWS) * sizeof *tile);
        for (int64_t k = 0; k < K; k++)
            for (int64_t r = 0; r < rows; r++) tile[k * TILE_ROWS + r] = x[r * K + k];
    }
}

ENTRY(matvec_tiles, struct tiles_call) { parallel_for(arrange_tiles, call, threads); }

// A task is PANELS * PANEL outputs.
struct many_rows_call {
    int64_t N, K, R;
    const uint16_t *w;
    const float *tiles;
    float *y;
};

// Converts inputs k to k + depth - 1 of outputs n to n + columns - 1 to a panel (depth,PANEL), whose other columns are 0.
static void convert_panel(const struct many_rows_call *call, int64_t n, int64_t columns, int64_t k, int64_t depth, float *panel) {
    float rows[PANEL * DEPTH];
    memset(rows + columns * DEPTH, 0, (size_t)((PANEL - columns) * DEPTH) * sizeof *rows);
    for (int64_t j = 0; j < columns; j++) {
        const uint16_t *w = call->w + (n + j) * call->K + k;
        for (int64_t i = 0; i < depth; i += 8) store(rows + j * DEPTH + i, load_partial(BFLOAT16, w, i, smaller(depth - i, 8)));
    }
    transpose(panel, PANEL, rows, DEPTH, PANEL, ratio_up(depth, 4) * 4);
}

// Multiplies a tile by a panel, and writes the product's first `rows` rows and `columns` columns to y, or adds them if `adds`.
INLINE void multiply_panel(const float *panel, const float *tile, int64_t depth, int64_t rows, int64_t columns, int adds,
                           float *y, int64_t y_row) {
    wide sums[TILE_ROWS][2];
    UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int v = 0; v < 2; v++) sums[r][v] = wide_splat(0.0f);
    for (int64_t r = 0; r < rows; r++) __builtin_prefetch(y + r * y_row, 1, 3);
    UNROLL_4 for (int64_t k = 0; k < depth; k++) {
        wide w[2];
        memcpy(w, panel + k * PANEL, sizeof w);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            wide x = wide_splat(tile[k * TILE_ROWS + r]);
            UNROLL for (int v = 0; v < 2; v++) sums[r][v] = wide_fma(x, w[v], sums[r][v]);
        }
    }
    if (rows == TILE_ROWS && columns == PANEL) {
        UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int v = 0; v < 2; v++) {
            float *out = y + r * y_row + v * WIDE;
            wide_store(out, adds ? load_wide(out, WIDE) + sums[r][v] : sums[r][v]);
        }
        return;
    }
    float product[TILE_ROWS][PANEL];
    memcpy(product, sums, sizeof product);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) y[r * y_row + j] = adds ? y[r * y_row + j] + product[r][j] : product[r][j];
}

static void multiply_many_rows(struct tasks *tasks, int64_t thread) {
    const struct many_rows_call *call = tasks->call;
    float panels[PANELS][DEPTH * PANEL];
    (void)thread;
    for (int64_t n; (n = next_task(tasks) * PANELS * PANEL) < call->N;) {
        int64_t count = smaller(ratio_up(call->N - n, PANEL), PANELS);
        for (int64_t k = 0; k < call->K; k += DEPTH) {
            int64_t depth = smaller(call->K - k, DEPTH);
            for (int64_t i = 0; i < count; i++)
                convert_panel(call, n + i * PANEL, smaller(call->N - n - i * PANEL, PANEL), k, depth, panels[i]);
            for (int64_t block = 0; block < call->R; block += ROWS)
                for (int64_t i = 0; i < count; i++)
                    for (int64_t first = block; first < smaller(block + ROWS, call->R); first += TILE_ROWS)
                        multiply_panel(panels[i], call->tiles + first * call->K + k * TILE_ROWS, depth,
                                       smaller(call->R - first, TILE_ROWS), smaller(call->N - n - i * PANEL, PANEL), k > 0,
                                       call->y + first * call->N + n + i * PANEL, call->N);
        }
    }
}

ENTRY(matvec_many_rows, struct many_rows_call) { parallel_for(multiply_many_rows, call, threads); }
