// A tile is a few rows of W times up to MAX_ROWS rows of x, with its sums in registers. Its rows of W are far apart, each in a
// stretch of its own; if they were adjacent, the hardware prefetcher would fetch rows that have already been read.

#pragma once
#include "products.h"

enum {
    PREFETCH_BYTES = 2048,               // prefetch distance along a row of W, if a tile reads whole rows
    L1_BYTES = 1 << 15,                  // size of a tile's rows of x, which stay in L1 while they are multiplied by rows of W
    L2_BYTES = 1 << 18,                  // size of the rows of W that stay in L2 while they are multiplied by several tiles of x
    SAVED_TILES = 16,                    // number of tiles whose sums are saved between two pieces of K
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

// Dot products of unsigned x (0 to 128; to 255 with VNNI) and signed w: multiply_pairs returns sums of two neighbouring products,
// which fit into 16 bits; dot_add adds four products to a 32-bit sum. dot_add_signed takes a signed x, -127 to 127. HAS_DOT:
// dot_add is one instruction.
#if defined __AVX512F__ || defined __AVXVNNI__
#define HAS_VNNI
#define HAS_DOT
INLINE wide_ints dot_add(wide_ints sums, bytes x, bytes w) {
#ifdef __AVX512F__
    return (wide_ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#else
    return (wide_ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)w);
#endif
}

INLINE wide_ints dot_add_signed(wide_ints sums, bytes x, bytes w) {
    return dot_add(sums, x ^ (bytes)(int8_t)-128, w) - dot_add((wide_ints)0, (bytes)(int8_t)-128, w);
}
#endif

#if defined __AVX2__ && !defined __AVX512F__
INLINE pairs multiply_pairs(bytes x, bytes w) { return (pairs)_mm256_maddubs_epi16((__m256i)x, (__m256i)w); }
#endif

#if defined __AVX2__ && !defined HAS_VNNI
INLINE wide_ints add_pairs(wide_ints sums, pairs x) {
    return sums + (wide_ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1));
}

INLINE wide_ints dot_add(wide_ints sums, bytes x, bytes w) { return add_pairs(sums, multiply_pairs(x, w)); }

INLINE wide_ints dot_add_signed(wide_ints sums, bytes x, bytes w) {
    return dot_add(sums, (bytes)_mm256_abs_epi8((__m256i)w), (bytes)_mm256_sign_epi8((__m256i)x, (__m256i)w));
}
#endif

#ifdef __aarch64__
#ifdef __ARM_FEATURE_DOTPROD
#define HAS_DOT
#endif
INLINE pairs multiply_pairs(bytes x, bytes w) {
    int8x16_t x_halves[2], w_halves[2];
    int16x8_t sums[2];
    memcpy(x_halves, &x, sizeof x);
    memcpy(w_halves, &w, sizeof w);
    UNROLL for (int half = 0; half < 2; half++)
        sums[half] = vpaddq_s16(vmull_s8(vget_low_s8(x_halves[half]), vget_low_s8(w_halves[half])),
                                vmull_high_s8(x_halves[half], w_halves[half]));
    pairs result;
    memcpy(&result, sums, sizeof result);
    return result;
}

INLINE wide_ints dot_add(wide_ints sums, bytes x, bytes w) {
    int32x4_t four_sums[2];
    memcpy(four_sums, &sums, sizeof sums);
#ifdef __ARM_FEATURE_DOTPROD
    int8x16_t x_halves[2], w_halves[2];
    memcpy(x_halves, &x, sizeof x);
    memcpy(w_halves, &w, sizeof w);
    UNROLL for (int half = 0; half < 2; half++) four_sums[half] = vdotq_s32(four_sums[half], x_halves[half], w_halves[half]);
#else
    pairs pairwise = multiply_pairs(x, w);
    int16x8_t eight[2];
    memcpy(eight, &pairwise, sizeof pairwise);
    UNROLL for (int half = 0; half < 2; half++) four_sums[half] = vpadalq_s16(four_sums[half], eight[half]);
#endif
    memcpy(&sums, four_sums, sizeof sums);
    return sums;
}

INLINE wide_ints dot_add_signed(wide_ints sums, bytes x, bytes w) { return dot_add(sums, x, w); }
#endif

// Alternates blocks of `step` lanes from a and from b: the even blocks of both, or the odd ones.
INLINE wide_ints every(int step, int odd, wide_ints a, wide_ints b) {
#ifdef __AVX512F__
    if (step == 1) return odd ? __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
                              : __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    if (step == 2) return odd ? __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
                              : __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    if (step == 4) return odd ? __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
                              : __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    return odd ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
               : __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
#else
    if (step == 1) return odd ? __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
                              : __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    if (step == 2) return odd ? __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
                              : __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    return odd ? __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
               : __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
#endif
}

// Transposes a WIDE x WIDE matrix.
INLINE void transpose_wide(wide_ints *rows) {
    UNROLL for (int step = 1; step < WIDE; step *= 2)
        UNROLL for (int i = 0; i < WIDE; i++)
            if (!(i & step)) {
                wide_ints a = rows[i], b = rows[i + step];
                rows[i] = every(step, 0, a, b);
                rows[i + step] = every(step, 1, a, b);
            }
}

// Interleave a and b within each 128 bits: 8 bytes or 4 pairs of bytes of each, beginning with number `first`.
#define LANE_BYTES(i, n) i, n + i, i + 1, n + i + 1, i + 2, n + i + 2, i + 3, n + i + 3, \
                         i + 4, n + i + 4, i + 5, n + i + 5, i + 6, n + i + 6, i + 7, n + i + 7
#define LANE_PAIRS(i, n) i, n + i, i + 1, n + i + 1, i + 2, n + i + 2, i + 3, n + i + 3
#ifdef __AVX512F__
#define ZIP_BYTES(a, b, first) __builtin_shufflevector( \
    a, b, LANE_BYTES(first, 64), LANE_BYTES(16 + first, 64), LANE_BYTES(32 + first, 64), LANE_BYTES(48 + first, 64))
#define ZIP_PAIRS(a, b, first) (bytes)__builtin_shufflevector( \
    (pairs)a, (pairs)b, LANE_PAIRS(first, 32), LANE_PAIRS(8 + first, 32), LANE_PAIRS(16 + first, 32), LANE_PAIRS(24 + first, 32))
#else
#define ZIP_BYTES(a, b, first) __builtin_shufflevector(a, b, LANE_BYTES(first, 32), LANE_BYTES(16 + first, 32))
#define ZIP_PAIRS(a, b, first) (bytes)__builtin_shufflevector((pairs)a, (pairs)b, LANE_PAIRS(first, 16), LANE_PAIRS(8 + first, 16))
#endif

// Interleaves a group's weights of four inputs: lane 4 l + i of quads[v] contains those of output 16 l + 4 v + i.
INLINE void interleave(const bytes *w, bytes *quads) {
    bytes low_01 = ZIP_BYTES(w[0], w[1], 0), high_01 = ZIP_BYTES(w[0], w[1], 8);
    bytes low_23 = ZIP_BYTES(w[2], w[3], 0), high_23 = ZIP_BYTES(w[2], w[3], 8);
    quads[0] = ZIP_PAIRS(low_01, low_23, 0), quads[1] = ZIP_PAIRS(low_01, low_23, 4);
    quads[2] = ZIP_PAIRS(high_01, high_23, 0), quads[3] = ZIP_PAIRS(high_01, high_23, 4);
}

// GGUF's blocks: returns the lane of sub-block n in a block's sums; arrange_sub_blocks moves its bytes to this lane.
INLINE int sub_block_lane(int n) {
    int in_128_bits = WIDE / 4, in_set = n % WIDE;
    return n / WIDE * WIDE + in_set % in_128_bits * 4 + in_set / in_128_bits;
}

// A part of a tile: inputs k to end - 1 of rows ns[j] of W, j < columns, and of the rows of x that start at row `first`.
struct piece {
    int64_t ns[COLUMNS], first, k, end;
    int64_t ahead;                       // prefetch distance in bytes
    void *sums;                          // the tile's sums over the inputs before k; on return, over those before `end`
};

INLINE void prefetch_ahead(const struct piece *piece, const void *p) { __builtin_prefetch((const char *)p + piece->ahead, 0, 3); }

typedef wide tile_sums[MAX_ROWS + 1][COLUMNS];           // the last row holds int8's zero points

// Loads the sums over the inputs before a piece. int8 passes vectors of integers: vectors may alias, and bits are only copied.
INLINE void load_sums(const struct piece *piece, int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++)
            acc[i][j] = piece->k ? ((const wide (*)[COLUMNS])piece->sums)[i][j] : wide_splat(0.0f);
}

INLINE void save_sums(const struct piece *piece, int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) ((wide (*)[COLUMNS])piece->sums)[i][j] = acc[i][j];
}

// Saves the sums; after the last piece, writes the outputs instead.
INLINE void store_sums(const struct product *p, int rows, int columns, const struct piece *piece, wide (*acc)[COLUMNS]) {
    if (piece->end < p->K) {
        save_sums(piece, rows, columns, acc);
        return;
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) p->y[(piece->first + i) * p->y_row + piece->ns[j]] = wide_hsum(acc[i][j]);
}

// Adds the products of a piece to the tile's sums.
typedef void tile_function(const struct product *p, int rows, int columns, const struct piece *piece);

// Runs `call` with a constant `rows` that equals `number`, 1 to MAX_ROWS.
#define WITH_ROWS(number, call) \
    switch (number) { \
    case 1: { enum { rows = 1 }; call; break; } \
    case 2: { enum { rows = 2 }; call; break; } \
    case 3: { enum { rows = 3 }; call; break; } \
    case 4: { enum { rows = 4 }; call; break; } \
    case 5: if (MAX_ROWS == 8) { enum { rows = 5 }; call; } break; \
    case 6: if (MAX_ROWS == 8) { enum { rows = 6 }; call; } break; \
    case 7: if (MAX_ROWS == 8) { enum { rows = 7 }; call; } break; \
    case 8: if (MAX_ROWS == 8) { enum { rows = 8 }; call; } break; \
    }

INLINE int64_t ratio_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Computes outputs begin <= n < end of all rows, tile by tile; the tiles have about the same number of rows. `tile` must be a
// constant, so that it is inlined. w_bytes: size of BLOCK weights of a row. x_bytes: size of an input; 0: do not divide K.
INLINE void matmul_range(const struct product *p, int64_t begin, int64_t end, tile_function *tile, int64_t w_bytes,
                         int64_t x_bytes) {
    int64_t K = p->K, row_bytes = ratio_up(K * w_bytes, BLOCK), blocks = ratio_up(K, BLOCK);
    int64_t row_tiles = ratio_up(p->R, MAX_ROWS), most_rows = row_tiles ? ratio_up(p->R, row_tiles) : 0;
    int64_t pieces = most_rows > 1 ? ratio_up(most_rows * blocks * BLOCK * x_bytes, L1_BYTES) : 1;
    int64_t piece_size = ratio_up(blocks, pieces > 1 ? pieces : 1) * BLOCK;
    int64_t stretch = ratio_up(end - begin, COLUMNS) | 1;        // odd, because powers of two collide in the cache sets
    int64_t together = stretch;                                  // steps of `stretch` that reuse a tile of x or a piece of it
    tile_sums saved[SAVED_TILES];
    struct piece piece;
    if (row_tiles > 1) together = smaller(together, ratio_up(L2_BYTES, COLUMNS * row_bytes + 1));
    if (piece_size < K) together = smaller(together, SAVED_TILES);
    for (int64_t block = 0; block < smaller(stretch, end - begin); block += together) {
        int64_t last = smaller(block + together, smaller(stretch, end - begin)) - 1;
        piece.first = 0;
        for (int64_t row_tile = 0; row_tile < row_tiles; row_tile++) {
            int64_t n_rows = (p->R - piece.first) / (row_tiles - row_tile);
            piece.end = 0;
            do {
                piece.k = piece.end, piece.end = smaller(piece.k + piece_size, K);
                for (int64_t i = block; i <= last; i++) {
                    UNROLL for (int j = 0; j < COLUMNS; j++) piece.ns[j] = smaller(begin + i + j * stretch, end - 1);
                    piece.sums = saved[piece_size < K ? i - block : 0];
                    if (piece_size >= K) piece.ahead = PREFETCH_BYTES;
                    else if (i < last) piece.ahead = row_bytes;
                    else piece.ahead = piece_size / BLOCK * w_bytes - (last - block) * row_bytes;
                    WITH_ROWS(n_rows, tile(p, rows, COLUMNS, &piece));
                }
            } while (piece.end < K);
            piece.first += n_rows;
        }
    }
}
