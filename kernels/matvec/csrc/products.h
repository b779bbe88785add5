// y[r,n] = sum_k x[r,k] W[n,k] for a few rows of x, in the vector instructions of x86-64 CPUs.
//
// W in float32, bfloat16, int8 or int4, as kernels/matvec/__init__.py packs it. An output is the sum of chains, one for each lane
// of a vector, of which each adds up its products in order, whatever the number of rows is: a row's result does not depend, to the
// bit, on the rows beside it. Compiled for the levels of kernels/backends/bitcode.py.
//
// A tile is a few rows of W times a few rows of x, whose sums stay in registers. The rows of W in a tile are far from each other,
// so that each is the next of a long stretch that is read in order: of neighbours the CPU would fetch ahead what has been read.

#pragma once
#include "../../backends/csrc/vectors.h"

enum form { FLOAT32, BFLOAT16, BFLOAT16_BOTH, INT8, INT4 };       // of W; BOTH: x is bfloat16, too
enum {
    GROUP = 32,              // of int4: neighbours that share a scale
    BLOCK = 8 * GROUP,       // of int4: eight groups, side by side
    AHEAD = 512,             // bytes that are fetched ahead of a row of W
};

#ifdef __AVX512F__

enum { LANES = 16, MOST_ROWS = 8, COLUMNS = 3 };
typedef __m512 floats;

INLINE floats zeros(void) { return _mm512_setzero_ps(); }
INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats same(float x) { return _mm512_set1_ps(x); }
INLINE void store(float *at, floats v) { _mm512_storeu_ps(at, v); }
INLINE __m256 halves(floats v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

// n <= LANES numbers, in float32; the others are 0
INLINE floats load(enum form form, const void *at, long n) {
    __mmask16 mask = n >= LANES ? 0xFFFF : (1u << n) - 1;
    if (form == FLOAT32) return _mm512_maskz_loadu_ps(mask, at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16));
}

#else

enum { LANES = 8, MOST_ROWS = 4, COLUMNS = 3 };
typedef __m256 floats;

INLINE floats zeros(void) { return _mm256_setzero_ps(); }
INLINE floats fused(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats same(float x) { return _mm256_set1_ps(x); }
INLINE void store(float *at, floats v) { _mm256_storeu_ps(at, v); }
INLINE __m256 halves(floats v) { return v; }

INLINE floats load(enum form form, const void *at, long n) {
    uint8_t buffer[32] = {0};
    long size = form == FLOAT32 ? 4 : 2;
    if (n < LANES) {
        for (long i = 0; i < n * size; i++) buffer[i] = ((const uint8_t *)at)[i];
        at = buffer;
    }
    if (form == FLOAT32) return _mm256_loadu_ps(at);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
}

#endif

INLINE int sum8_int(__m256i v) {
    __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    __m128i twos = _mm_add_epi32(fours, _mm_unpackhi_epi64(fours, fours));
    return _mm_cvtsi128_si32(twos) + _mm_extract_epi32(twos, 1);
}

INLINE __m256 bfloats8(const uint16_t *at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)at)), 16));
}

// What a product works on. x: its rows are x_row numbers apart. q, whose rows are q_row bytes apart, is what halve, round_row and
// arrange_block have written; x is then not read (bfloat16), or holds the size of a step (int8) or steps and sums of groups (int4).
struct product {
    enum form form;
    const void *w, *scale, *shift;       // of W (N,K); scale and shift as in Packed
    const float *x;
    const uint8_t *q;
    float *y;
    long R, K, x_row, q_row, y_row;
    int offset;                          // of int8: what was added to each whole number of x
    int in_steps;                        // of int8: y is multiplied by the size of a step of its row
};

// the products of n <= LANES numbers from k on
INLINE void add_floats(const struct product *p, int rows, int columns, const uint8_t *const *w, const float *x, long k, long n,
                       floats (*acc)[COLUMNS]) {
    long at = k * (p->form == FLOAT32 ? 4 : 2);
    floats weights[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        _mm_prefetch((const char *)w[j] + at + AHEAD, _MM_HINT_T0);
        weights[j] = load(p->form, w[j] + at, n);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        floats values = load(FLOAT32, x + i * p->x_row + k, n);
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = fused(weights[j], values, acc[i][j]);
    }
}

INLINE void tile_of_floats(const struct product *p, int rows, int columns, const long *ns, long first) {
    long K = p->K, k = 0;
    const uint8_t *w[COLUMNS];
    floats acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) w[j] = (const uint8_t *)p->w + ns[j] * K * (p->form == FLOAT32 ? 4 : 2);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = zeros();
    const float *x = p->x + first * p->x_row;
    for (; k + LANES <= K; k += LANES) add_floats(p, rows, columns, w, x, k, LANES, acc);
    if (k < K) add_floats(p, rows, columns, w, x, k, K - k, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = sum8(halves(acc[i][j]));
}

#ifdef __AVX512BF16__

// x and W in bfloat16: a lane adds up the products of pairs of neighbours
INLINE void add_bfloat16(const struct product *p, int rows, int columns, const uint16_t *const *w, const uint8_t *q, long k,
                         long n, floats (*acc)[COLUMNS]) {
    __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
    __m512bh weights[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        _mm_prefetch((const char *)(w[j] + k) + AHEAD, _MM_HINT_T0);
        weights[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w[j] + k);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        __m512bh values = (__m512bh)_mm512_maskz_loadu_epi16(mask, q + i * p->q_row + k * 2);
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], weights[j], values);
    }
}

INLINE void tile_of_bfloat16(const struct product *p, int rows, int columns, const long *ns, long first) {
    long K = p->K, k = 0;
    const uint16_t *w[COLUMNS];
    floats acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) w[j] = (const uint16_t *)p->w + ns[j] * K;
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = zeros();
    const uint8_t *q = p->q + first * p->q_row;
    for (; k + 32 <= K; k += 32) add_bfloat16(p, rows, columns, w, q, k, 32, acc);
    if (k < K) add_bfloat16(p, rows, columns, w, q, k, K - k, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = sum8(halves(acc[i][j]));
}

#endif

#ifdef __AVX512F__

INLINE int sum16_int(__m512i v) {
    return sum8_int(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}

// added: the sums of what the offset has added to x
INLINE void add_int8(const struct product *p, int rows, int columns, const int8_t *const *w, const uint8_t *q, long k, long n,
                     __m512i (*acc)[COLUMNS], __m512i *added) {
    __mmask64 mask = n >= 64 ? ~0ull : (1ull << n) - 1;
    __m512i weights[COLUMNS], offset = _mm512_set1_epi8((char)p->offset);
    UNROLLED for (int j = 0; j < columns; j++) {
        _mm_prefetch((const char *)w[j] + k + AHEAD, _MM_HINT_T0);
        weights[j] = _mm512_maskz_loadu_epi8(mask, w[j] + k);
        added[j] = _mm512_dpbusd_epi32(added[j], offset, weights[j]);
    }
    UNROLLED for (int i = 0; i < rows; i++) {
        __m512i values = _mm512_maskz_loadu_epi8(mask, q + i * p->q_row + k);
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], values, weights[j]);
    }
}

INLINE void tile_of_int8(const struct product *p, int rows, int columns, const long *ns, long first) {
    long K = p->K, k = 0;
    const int8_t *w[COLUMNS];
    __m512i acc[MOST_ROWS][COLUMNS], added[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        w[j] = (const int8_t *)p->w + ns[j] * K;
        added[j] = _mm512_setzero_si512();
        UNROLLED for (int i = 0; i < rows; i++) acc[i][j] = _mm512_setzero_si512();
    }
    const uint8_t *q = p->q + first * p->q_row;
    for (; k + 64 <= K; k += 64) add_int8(p, rows, columns, w, q, k, 64, acc, added);
    if (k < K) add_int8(p, rows, columns, w, q, k, K - k, acc, added);
    UNROLLED for (int j = 0; j < columns; j++)
        UNROLLED for (int i = 0; i < rows; i++) {
            float total = (float)sum16_int(_mm512_sub_epi32(acc[i][j], added[j])) * ((const float *)p->scale)[ns[j]];
            if (p->in_steps) total *= p->x[(first + i) * p->x_row + K];
            p->y[(first + i) * p->y_row + ns[j]] = total;
        }
}

// 64 bytes of words 4h to 4h + 3 of eight groups, so that four neighbouring bytes are of one group: for group g the words 4h and
// 4h + 1 in place g, and the others in place 8 + g
INLINE __m512i by_group(__m512i words) {
    const __m512i order = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16,
                                           15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    return _mm512_permutexvar_epi16(order, words);
}

// where by_group puts element e of group g, of 256 bytes: the low nibbles of words 0 to 3, their high nibbles, and those of the others
INLINE int place_of(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2, byte = e % 2;
    return word / 4 * 128 + nibble * 64 + word % 4 / 2 * 32 + g * 4 + word % 2 * 2 + byte;
}

// W in int4: the sum over groups of scale step sum(q x) + shift sum(x). A vector holds half of the products' sum of group g in
// place g, the other half in place 8 + g.
INLINE void tile_of_int4(const struct product *p, int rows, int columns, const long *ns, long first) {
    const __m512i low = _mm512_set1_epi8(15);
    long blocks = (p->K + BLOCK - 1) / BLOCK;
    floats acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = zeros();
    const uint8_t *q = p->q + first * p->q_row;
    const float *x = p->x + first * p->x_row;
    for (long block = 0; block < blocks; block++)
        UNROLLED for (int j = 0; j < columns; j++) {
            long at = ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + at * BLOCK / 2;
            __m512i nibbles[4];
            UNROLLED for (int h = 0; h < 2; h++) {
                _mm_prefetch((const char *)w + h * 64 + AHEAD, _MM_HINT_T0);
                __m512i words = by_group(_mm512_loadu_si512(w + h * 64));
                nibbles[2 * h] = _mm512_and_si512(words, low);
                nibbles[2 * h + 1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
            }
            floats scales = _mm512_broadcast_f32x8(bfloats8((const uint16_t *)p->scale + at * 8));
            floats shifts = _mm512_zextps256_ps512(bfloats8((const uint16_t *)p->shift + at * 8));
            UNROLLED for (int i = 0; i < rows; i++) {
                const float *of_groups = x + i * p->x_row + block * 16;
                __m512i whole = _mm512_setzero_si512();
                UNROLLED for (int part = 0; part < 4; part++)
                    whole = _mm512_dpbusd_epi32(whole, nibbles[part],
                                                _mm512_loadu_si512(q + i * p->q_row + block * BLOCK + part * 64));
                floats steps = _mm512_broadcast_f32x8(_mm256_loadu_ps(of_groups));
                floats sums = _mm512_maskz_loadu_ps(0xFF, of_groups + 8);
                acc[i][j] = fused(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), steps), scales, fused(shifts, sums, acc[i][j]));
            }
        }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = sum8(halves(acc[i][j]));
}

#else

// 32 bytes, of which n <= 32 are read; the others are 0
INLINE __m256i bytes(const void *at, long n) {
    uint8_t buffer[32] = {0};
    if (n >= 32) return _mm256_loadu_si256(at);
    for (long i = 0; i < n; i++) buffer[i] = ((const uint8_t *)at)[i];
    return _mm256_loadu_si256((const void *)buffer);
}

// the products of 32 bytes, four neighbours added up; x has 7 bits, so that two of them fit into 16 bits
INLINE __m256i dot(__m256i x, __m256i w) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1));
}

INLINE void tile_of_int8(const struct product *p, int rows, int columns, const long *ns, long first) {
    long K = p->K;
    const int8_t *w[COLUMNS];
    __m256i acc[MOST_ROWS][COLUMNS], added[COLUMNS];
    UNROLLED for (int j = 0; j < columns; j++) {
        w[j] = (const int8_t *)p->w + ns[j] * K;
        added[j] = _mm256_setzero_si256();
        UNROLLED for (int i = 0; i < rows; i++) acc[i][j] = _mm256_setzero_si256();
    }
    __m256i offset = _mm256_set1_epi8((char)p->offset);
    const uint8_t *q = p->q + first * p->q_row;
    for (long k = 0; k < K; k += 32) {
        __m256i weights[COLUMNS];
        UNROLLED for (int j = 0; j < columns; j++) {
            _mm_prefetch((const char *)w[j] + k + AHEAD, _MM_HINT_T0);
            weights[j] = bytes(w[j] + k, K - k);
            added[j] = _mm256_add_epi32(added[j], dot(offset, weights[j]));
        }
        UNROLLED for (int i = 0; i < rows; i++) {
            __m256i values = bytes(q + i * p->q_row + k, K - k);
            UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = _mm256_add_epi32(acc[i][j], dot(values, weights[j]));
        }
    }
    UNROLLED for (int j = 0; j < columns; j++)
        UNROLLED for (int i = 0; i < rows; i++) {
            float total = (float)sum8_int(_mm256_sub_epi32(acc[i][j], added[j])) * ((const float *)p->scale)[ns[j]];
            if (p->in_steps) total *= p->x[(first + i) * p->x_row + K];
            p->y[(first + i) * p->y_row + ns[j]] = total;
        }
}

// where element e of group g stands in 256 bytes of x: for two words of eight groups the low nibbles, then the high ones
INLINE int place_of(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2;
    return word / 2 * 64 + nibble * 32 + word % 2 * 16 + g * 2 + e % 2;
}

INLINE void tile_of_int4(const struct product *p, int rows, int columns, const long *ns, long first) {
    const __m256i low = _mm256_set1_epi8(15);
    long blocks = (p->K + BLOCK - 1) / BLOCK;
    floats acc[MOST_ROWS][COLUMNS];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) acc[i][j] = zeros();
    for (long block = 0; block < blocks; block++)
        UNROLLED for (int j = 0; j < columns; j++) {
            long at = ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + at * BLOCK / 2;
            __m256i whole[MOST_ROWS];
            UNROLLED for (int i = 0; i < rows; i++) whole[i] = _mm256_setzero_si256();
            UNROLLED for (int part = 0; part < 4; part++) {
                __m256i words = _mm256_loadu_si256((const void *)(w + part * 32));
                __m256i lows = _mm256_and_si256(words, low), highs = _mm256_and_si256(_mm256_srli_epi16(words, 4), low);
                UNROLLED for (int i = 0; i < rows; i++) {
                    const uint8_t *q = p->q + (first + i) * p->q_row + block * BLOCK + part * 64;
                    whole[i] = _mm256_add_epi16(whole[i], _mm256_maddubs_epi16(lows, _mm256_loadu_si256((const void *)q)));
                    whole[i] = _mm256_add_epi16(whole[i], _mm256_maddubs_epi16(highs, _mm256_loadu_si256((const void *)(q + 32))));
                }
            }
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)w + AHEAD + 64, _MM_HINT_T0);
            floats scales = bfloats8((const uint16_t *)p->scale + at * 8), shifts = bfloats8((const uint16_t *)p->shift + at * 8);
            UNROLLED for (int i = 0; i < rows; i++) {
                const float *of_groups = p->x + (first + i) * p->x_row + block * 16;
                __m256i sums = _mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(whole[i])),
                                                _mm256_cvtepi16_epi32(_mm256_extracti128_si256(whole[i], 1)));
                floats products = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_loadu_ps(of_groups));
                acc[i][j] = fused(products, scales, fused(shifts, _mm256_loadu_ps(of_groups + 8), acc[i][j]));
            }
        }
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int j = 0; j < columns; j++) p->y[(first + i) * p->y_row + ns[j]] = sum8(acc[i][j]);
}

#endif

INLINE void tile(const struct product *p, int rows, int columns, const long *ns, long first) {
    if (p->form == INT8) tile_of_int8(p, rows, columns, ns, first);
    else if (p->form == INT4) tile_of_int4(p, rows, columns, ns, first);
#ifdef __AVX512BF16__
    else if (p->form == BFLOAT16_BOTH) tile_of_bfloat16(p, rows, columns, ns, first);
#endif
    else tile_of_floats(p, rows, columns, ns, first);
}

// outputs begin <= n < end of all rows
INLINE void products(const struct product *p, long begin, long end) {
    long stretch = (end - begin + COLUMNS - 1) / COLUMNS | 1;     // odd: a power of two apart, rows would share places in caches
    for (long n = begin; n < begin + stretch && n < end; n++) {
        long ns[COLUMNS], r = 0;
        UNROLLED for (int j = 0; j < COLUMNS; j++) ns[j] = n + j * stretch < end ? n + j * stretch : end - 1;
        if (MOST_ROWS == 8) for (; r + 8 <= p->R; r += 8) tile(p, 8, COLUMNS, ns, r);
        for (; r + 4 <= p->R; r += 4) tile(p, 4, COLUMNS, ns, r);
        for (; r < p->R; r++) tile(p, 1, COLUMNS, ns, r);
    }
}

#ifdef __AVX512BF16__
enum { BOTH = BFLOAT16_BOTH };           // the form of a product in bfloat16
#else
enum { BOTH = BFLOAT16 };
#endif

// 8 numbers of x rounded to bfloat16, for a product in the form BOTH: in q, or where the CPU has no products of them, in rounded
INLINE void halve(const float *x, float *rounded, uint16_t *q) {
    __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x));
    __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));       // a half is rounded to the even one
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
    if (BOTH == BFLOAT16) {
        _mm256_storeu_ps(rounded, _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000))));
    } else {
        bits = _mm256_srli_epi32(bits, 16);
        _mm_storeu_si128((void *)q, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
    }
}

// The largest of 8 lanes, at least 1e-30. NaN where a lane of `unordered` is set: max drops a NaN that it meets.
INLINE float largest_lane(__m256 largest, __m256 unordered) {
    if (_mm256_movemask_ps(unordered)) return __builtin_nanf("");
    float lanes[8], top = 1e-30f;
    _mm256_storeu_ps(lanes, largest);
    UNROLLED for (int l = 0; l < 8; l++) top = lanes[l] > top ? lanes[l] : top;
    return top;
}

INLINE __m256 where_nan(__m256 values) { return _mm256_cmp_ps(values, values, _CMP_UNORD_Q); }

// The row x (K) in whole steps of its largest magnitude, to which steps + 1 is added where x may be negative: bytes in q, and the
// size of a step, which is NaN where a number of x is. K is a multiple of 8.
INLINE float round_row(const float *x, uint8_t *q, long K, int steps, int is_signed) {
    __m256 largest = _mm256_setzero_ps(), unordered = _mm256_setzero_ps();
    for (long k = 0; k < K; k += 8) {
        __m256 values = _mm256_loadu_ps(x + k);
        unordered = _mm256_or_ps(unordered, where_nan(values));
        if (is_signed) values = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values);
        largest = _mm256_max_ps(largest, values);
    }
    float top = largest_lane(largest, unordered);
    for (long k = 0; k < K; k += 8) {
        __m256 scaled = _mm256_mul_ps(_mm256_div_ps(_mm256_loadu_ps(x + k), _mm256_set1_ps(top)), _mm256_set1_ps((float)steps));
        __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(scaled), _mm256_set1_epi32(is_signed ? steps + 1 : 0));
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((void *)(q + k), _mm_packus_epi16(words, words));
    }
    return top / (float)steps;
}

// A block of the row x (K) for a product in int4: bytes in q in the order of place_of; in y the steps of the eight groups, and
// their sums, which are NaN where a number of the group is. Each group is rounded to 127 steps of its largest magnitude. K is a
// multiple of 8.
INLINE void arrange_block(const float *x, uint8_t *q, float *y, long K, long block) {
    for (int g = 0; g < 8; g++) {
        long first = block * BLOCK + g * GROUP, vectors = K - first >= GROUP ? 4 : K - first > 0 ? (K - first) / 8 : 0;
        __m256 values[4], largest = _mm256_setzero_ps(), unordered = _mm256_setzero_ps();
        for (int v = 0; v < 4; v++) {
            values[v] = v < vectors ? _mm256_loadu_ps(x + first + v * 8) : _mm256_setzero_ps();
            unordered = _mm256_or_ps(unordered, where_nan(values[v]));
            largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values[v]));
        }
        float top = largest_lane(largest, unordered);
        int total = 0, whole[GROUP];
        for (int v = 0; v < 4; v++) {
            __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(values[v], _mm256_set1_ps(127.0f / top)));
            _mm256_storeu_si256((void *)(whole + v * 8), rounded);
        }
        for (int e = 0; e < GROUP; e++) {
            total += whole[e];
            q[block * BLOCK + place_of(g, e)] = (uint8_t)whole[e];
        }
        y[block * 16 + g] = top / 127.0f;
        y[block * 16 + 8 + g] = (float)total * (top / 127.0f);
    }
}
