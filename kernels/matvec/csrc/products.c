// A tile is a few rows of W times a few rows of x, whose sums stay in registers. The rows of W in a tile are far from each other,
// so that each is the next of a long stretch that is read in order: of neighbours the CPU would fetch ahead what has been read.

#include "products.h"

enum { AHEAD = 512 };                    // bytes that are fetched ahead of a row of W

#ifdef __AVX512F__
enum { WIDE = 16, MOST_ROWS = 8, COLUMNS = 3 };
#else
enum { WIDE = 8, MOST_ROWS = 4, COLUMNS = 3 };
#endif

typedef float wide VECTOR(WIDE);
typedef int32_t wide_ints VECTOR(WIDE);
typedef uint16_t wide_halves VECTOR(WIDE);
typedef int16_t pairs VECTOR(2 * WIDE);
typedef int8_t bytes VECTOR(4 * WIDE);

INLINE wide wide_fused(wide a, wide b, wide c) { return __builtin_elementwise_fma(a, b, c); }
INLINE wide wide_same(float x) { return (wide)x; }
INLINE void wide_put(float *p, wide x) { memcpy(p, &x, sizeof x); }

INLINE int32_t sum_of_ints(wide_ints x) { return __builtin_reduce_add(x); }

#ifdef __AVX512F__
INLINE float sum_of_wide(wide x) { return sum_of(x.lo + x.hi); }
#else
INLINE float sum_of_wide(wide x) { return sum_of(x); }
#endif

// The first n numbers of `size` bytes, of a vector of `most`; the others are 0.
INLINE void read_first(void *vector, const void *p, int64_t n, int64_t most, int64_t size) {
    if (n >= most) {
        memcpy(vector, p, (size_t)(most * size));
        return;
    }
    memset(vector, 0, (size_t)(most * size));
    memcpy(vector, p, (size_t)(n * size));
}

INLINE wide wide_floats(const void *p, int64_t n) {
    wide x;
    read_first(&x, p, n, WIDE, 4);
    return x;
}

INLINE wide wide_bfloats(const void *p, int64_t n) {
    wide_halves x;
    read_first(&x, p, n, WIDE, 2);
    return __builtin_bit_cast(wide, __builtin_convertvector(x, wide_ints) << 16);
}

INLINE bytes wide_bytes(const void *p, int64_t n) {
    bytes x;
    read_first(&x, p, n, 4 * WIDE, 1);
    return x;
}

INLINE void fetch_ahead(const void *p) { __builtin_prefetch((const char *)p + AHEAD, 0, 3); }

// Of x, whole numbers from 0 to 127, with AVX-512 to 255, and w, bytes with a sign: the products, of which neighbours are added
// up, two (each sum fits into 16 bits) or four.
#if defined __AVX512F__
INLINE wide_ints add_products(wide_ints sums, bytes x, bytes w) {
    return (wide_ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
}
#elif defined __AVX2__
INLINE pairs products_of_pairs(bytes x, bytes w) { return (pairs)_mm256_maddubs_epi16((__m256i)x, (__m256i)w); }

INLINE wide_ints add_products(wide_ints sums, bytes x, bytes w) {
    return sums + (wide_ints)_mm256_madd_epi16((__m256i)products_of_pairs(x, w), _mm256_set1_epi16(1));
}
#else
INLINE pairs products_of_pairs(bytes x, bytes w) {
    int8x16_t of_x[2], of_w[2];
    int16x8_t sums[2];
    memcpy(of_x, &x, sizeof x);
    memcpy(of_w, &w, sizeof w);
    UNROLLED for (int half = 0; half < 2; half++)
        sums[half] = vpaddq_s16(vmull_s8(vget_low_s8(of_x[half]), vget_low_s8(of_w[half])), vmull_high_s8(of_x[half], of_w[half]));
    pairs found;
    memcpy(&found, sums, sizeof found);
    return found;
}

INLINE wide_ints add_products(wide_ints sums, bytes x, bytes w) {
    int32x4_t four_sums[2];
    memcpy(four_sums, &sums, sizeof sums);
#ifdef __ARM_FEATURE_DOTPROD
    int8x16_t of_x[2], of_w[2];
    memcpy(of_x, &x, sizeof x);
    memcpy(of_w, &w, sizeof w);
    UNROLLED for (int half = 0; half < 2; half++) four_sums[half] = vdotq_s32(four_sums[half], of_x[half], of_w[half]);
#else
    pairs of_pairs = products_of_pairs(x, w);
    int16x8_t eight[2];
    memcpy(eight, &of_pairs, sizeof of_pairs);
    UNROLLED for (int half = 0; half < 2; half++) four_sums[half] = vpadalq_s16(four_sums[half], eight[half]);
#endif
    memcpy(&sums, four_sums, sizeof sums);
    return sums;
}
#endif

INLINE int64_t size_in(enum kind kind) { return kind == OF_FLOAT32 ? 4 : kind == OF_INT8 ? 1 : 2; }

INLINE wide read_weights(enum kind kind, const void *p, int64_t n) {
    return kind == OF_FLOAT32 ? wide_floats(p, n) : wide_bfloats(p, n);
}

// the products of n <= WIDE numbers from k on
INLINE void add_floats(const struct product *p, int rows, int columns, const uint8_t *const *w, const float *x, int64_t k,
                       int64_t n, wide (*acc)[COLUMNS]) {
    int64_t place = k * size_in(p->kind);
    wide weights[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        fetch_ahead(w[j] + place);
        weights[j] = read_weights(p->kind, w[j] + place, n);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        wide values = wide_floats(x + i * p->x_row + k, n);
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = wide_fused(weights[j], values, acc[i][j]);
    }
}

INLINE void put_sums(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first, wide (*acc)[COLUMNS]) {
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = sum_of_wide(acc[i][j]);
}

INLINE void set_to_0(int rows, int columns, wide (*acc)[COLUMNS]) {
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = wide_same(0.0f);
}

INLINE void tile_of_floats(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    int64_t K = p->K, k = 0;
    const uint8_t *w[COLUMNS];
    wide acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) w[j] = (const uint8_t *)p->w + ns[j] * K * size_in(p->kind);
    set_to_0(rows, columns, acc);
    const float *x = p->x + first * p->x_row;
    for (; k + WIDE <= K; k += WIDE) add_floats(p, rows, columns, w, x, k, WIDE, acc);
    if (k < K) add_floats(p, rows, columns, w, x, k, K - k, acc);
    put_sums(p, rows, columns, ns, first, acc);
}

#ifdef __AVX512BF16__

// x and W in bfloat16: a lane adds up the products of pairs of neighbours
INLINE void add_bfloat16(const struct product *p, int rows, int columns, const uint16_t *const *w, const uint8_t *q, int64_t k,
                         int64_t n, wide (*acc)[COLUMNS]) {
    bytes weights[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        fetch_ahead(w[j] + k);
        weights[j] = wide_bytes(w[j] + k, 2 * n);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        bytes values = wide_bytes(q + i * p->q_row + k * 2, 2 * n);
        UNROLLED for (int j = 0; j < columns; j++)
            acc[i][j] = (wide)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)weights[j], (__m512bh)values);
    }
}

INLINE void tile_of_bfloat16(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    int64_t K = p->K, k = 0;
    const uint16_t *w[COLUMNS];
    wide acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) w[j] = (const uint16_t *)p->w + ns[j] * K;
    set_to_0(rows, columns, acc);
    const uint8_t *q = p->q + first * p->q_row;
    for (; k + 32 <= K; k += 32) add_bfloat16(p, rows, columns, w, q, k, 32, acc);
    if (k < K) add_bfloat16(p, rows, columns, w, q, k, K - k, acc);
    put_sums(p, rows, columns, ns, first, acc);
}

#endif

// added: the sums of what the offset has added to x
INLINE void add_int8(const struct product *p, int rows, int columns, const int8_t *const *w, const uint8_t *q, int64_t k, int64_t n,
                     wide_ints (*acc)[COLUMNS], wide_ints *added) {
    bytes weights[COLUMNS], offset = (bytes)(int8_t)p->offset;
    UNROLLED for (int j = 0; j < columns; j++) {
        fetch_ahead(w[j] + k);
        weights[j] = wide_bytes(w[j] + k, n);
        added[j] = add_products(added[j], offset, weights[j]);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        bytes values = wide_bytes(q + i * p->q_row + k, n);
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = add_products(acc[i][j], values, weights[j]);
    }
}

INLINE void tile_of_int8(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    int64_t K = p->K, k = 0;
    const int8_t *w[COLUMNS];
    wide_ints acc[MOST_ROWS][COLUMNS], added[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        w[j] = (const int8_t *)p->w + ns[j] * K;
        added[j] = (wide_ints)0;
        UNROLLED for (int i = 0; i < rows; i++) acc[i][j] = (wide_ints)0;
    }
    const uint8_t *q = p->q + first * p->q_row;
    for (; k + 4 * WIDE <= K; k += 4 * WIDE) add_int8(p, rows, columns, w, q, k, 4 * WIDE, acc, added);
    if (k < K) add_int8(p, rows, columns, w, q, k, K - k, acc, added);
    UNROLLED for (int j = 0; j < columns; j++)
        UNROLLED for (int i = 0; i < rows; i++) {
            float total = (float)sum_of_ints(acc[i][j] - added[j]) * ((const float *)p->scale)[ns[j]];
            if (p->in_steps) total *= p->x[(first + i) * p->x_row];
            p->y[(first + i) * p->y_row + ns[j]] = total;
        }
}

#ifdef __AVX512F__

// 64 bytes of words 4h to 4h + 3 of eight groups, so that four neighbouring bytes are of one group: for group g the words 4h and
// 4h + 1 in place g, and the others in place 8 + g
INLINE bytes by_group(bytes words) {
    return (bytes)__builtin_shufflevector((pairs)words, (pairs)words, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15,
                                          16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31);
}

// where by_group puts element e of group g, of 256 bytes: the low nibbles of words 0 to 3, their high nibbles, and those of the
// others
INLINE int place_of(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2, byte = e % 2;
    return word / 4 * 128 + nibble * 64 + word % 4 / 2 * 32 + g * 4 + word % 2 * 2 + byte;
}

// W in int4: the sum over groups of scale step sum(q x) + shift sum(x). A vector holds half of the products' sum of group g in
// place g, the other half in place 8 + g.
INLINE void tile_of_int4(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    int64_t blocks = (p->K + BLOCK - 1) / BLOCK;
    wide acc[MOST_ROWS][COLUMNS];
    set_to_0(rows, columns, acc);
    const uint8_t *q = p->q + first * p->q_row;
    const float *x = p->x + first * p->x_row;
    for (int64_t block = 0; block < blocks; block++)
        UNROLLED for (int j = 0; j < columns; j++) {
            int64_t place = ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + place * BLOCK / 2;
            bytes nibbles[4];
            UNROLLED for (int h = 0; h < 2; h++) {
                fetch_ahead(w + h * 64);
                bytes words = by_group(wide_bytes(w + h * 64, 64));
                nibbles[2 * h] = words & 15;
                nibbles[2 * h + 1] = (bytes)((pairs)words >> 4) & 15;
            }
            floats scale = of_groups(p->scale, place), shift = of_groups(p->shift, place), none = same(0.0f);
            wide scales, shifts;
            scales.lo = scale, scales.hi = scale, shifts.lo = shift, shifts.hi = none;
            UNROLLED for (int i = 0; i < rows; i++) {
                const float *steps_and_sums = x + i * p->x_row + block * 16;
                wide_ints whole = (wide_ints)0;
                UNROLLED for (int part = 0; part < 4; part++)
                    whole = add_products(whole, nibbles[part], wide_bytes(q + i * p->q_row + block * BLOCK + part * 64, 64));
                wide steps, sums;
                steps.lo = at(steps_and_sums), steps.hi = steps.lo, sums.lo = at(steps_and_sums + 8), sums.hi = none;
                acc[i][j] = wide_fused(__builtin_convertvector(whole, wide) * steps, scales, wide_fused(shifts, sums, acc[i][j]));
            }
        }
    put_sums(p, rows, columns, ns, first, acc);
}

#else

// where element e of group g stands in 256 bytes of x: for two words of eight groups the low nibbles, then the high ones
INLINE int place_of(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2;
    return word / 2 * 64 + nibble * 32 + word % 2 * 16 + g * 2 + e % 2;
}

INLINE void tile_of_int4(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    int64_t blocks = (p->K + BLOCK - 1) / BLOCK;
    wide acc[MOST_ROWS][COLUMNS];
    set_to_0(rows, columns, acc);
    for (int64_t block = 0; block < blocks; block++)
        UNROLLED for (int j = 0; j < columns; j++) {
            int64_t place = ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + place * BLOCK / 2;
            pairs whole[MOST_ROWS];
            UNROLLED for (int i = 0; i < rows; i++) whole[i] = (pairs)0;
            UNROLLED for (int part = 0; part < 4; part++) {
                bytes words = wide_bytes(w + part * 32, 32), lows = words & 15, highs = (bytes)((pairs)words >> 4) & 15;
                UNROLLED for (int i = 0; i < rows; i++) {
                    const uint8_t *q = p->q + (first + i) * p->q_row + block * BLOCK + part * 64;
                    whole[i] += products_of_pairs(lows, wide_bytes(q, 32));
                    whole[i] += products_of_pairs(highs, wide_bytes(q + 32, 32));
                }
            }
            fetch_ahead(w);
            fetch_ahead(w + 64);
            floats scales = of_groups(p->scale, place), shifts = of_groups(p->shift, place);
            UNROLLED for (int i = 0; i < rows; i++) {
                const float *steps_and_sums = p->x + (first + i) * p->x_row + block * 16;
                ints sums = __builtin_convertvector(whole[i].lo, ints) + __builtin_convertvector(whole[i].hi, ints);
                floats products = __builtin_convertvector(sums, floats) * at(steps_and_sums);
                acc[i][j] = wide_fused(products, scales, wide_fused(shifts, at(steps_and_sums + 8), acc[i][j]));
            }
        }
    put_sums(p, rows, columns, ns, first, acc);
}

#endif

INLINE void tile(const struct product *p, int rows, int columns, const int64_t *ns, int64_t first) {
    if (p->kind == OF_INT8) tile_of_int8(p, rows, columns, ns, first);
    else if (p->kind == OF_INT4) tile_of_int4(p, rows, columns, ns, first);
#ifdef __AVX512BF16__
    else if (p->kind == OF_BFLOAT16_BOTH) tile_of_bfloat16(p, rows, columns, ns, first);
#endif
    else tile_of_floats(p, rows, columns, ns, first);
}

INLINE void products_in(const struct product *p, int64_t begin, int64_t end) {
    int64_t stretch = (end - begin + COLUMNS - 1) / COLUMNS | 1;     // odd: a power of two apart, rows would share places in caches
    for (int64_t n = begin; n < begin + stretch && n < end; n++) {
        int64_t ns[COLUMNS], r = 0;
        UNROLLED for (int j = 0; j < COLUMNS; j++) ns[j] = n + j * stretch < end ? n + j * stretch : end - 1;
        if (MOST_ROWS == 8) for (; r + 8 <= p->R; r += 8) tile(p, MOST_ROWS, COLUMNS, ns, r);
        for (; r + 4 <= p->R; r += 4) tile(p, 4, COLUMNS, ns, r);
        for (; r < p->R; r++) tile(p, 1, COLUMNS, ns, r);
    }
}

#define PRODUCTS(name, of_kind) \
    static __attribute__((noinline)) void products_##name(const struct product *p, int64_t begin, int64_t end) { \
        struct product known = *p; \
        known.kind = of_kind; \
        products_in(&known, begin, end); \
    }

PRODUCTS(float32, OF_FLOAT32)
PRODUCTS(bfloat16, OF_BFLOAT16)
#ifdef __AVX512BF16__
PRODUCTS(bfloat16_both, OF_BFLOAT16_BOTH)
#else
#define products_bfloat16_both products_bfloat16         // of floats that are rounded
#endif
PRODUCTS(int8, OF_INT8)
PRODUCTS(int4, OF_INT4)

void products(const struct product *p, int64_t begin, int64_t end) {
    switch (p->kind) {
    case OF_FLOAT32: products_float32(p, begin, end); break;
    case OF_BFLOAT16: products_bfloat16(p, begin, end); break;
    case OF_BFLOAT16_BOTH: products_bfloat16_both(p, begin, end); break;
    case OF_INT8: products_int8(p, begin, end); break;
    case OF_INT4: products_int4(p, begin, end); break;
    }
}

enum { VECTORS = PART / WIDE };

INLINE void add_column(enum kind kind, int rows, const void *w, int64_t k, const float *x, int64_t x_row, wide (*acc)[VECTORS]) {
    wide weights[VECTORS];
    UNROLLED for (int c = 0; c < VECTORS; c++)
        weights[c] = read_weights(kind, (const uint8_t *)w + (k * PART + c * WIDE) * size_in(kind), WIDE);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = wide_fused(weights[c], wide_same(x[i * x_row + k]), acc[i][c]);
}

INLINE void one_part(enum kind kind, const struct product *p, int rows, int64_t n, int64_t first) {
    const uint8_t *w = (const uint8_t *)p->w + n * p->K * size_in(kind);
    const float *x = p->x + first * p->x_row;
    float *y = p->y + first * p->y_row + n;
    wide acc[MOST_ROWS][VECTORS];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = wide_same(0.0f);
    SEVERAL for (int64_t k = 0; k < p->K; k++) add_column(kind, rows, w, k, x, p->x_row, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) wide_put(y + i * p->y_row + c * WIDE, acc[i][c]);
}

INLINE void parts_in(enum kind kind, const struct product *p, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += PART) {
        int64_t r = 0;
        for (; r + 4 <= p->R; r += 4) one_part(kind, p, 4, n, r);
        for (; r < p->R; r++) one_part(kind, p, 1, n, r);
    }
}

void products_by_input(const struct product *p, int64_t begin, int64_t end) {
    if (p->kind == OF_FLOAT32) parts_in(OF_FLOAT32, p, begin, end);
    else parts_in(OF_BFLOAT16, p, begin, end);
}

// Sparse inputs. SOME inputs at a time, those that are not 0 in all of some rows are listed; what W has for them is fetched
// LATER inputs before it is needed. One row has MOST_VECTORS of sums in registers, four have as many each as fit.
enum { SOME = 512, LATER = 6, MOST_VECTORS = 8, FOUR_VECTORS = WIDE == 16 ? 4 : 2 };

// A number of x; rounded to bfloat16 where those of this kind are.
INLINE float input(enum kind kind, float x) {
    if (kind != OF_BFLOAT16_BOTH) return x;
    return of_bfloat16(as_bfloat16(same(x)))[0];
}

INLINE int64_t list_inputs(const struct product *p, int rows, int64_t first, int64_t k, int64_t end, int32_t *list) {
    int64_t n = 0;
    const float *x = p->x + first * p->x_row;
    for (; k < end; k++) {
        int any_is = 0;
        UNROLLED for (int i = 0; i < rows; i++) any_is |= x[i * p->x_row + k] != 0.0f;
        list[n] = (int32_t)k;
        n += any_is;
    }
    for (int64_t i = 0; i < LATER; i++) list[n + i] = n ? list[n - 1] : 0;
    return n;
}

// outputs n to n + width - 1, at most `vectors` vectors
INLINE void sparse_tile(enum kind kind, const struct product *p, int rows, int vectors, int64_t N, int64_t first, int64_t n,
                        int64_t width) {
    const uint8_t *w = (const uint8_t *)p->w + n * size_in(kind);
    const float *x = p->x + first * p->x_row;
    float *y = p->y + first * p->y_row + n;
    wide acc[4][MOST_VECTORS];
    int32_t list[SOME + LATER];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < vectors; c++) acc[i][c] = wide_same(0.0f);
    for (int64_t k = 0; k < p->K; k += SOME) {
        int64_t listed = list_inputs(p, rows, first, k, k + SOME < p->K ? k + SOME : p->K, list);
        for (int64_t at = 0; at < listed; at++) {
            const uint8_t *column = w + list[at] * N * size_in(kind), *later = w + list[at + LATER] * N * size_in(kind);
            UNROLLED for (int64_t byte = 0; byte < vectors * WIDE * size_in(kind); byte += 64) __builtin_prefetch(later + byte, 0, 3);
            float values[4];
            UNROLLED for (int i = 0; i < rows; i++) values[i] = input(kind, x[i * p->x_row + list[at]]);
            UNROLLED for (int c = 0; c < vectors; c++) {
                if (c * WIDE >= width) break;
                wide weights = read_weights(kind, column + c * WIDE * size_in(kind), width - c * WIDE);
                UNROLLED for (int i = 0; i < rows; i++)
                    acc[i][c] = wide_fused(weights, wide_same(values[i]), acc[i][c]);
            }
        }
    }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < vectors; c++)
            for (int64_t l = 0; l < WIDE && c * WIDE + l < width; l++) y[i * p->y_row + c * WIDE + l] = acc[i][c][l];
}

INLINE void sparse_tiles(enum kind kind, const struct product *p, int rows, int vectors, int64_t N, int64_t first, int64_t begin,
                         int64_t end) {
    int64_t n = begin;
    for (; n + vectors * WIDE <= end; n += vectors * WIDE) sparse_tile(kind, p, rows, vectors, N, first, n, vectors * WIDE);
    if (n < end) sparse_tile(kind, p, rows, vectors, N, first, n, end - n);
}

INLINE void sparse_in(enum kind kind, const struct product *p, int64_t N, int64_t begin, int64_t end) {
    int64_t r = 0;
    for (; r + 4 <= p->R; r += 4) sparse_tiles(kind, p, 4, FOUR_VECTORS, N, r, begin, end);
    for (; r < p->R; r++) sparse_tiles(kind, p, 1, MOST_VECTORS, N, r, begin, end);
}

void products_of_sparse(const struct product *p, int64_t N, int64_t begin, int64_t end) {
    if (p->kind == OF_FLOAT32) sparse_in(OF_FLOAT32, p, N, begin, end);
    else if (p->kind == OF_BFLOAT16) sparse_in(OF_BFLOAT16, p, N, begin, end);
    else sparse_in(OF_BFLOAT16_BOTH, p, N, begin, end);
}

// 8 numbers of x rounded to bfloat16: in q, or where the CPU has no products of them, in `rounded`
INLINE void halve(const float *x, float *rounded, uint8_t *q) {
    halves half = as_bfloat16(at(x));
#ifdef __AVX512BF16__
    (void)rounded, memcpy(q, &half, sizeof half);
#else
    (void)q, put(rounded, of_bfloat16(half));
#endif
}

// The largest of 8 lanes, at least 1e-30. NaN where a lane of `unordered` is set: the maximum drops a NaN that it meets.
INLINE float largest_lane(floats largest, ints unordered) {
    if (any(unordered)) return __builtin_nanf("");
    float top = 1e-30f;
    UNROLLED for (int l = 0; l < 8; l++) top = largest[l] > top ? largest[l] : top;
    return top;
}

// The row x (K) in whole steps of its largest magnitude, to which the offset is added: bytes in q, and the size of a step, which is
// NaN where a number of x is. K is a multiple of 8.
INLINE float round_row(const float *x, uint8_t *q, int64_t K, int64_t steps, int64_t offset) {
    floats largest = same(0.0f);
    ints unordered = (ints)0;
    for (int64_t k = 0; k < K; k += 8) {
        floats values = at(x + k);
        unordered |= values != values;
        if (offset) values = __builtin_elementwise_abs(values);
        largest = larger(values, largest);
    }
    float top = largest_lane(largest, unordered);
    for (int64_t k = 0; k < K; k += 8) {
        ints whole = __builtin_convertvector(nearest(at(x + k) / top * (float)steps), ints) + (int32_t)offset;
        whole = __builtin_elementwise_max(__builtin_elementwise_min(whole, (ints)255), (ints)0);
        uint8_t VECTOR(8) eight = __builtin_convertvector(whole, uint8_t VECTOR(8));
        memcpy(q + k, &eight, sizeof eight);
    }
    return top / (float)steps;
}

// A block of the row x (K) for a product in int4: bytes in q in the order of place_of; in y the steps of the eight groups, and
// their sums, which are NaN where a number of the group is. Each group is rounded to 127 steps of its largest magnitude. K is a
// multiple of 8.
INLINE void arrange_block(const float *x, uint8_t *q, float *y, int64_t K, int64_t block) {
    for (int g = 0; g < 8; g++) {
        int64_t first = block * BLOCK + g * GROUP, vectors = K - first >= GROUP ? 4 : K - first > 0 ? (K - first) / 8 : 0;
        floats values[4], largest = same(0.0f);
        ints unordered = (ints)0;
        for (int v = 0; v < 4; v++) {
            values[v] = v < vectors ? at(x + first + v * 8) : same(0.0f);
            unordered |= values[v] != values[v];
            largest = larger(__builtin_elementwise_abs(values[v]), largest);
        }
        float top = largest_lane(largest, unordered);
        uint32_t total = 0;              // NaN becomes the least integer, and several of these have no sum in int32
        int32_t whole[GROUP];
        for (int v = 0; v < 4; v++) {
            ints rounded = __builtin_convertvector(nearest(values[v] * (127.0f / top)), ints);
            memcpy(whole + v * 8, &rounded, sizeof rounded);
        }
        for (int e = 0; e < GROUP; e++) {
            total += (uint32_t)whole[e];
            q[block * BLOCK + place_of(g, e)] = (uint8_t)whole[e];
        }
        y[block * 16 + g] = top / 127.0f;
        y[block * 16 + 8 + g] = (float)(int32_t)total * (top / 127.0f);
    }
}

void prepare(enum kind kind, const float *x, int64_t K, int64_t first, int64_t n, int64_t steps, int64_t offset, float *floats,
             uint8_t *q) {
    if (kind == OF_BFLOAT16_BOTH) for (int64_t k = first; k < first + n; k += 8) halve(x + k, floats + k, q + 2 * k);
    if (kind == OF_INT8) *floats = round_row(x, q, K, steps, offset);
    if (kind == OF_INT4)
        for (int64_t block = first / BLOCK; block * BLOCK < first + n; block++) arrange_block(x, q, floats, K, block);
}
