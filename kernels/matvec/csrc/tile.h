// A tile is a few rows of W times a few rows of x, with its sums in registers. Its rows of W are far apart, so that each advances
// through its own stretch of W; with adjacent rows, the hardware prefetcher would fetch rows that have already been read.

#pragma once
#include "products.h"

enum { PREFETCH_BYTES = 512 };           // prefetch distance along a row of W

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

INLINE void prefetch_ahead(const void *p) { __builtin_prefetch((const char *)p + PREFETCH_BYTES, 0, 3); }

INLINE void store_sums(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = wide_hsum(acc[i][j]);
}

INLINE void clear(int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns; j++) acc[i][j] = wide_splat(0.0f);
}

// Computes outputs ns[j], j < columns, of rows first to first + rows - 1.
typedef void tile_function(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first);

// Outputs begin <= n < end of all rows, tile by tile. `tile` must be a constant, to be inlined.
INLINE void matmul_range(const struct product *p, int64_t begin, int64_t end, tile_function *tile) {
    int64_t stretch = (end - begin + COLUMNS - 1) / COLUMNS | 1;     // odd: a power of two would collide in the cache sets
    for (int64_t n = begin; n < begin + stretch && n < end; n++) {
        int64_t ns[COLUMNS], r = 0;
        UNROLL for (int j = 0; j < COLUMNS; j++) ns[j] = n + j * stretch < end ? n + j * stretch : end - 1;
        if (MAX_ROWS == 8) for (; r + 8 <= p->R; r += 8) tile(p, MAX_ROWS, COLUMNS, ns, r);
        for (; r + 4 <= p->R; r += 4) tile(p, 4, COLUMNS, ns, r);
        for (; r < p->R; r++) tile(p, 1, COLUMNS, ns, r);
    }
}
