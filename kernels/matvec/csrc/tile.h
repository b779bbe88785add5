// A tile is a few rows of W times up to MAX_ROWS rows of x, with its sums in registers. Its rows of W are far apart, so that each advances
// through its own stretch of W; with adjacent rows, the hardware prefetcher would fetch rows that have already been read.

#pragma once
#include "products.h"

enum {
    PREFETCH_BYTES = 2048,               // prefetch distance along a row of W, where a tile reads whole rows
    NEAR_BYTES = 1 << 15,                // of a tile's rows of x, to stay in the L1 cache while they are multiplied by rows of W
    FAR_BYTES = 1 << 18,                 // of rows of W, to stay in the L2 cache while several tiles of x are multiplied by them
    SAVED_TILES = 16,                    // whose sums are saved from one piece of K to the next
};

#ifdef __AVX512F__
enum { WIDE = 16, MAX_ROWS = 8, COLUMNS = 3 };
#else
enum { WIDE = 8, MAX_ROWS = 4, COLUMNS = 3 };
#endif

typedef float wide VECTOR(WIDE);
typedef int32_t wide_ints VECTOR(WIDE);
typedef uint16_t wide_bfloats VECTOR(WIDE);
typedef int16_t pairs VECTOR(2 * WIDE);
typedef int8_t bytes VECTOR(4 * WIDE);

INLINE wide wide_fma(wide a, wide b, wide c) { return __builtin_elementwise_fma(a, b, c); }
INLINE wide wide_splat(float x) { return (wide)x; }
INLINE void wide_store(float *p, wide x) { memcpy(p, &x, sizeof x); }

INLINE int32_t hsum_ints(wide_ints x) { return __builtin_reduce_add(x); }

#ifdef __AVX512F__
INLINE float wide_hsum(wide x) { return hsum(x.lo + x.hi); }
#else
INLINE float wide_hsum(wide x) { return hsum(x); }
#endif

// Loads the first n of `lanes` elements of `size` bytes; zeros the rest.
INLINE void load_first(void *vector, const void *p, int64_t n, int64_t lanes, int64_t size) {
    if (n >= lanes) {
        memcpy(vector, p, (size_t)(lanes * size));
        return;
    }
    memset(vector, 0, (size_t)(lanes * size));
    memcpy(vector, p, (size_t)(n * size));
}

INLINE wide load_wide(const void *p, int64_t n) {
    wide x;
    load_first(&x, p, n, WIDE, 4);
    return x;
}

INLINE wide load_wide_bfloat16(const void *p, int64_t n) {
    wide_bfloats x;
    load_first(&x, p, n, WIDE, 2);
    return __builtin_bit_cast(wide, __builtin_convertvector(x, wide_ints) << 16);
}

INLINE bytes load_bytes(const void *p, int64_t n) {
    bytes x;
    load_first(&x, p, n, 4 * WIDE, 1);
    return x;
}

// Inputs k to end - 1 of a tile: rows ns[j] of W, j < columns, and rows of x from `first` on.
struct piece {
    int64_t ns[COLUMNS], first, k, end;
    int64_t ahead;                       // bytes from a weight to the one that is prefetched beside it
    void *sums;                          // the tile's sums of the inputs before k, and then of those before `end`
};

INLINE void prefetch_ahead(const struct piece *piece, const void *p) { __builtin_prefetch((const char *)p + piece->ahead, 0, 3); }

typedef wide sums[MAX_ROWS + 1][COLUMNS];                // one row more for int8's zero points

// Sums of the inputs before a piece.
INLINE void load_sums(const struct piece *piece, int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++)
            acc[i][j] = piece->k ? ((const wide (*)[COLUMNS])piece->sums)[i][j] : wide_splat(0.0f);
}

INLINE void save_sums(const struct piece *piece, int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) ((wide (*)[COLUMNS])piece->sums)[i][j] = acc[i][j];
}

// Saves the sums, or writes the outputs after the last piece.
INLINE void store_sums(const struct product *p, int rows, int columns, const struct piece *piece, wide (*acc)[COLUMNS]) {
    if (piece->end < p->K) {
        save_sums(piece, rows, columns, acc);
        return;
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) p->y[(piece->first + i) * p->y_row + piece->ns[j]] = wide_hsum(acc[i][j]);
}

// Adds a piece's products.
typedef void tile_function(const struct product *p, int rows, int columns, const struct piece *piece);

INLINE void tile_of_rows(const struct product *p, int64_t rows, const struct piece *piece, tile_function *tile) {
    switch (rows) {
    case 1: tile(p, 1, COLUMNS, piece); break;
    case 2: tile(p, 2, COLUMNS, piece); break;
    case 3: tile(p, 3, COLUMNS, piece); break;
    case 4: tile(p, 4, COLUMNS, piece); break;
    case 5: if (MAX_ROWS == 8) tile(p, 5, COLUMNS, piece); break;
    case 6: if (MAX_ROWS == 8) tile(p, 6, COLUMNS, piece); break;
    case 7: if (MAX_ROWS == 8) tile(p, 7, COLUMNS, piece); break;
    case 8: if (MAX_ROWS == 8) tile(p, 8, COLUMNS, piece); break;
    }
}

INLINE int64_t ratio_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Outputs begin <= n < end of all rows, tile by tile. `tile` must be a constant, to be inlined. w_bytes: of BLOCK weights of a row;
// x_bytes: of an input, 0 to multiply whole rows. Rows of x are divided into tiles of about the same size.
INLINE void matmul_range(const struct product *p, int64_t begin, int64_t end, tile_function *tile, int64_t w_bytes,
                         int64_t x_bytes) {
    int64_t K = p->K, row_bytes = ratio_up(K * w_bytes, BLOCK), blocks = ratio_up(K, BLOCK);
    int64_t row_tiles = ratio_up(p->R, MAX_ROWS), most_rows = row_tiles ? ratio_up(p->R, row_tiles) : 0;
    int64_t pieces = most_rows > 1 ? ratio_up(most_rows * blocks * BLOCK * x_bytes, NEAR_BYTES) : 1;
    int64_t piece_size = ratio_up(blocks, pieces > 1 ? pieces : 1) * BLOCK;
    int64_t stretch = ratio_up(end - begin, COLUMNS) | 1;        // odd: a power of two would collide in the cache sets
    int64_t together = stretch;                                  // of `stretch`, multiplied by one tile of x, or one piece
    sums saved[SAVED_TILES];
    struct piece piece;
    if (row_tiles > 1) together = least(together, ratio_up(FAR_BYTES, COLUMNS * row_bytes + 1));
    if (piece_size < K) together = least(together, SAVED_TILES);
    for (int64_t block = 0; block < least(stretch, end - begin); block += together) {
        int64_t last = least(block + together, least(stretch, end - begin)) - 1;
        piece.first = 0;
        for (int64_t row_tile = 0; row_tile < row_tiles; row_tile++) {
            int64_t rows = (p->R - piece.first) / (row_tiles - row_tile);
            piece.end = 0;
            do {
                piece.k = piece.end, piece.end = least(piece.k + piece_size, K);
                for (int64_t i = block; i <= last; i++) {
                    UNROLL for (int j = 0; j < COLUMNS; j++) piece.ns[j] = least(begin + i + j * stretch, end - 1);
                    piece.sums = saved[piece_size < K ? i - block : 0];
                    if (piece_size >= K) piece.ahead = PREFETCH_BYTES;
                    else if (i < last) piece.ahead = row_bytes;
                    else piece.ahead = piece_size / BLOCK * w_bytes - (last - block) * row_bytes;
                    tile_of_rows(p, rows, &piece, tile);
                }
            } while (piece.end < K);
            piece.first += rows;
        }
    }
}
