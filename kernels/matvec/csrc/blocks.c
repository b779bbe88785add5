// Products of GGUF's blocks, read in place: W (N,K), each row a series of blocks of 32 or 256 neighbours.
//
//     Q8_0    half d, int8 q[32]                                                w = d q
//     Q4_0    half d, nibbles[16]                                               w = d (q - 8)
//     Q4_1    half d, m, nibbles[16]                                            w = d q + m
//     Q5_0    half d, bits[4], nibbles[16]                                      w = d (q - 16)
//     Q5_1    half d, m, bits[4], nibbles[16]                                   w = d q + m
//     Q4_K    half d, m, scales[12], nibbles[128]                               w = d s q - m t
//     Q5_K    half d, m, scales[12], bits[32], nibbles[128]                     w = d s q - m t
//     Q6_K    nibbles[128], bits[64], int8 s[16], half d                        w = d s (q - 32)
//
// s and t belong to a group of 32 elements, or of 16 in Q6_K. Source of the layouts: ggml, src/ggml-common.h and the package gguf.
//
// Blocks are unpacked to their integers q, and multiplied by 8-bit x: products of a sub-block, 16 elements, are summed exactly, and
// then scaled. Eight neighbouring blocks of 32 are multiplied as one of 256; the last blocks of a row are padded with zeros.

#include "tile.h"
#include "../../native/csrc/threads.h"

enum {
    SMALL_BLOCK = 32,
    MOST_BYTES = 272,                    // largest size of 256 elements, that of Q8_0
    VECTORS = BLOCK / (4 * WIDE),        // vectors of bytes in 256 elements
    SETS = SUB_BLOCKS / WIDE,            // vectors of sums of a block's sub-blocks
    ROWS_TOGETHER = 64,                  // rows of x that stay in the cache beside W
};

typedef uint8_t VECTOR(16) bytes16;
typedef uint8_t VECTOR(32) bytes32;
typedef int8_t VECTOR(16) integers16;
typedef int8_t VECTOR(32) integers32;
typedef uint16_t VECTOR(2 * WIDE) words;

INLINE float load_half(const uint8_t *p) {
    _Float16 x;
    memcpy(&x, p, sizeof x);
    return (float)x;
}

INLINE int64_t block_bytes(enum kind kind) {
    switch (kind) {
    case W_Q8_0: return 34;
    case W_Q4_0: return 18;
    case W_Q4_1: return 20;
    case W_Q5_0: return 22;
    case W_Q5_1: return 24;
    case W_Q4_K: return 144;
    case W_Q5_K: return 176;
    default: return 210;
    }
}

INLINE int is_small(enum kind kind) { return kind <= W_Q5_1; }
INLINE int64_t block_size(enum kind kind) { return is_small(kind) ? SMALL_BLOCK : BLOCK; }
INLINE int64_t row_bytes(enum kind kind, int64_t K) { return K / block_size(kind) * block_bytes(kind); }

// Prefetches the 256 elements that are piece->ahead bytes after w.
INLINE void prefetch_block(enum kind kind, const struct piece *piece, const uint8_t *w) {
    UNROLL for (int64_t byte = 0; byte < row_bytes(kind, BLOCK); byte += 64) prefetch_ahead(piece, w + byte);
}

// Blocks of 32

// Returns 16 for each element e whose bit in the four bytes is set, 0 <= e < 32; otherwise 0.
INLINE integers32 fifth_bits(const uint8_t *p) {
    uint8_t VECTOR(4) bits;
    memcpy(&bits, p, sizeof bits);
    bytes32 repeated = __builtin_shufflevector(bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                               2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    bytes32 mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                    1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (integers32)((repeated & mask) != 0) & 16;
}

// Returns the low nibbles of 16 bytes, then their high nibbles.
INLINE integers32 nibbles(const uint8_t *p) {
    bytes16 both;
    memcpy(&both, p, sizeof both);
    bytes16 low = both & 15, high = both >> 4;
    return (integers32)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                               16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Returns the integers of a block; only those of Q8_0 are signed.
INLINE integers32 small_integers(enum kind kind, const uint8_t *block) {
    integers32 q;
    switch (kind) {
    case W_Q8_0: memcpy(&q, block + 2, sizeof q); return q;
    case W_Q4_0: return nibbles(block + 2);
    case W_Q4_1: return nibbles(block + 4);
    case W_Q5_0: return nibbles(block + 6) | fifth_bits(block + 2);
    default: return nibbles(block + 8) | fifth_bits(block + 4);
    }
}

INLINE int has_minimum(enum kind kind) { return kind == W_Q4_1 || kind == W_Q5_1; }
INLINE int8_t zero_point(enum kind kind) { return kind == W_Q4_0 ? 8 : kind == W_Q5_0 ? 16 : 0; }

INLINE void unpack_small(enum kind kind, const uint8_t *block, wide *w) {
    integers32 q = small_integers(kind, block) - zero_point(kind);
    wide scale = wide_splat(load_half(block)), shift = wide_splat(0.0f);
    int has_shift = has_minimum(kind);
    if (has_shift) shift = wide_splat(load_half(block + 2));
    UNROLL for (int v = 0; v < SMALL_BLOCK / WIDE; v++) {
        int8_t VECTOR(WIDE) some;
        memcpy(&some, (const char *)&q + v * WIDE, sizeof some);
        wide integers = __builtin_convertvector(some, wide);
        w[v] = has_shift ? wide_fma(integers, scale, shift) : integers * scale;
    }
}

// k-quants

// A block's scales: s and t of each sub-block, in the order of the elements (Q6_K has no t), and d and m.
struct scales {
    integers16 s, t;
    float d, m;
};

// Q4_K and Q5_K: reads eight s and eight t, of 6 bits each, from 12 bytes. Each belongs to two sub-blocks.
INLINE void read_six_bits(const uint8_t *p, struct scales *scales) {
    uint32_t words[3], s[4] = {0}, t[4] = {0};
    memcpy(words, p, sizeof words);
    s[0] = words[0] & 0x3F3F3F3F, s[1] = (words[2] & 0x0F0F0F0F) | (words[0] >> 2 & 0x30303030);
    t[0] = words[1] & 0x3F3F3F3F, t[1] = (words[2] >> 4 & 0x0F0F0F0F) | (words[1] >> 2 & 0x30303030);
    integers16 once;
    memcpy(&once, s, sizeof once);
    scales->s = __builtin_shufflevector(once, once, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    memcpy(&once, t, sizeof once);
    scales->t = __builtin_shufflevector(once, once, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}

INLINE struct scales read_scales(enum kind kind, const uint8_t *block) {
    struct scales scales = {.t = (integers16)0, .m = 0.0f};
    if (kind == W_Q6_K) {
        memcpy(&scales.s, block + 192, sizeof scales.s);
        scales.d = load_half(block + 208);
        return scales;
    }
    read_six_bits(block + 4, &scales);
    scales.d = load_half(block), scales.m = load_half(block + 2);
    return scales;
}

// Returns bytes p[0..31] once per group in a vector: once, or with AVX-512, where a vector has an even and an odd group, twice.
INLINE words load_for_groups(const uint8_t *p) {
    bytes32 x;
    memcpy(&x, p, sizeof x);
#ifdef __AVX512F__
    return (words)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                          0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    return (words)x;
#endif
}

// Returns `even` for the even groups of vector v, and `odd` for the odd ones.
INLINE words for_groups(uint16_t even, uint16_t odd, int v) {
#ifdef __AVX512F__
    (void)v;
    words x;
    x.lo = (uint16_t VECTOR(WIDE))even, x.hi = (uint16_t VECTOR(WIDE))odd;
    return x;
#else
    return (words)(v % 2 ? odd : even);
#endif
}

INLINE bytes and_bytes(words x, uint8_t mask) { return (bytes)x & (bytes)(int8_t)mask; }

// Returns q of elements 4 WIDE v to 4 WIDE (v + 1) - 1 of a block, or of eight blocks of 32. Only those of Q8_0 are signed.
INLINE bytes integers_at(enum kind kind, const uint8_t *block, int v) {
    int first = v * 4 * WIDE, part = first / 64;         // a part: 64 elements, two groups
    if (is_small(kind)) {
        integers32 q[2];
        bytes x;
        UNROLL for (int i = 0; i < WIDE / 8; i++) q[i] = small_integers(kind, block + (first / 32 + i) * block_bytes(kind));
        memcpy(&x, q, sizeof x);
        return x;
    }
    if (kind == W_Q6_K) {
        words low;
        memcpy(&low, block + part / 2 * 64 + first % 64, sizeof low);
        words two_bits = load_for_groups(block + 128 + part / 2 * 32) >> (for_groups(0, 2, v) + (uint16_t)(part % 2 * 4));
        return and_bytes(low >> (uint16_t)(part % 2 * 4), 15) | and_bytes(two_bits << 4, 48);
    }
    words low = load_for_groups(block + (kind == W_Q4_K ? 16 : 48) + part * 32);
    bytes q = and_bytes(low >> for_groups(0, 4, v), 15);
    if (kind == W_Q4_K) return q;
    words fifth = load_for_groups(block + 16) & for_groups((uint16_t)(0x101 << 2 * part), (uint16_t)(0x202 << 2 * part), v);
    return q | (((bytes)fifth != 0) & 16);
}

// zip_low and zip_high interleave the low or the high halves of each 128 bits of two vectors.
#ifdef __AVX512F__
INLINE wide_ints zip_low(wide_ints a, wide_ints b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
INLINE wide_ints zip_high(wide_ints a, wide_ints b) {
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
#else
INLINE wide_ints zip_low(wide_ints a, wide_ints b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
INLINE wide_ints zip_high(wide_ints a, wide_ints b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
#endif

// Rearranges a block's bytes so that each lane of four bytes belongs to one sub-block: of the four vectors of a set, vector c gets
// elements 4c to 4c + 3 of each sub-block, in the order of sub_block_lane.
INLINE void arrange_sub_blocks(bytes *x) {
    for (bytes *set = x; set < x + VECTORS; set += 4) {
        wide_ints a = (wide_ints)set[0], b = (wide_ints)set[1], c = (wide_ints)set[2], d = (wide_ints)set[3];
        wide_ints ab_low = zip_low(a, b), ab_high = zip_high(a, b), cd_low = zip_low(c, d), cd_high = zip_high(c, d);
        set[0] = (bytes)every(2, 0, ab_low, cd_low), set[1] = (bytes)every(2, 1, ab_low, cd_low);
        set[2] = (bytes)every(2, 0, ab_high, cd_high), set[3] = (bytes)every(2, 1, ab_high, cd_high);
    }
}

// Converts one number per sub-block to floats, in the order of sub_block_lane.
INLINE void arrange_scales(integers16 numbers, wide *x) {
#ifdef __AVX512F__
    numbers = __builtin_shufflevector(numbers, numbers, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    x[0] = __builtin_convertvector(numbers, wide);
#else
    numbers = __builtin_shufflevector(numbers, numbers, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    x[0] = __builtin_convertvector(numbers.lo, wide), x[1] = __builtin_convertvector(numbers.hi, wide);
#endif
}

// Converts the float16 numbers at byte `at` of each of eight blocks of 32 to floats, in the order of sub_block_lane.
INLINE void arrange_small_scales(enum kind kind, const uint8_t *blocks, int at, wide *x) {
    _Float16 VECTOR(8) halves;
    UNROLL for (int i = 0; i < 8; i++) memcpy((char *)&halves + 2 * i, blocks + i * block_bytes(kind) + at, 2);
    floats y = __builtin_convertvector(halves, floats);
#ifdef __AVX512F__
    x[0] = __builtin_shufflevector(y, y, 0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
#else
    x[0] = __builtin_shufflevector(y, y, 0, 1, 2, 3, 0, 1, 2, 3), x[1] = __builtin_shufflevector(y, y, 4, 5, 6, 7, 4, 5, 6, 7);
#endif
}

// Q8_0: Q8_OFFSET makes q unsigned where products require it
#ifdef HAS_VNNI
enum { Q8_OFFSET = 128 };
#else
enum { Q8_OFFSET = 0 };
#endif

// 256 elements of W for the products of tile_blocks
struct unpacked {
    bytes q[VECTORS];
    wide scales[SETS], shifts[SETS];
};

INLINE void unpack_small_scales(enum kind kind, const uint8_t *blocks, struct unpacked *w) {
    int subtracted = kind == W_Q8_0 ? Q8_OFFSET : zero_point(kind);
    arrange_small_scales(kind, blocks, 0, w->scales);
    if (has_minimum(kind)) arrange_small_scales(kind, blocks, 2, w->shifts);
    else UNROLL for (int set = 0; set < SETS; set++) w->shifts[set] = w->scales[set] * (float)-subtracted;
}

INLINE void unpack_k_scales(enum kind kind, const uint8_t *block, struct unpacked *w) {
    struct scales scales = read_scales(kind, block);
    arrange_scales(scales.s, w->scales);
    if (kind != W_Q6_K) arrange_scales(scales.t, w->shifts);
    UNROLL for (int set = 0; set < SETS; set++) {
        w->scales[set] *= scales.d;
        w->shifts[set] = kind == W_Q6_K ? w->scales[set] * -32.0f : w->shifts[set] * -scales.m;
    }
}

INLINE struct unpacked unpack(enum kind kind, const uint8_t *blocks) {
    struct unpacked w;
    UNROLL for (int v = 0; v < VECTORS; v++) {
        w.q[v] = integers_at(kind, blocks, v);
        if (kind == W_Q8_0) w.q[v] ^= (bytes)(int8_t)Q8_OFFSET;
    }
    arrange_sub_blocks(w.q);
    if (is_small(kind)) unpack_small_scales(kind, blocks, &w);
    else unpack_k_scales(kind, blocks, &w);
    return w;
}

#ifdef __AVX512F__

typedef bytes unaligned_bytes __attribute__((aligned(1)));
typedef wide unaligned_wide __attribute__((aligned(4)));

// Returns acc + scale x_scale sum(q x_integer) + shift sum(x) of a block, lane by lane. x: the sub-blocks' scales, then their sums.
// This is assembly for the reason given at add_block_int4.
INLINE wide add_block(enum kind kind, wide acc, const struct unpacked *w, const uint8_t *q, const float *x) {
    wide_ints dot = (wide_ints)0;
    const unaligned_bytes *values = (const unaligned_bytes *)q;
    const unaligned_wide *scales_and_sums = (const unaligned_wide *)x;
    (void)kind;
    __asm__ volatile(
        "vpdpbusd %[x0], %[w0], %[dot]\n\t"
        "vpdpbusd %[x1], %[w1], %[dot]\n\t"
        "vpdpbusd %[x2], %[w2], %[dot]\n\t"
        "vpdpbusd %[x3], %[w3], %[dot]\n\t"
        "vfmadd231ps %[sums], %[shifts], %[acc]\n\t"
        "vcvtdq2ps %[dot], %[dot]\n\t"
        "vmulps %[x_scales], %[dot], %[dot]\n\t"
        "vfmadd231ps %[scales], %[dot], %[acc]"
        : [acc] "+&v"(acc), [dot] "+&v"(dot)
        : [w0] "v"(w->q[0]), [w1] "v"(w->q[1]), [w2] "v"(w->q[2]), [w3] "v"(w->q[3]), [scales] "v"(w->scales[0]),
          [shifts] "v"(w->shifts[0]), [x0] "m"(values[0]), [x1] "m"(values[1]), [x2] "m"(values[2]), [x3] "m"(values[3]),
          [x_scales] "m"(scales_and_sums[0]), [sums] "m"(scales_and_sums[1]));
    return acc;
}

#else

INLINE wide_ints dot_of_set(enum kind kind, const bytes *w, const uint8_t *q) {
    wide_ints dot = (wide_ints)0;
    if (kind == W_Q8_0 && Q8_OFFSET == 0) {
        UNROLL for (int c = 0; c < 4; c++) dot = dot_add_signed(dot, load_bytes(q + c * 4 * WIDE, 4 * WIDE), w[c]);
        return dot;
    }
#if defined __AVX2__ && !defined HAS_VNNI
    pairs sums[4];                       // 16 bits hold the sum of 8 products of a 5-bit q, or of 4 products of Q6_K
    UNROLL for (int c = 0; c < 4; c++) sums[c] = multiply_pairs(w[c], load_bytes(q + c * 4 * WIDE, 4 * WIDE));
    sums[0] += sums[1], sums[2] += sums[3];
    if (kind != W_Q6_K) return add_pairs(dot, sums[0] + sums[2]);
    return add_pairs(add_pairs(dot, sums[0]), sums[2]);
#else
    UNROLL for (int c = 0; c < 4; c++) dot = dot_add(dot, w[c], load_bytes(q + c * 4 * WIDE, 4 * WIDE));
    return dot;
#endif
}

INLINE wide add_block(enum kind kind, wide acc, const struct unpacked *w, const uint8_t *q, const float *x) {
    UNROLL for (int set = 0; set < SETS; set++) {
        wide dot = __builtin_convertvector(dot_of_set(kind, w->q + 4 * set, q + set * 16 * WIDE), wide);
        if (kind != W_Q8_0 || Q8_OFFSET > 0) acc = wide_fma(w->shifts[set], load_wide(x + SUB_BLOCKS + set * WIDE, WIDE), acc);
        acc = wide_fma(w->scales[set], dot * load_wide(x + set * WIDE, WIDE), acc);
    }
    return acc;
}

#endif

// Copies the last blocks of 32 of a row, fewer than eight, and appends zeros.
INLINE const uint8_t *padded_blocks(enum kind kind, const uint8_t *blocks, int64_t elements, uint8_t *padded) {
    memset(padded, 0, MOST_BYTES);
    memcpy(padded, blocks, (size_t)row_bytes(kind, elements));
    return padded;
}

// y = sum over sub-blocks of d s x_scale sum(q x_integer) + shift sum(x), where shift = - m t, or - 32 d s in Q6_K. Blocks of 32
// have s = 1 and shift = m or - zero_point d.
INLINE void tile_blocks(const struct product *p, int rows, int columns, const struct piece *piece) {
    enum kind kind = p->kind;
    wide acc[MAX_ROWS][COLUMNS];
    uint8_t padded[MOST_BYTES];
    load_sums(piece, rows, columns, acc);
    const uint8_t *q = p->q + piece->first * p->q_row;
    const float *x = p->x + piece->first * p->x_row;
    for (int64_t k = piece->k; k < piece->end; k += BLOCK)
        UNROLL for (int j = 0; j < columns; j++) {
            const uint8_t *blocks = (const uint8_t *)p->w + piece->ns[j] * row_bytes(kind, p->K) + row_bytes(kind, k);
            prefetch_block(kind, piece, blocks);
            if (is_small(kind) && k + BLOCK > p->K) blocks = padded_blocks(kind, blocks, p->K - k, padded);
            struct unpacked w = unpack(kind, blocks);
            UNROLL for (int i = 0; i < rows; i++)
                acc[i][j] = add_block(kind, acc[i][j], &w, q + i * p->q_row + k, x + i * p->x_row + k / BLOCK * 2 * SUB_BLOCKS);
        }
    store_sums(p, rows, columns, piece, acc);
}

// Defines the functions of one kind, so that the kind is a constant in them.
#define BLOCKS(name, w_kind) \
    static __attribute__((noinline)) void matmul_##name(const struct product *p, int64_t begin, int64_t end) { \
        struct product specialized = *p; \
        specialized.kind = w_kind; \
        for (int64_t r = 0; r < p->R; r += ROWS_TOGETHER) { \
            specialized.R = p->R - r < ROWS_TOGETHER ? p->R - r : ROWS_TOGETHER; \
            specialized.x = p->x + r * p->x_row, specialized.q = p->q + r * p->q_row, specialized.y = p->y + r * p->y_row; \
            matmul_range(&specialized, begin, end, tile_blocks, row_bytes(w_kind, BLOCK), 0); \
        } \
    } \
    static void unpack_##name(const uint8_t *w, int64_t K, float *row) { \
        for (int64_t k = 0; k < K; k += block_size(w_kind), w += block_bytes(w_kind)) unpack_block(w_kind, w, row + k); \
    }

INLINE void unpack_block(enum kind kind, const uint8_t *block, float *y) {
    if (is_small(kind)) {
        wide weights[SMALL_BLOCK / WIDE];
        unpack_small(kind, block, weights);
        UNROLL for (int v = 0; v < SMALL_BLOCK / WIDE; v++) wide_store(y + v * WIDE, weights[v]);
        return;
    }
    struct scales scales = read_scales(kind, block);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        bytes q = integers_at(kind, block, v);
        if (kind == W_Q6_K) q -= 32;
        UNROLL for (int part = 0; part < 4; part++) {
            int first = v * 4 * WIDE + part * WIDE, sub_block = first / SUB_BLOCK;
            int8_t VECTOR(WIDE) some;
            memcpy(&some, (const char *)&q + part * WIDE, sizeof some);
            wide integers = __builtin_convertvector(some, wide) * (float)scales.s[sub_block] + 0.0f;      // 0 in place of -0
            wide_store(y + first, integers * scales.d - scales.m * (float)scales.t[sub_block]);
        }
    }
}

BLOCKS(q8_0, W_Q8_0)
BLOCKS(q4_0, W_Q4_0)
BLOCKS(q4_1, W_Q4_1)
BLOCKS(q5_0, W_Q5_0)
BLOCKS(q5_1, W_Q5_1)
BLOCKS(q4_k, W_Q4_K)
BLOCKS(q5_k, W_Q5_K)
BLOCKS(q6_k, W_Q6_K)

void matmul_blocks(const struct product *p, int64_t begin, int64_t end) {
    switch (p->kind) {
    case W_Q8_0: matmul_q8_0(p, begin, end); break;
    case W_Q4_0: matmul_q4_0(p, begin, end); break;
    case W_Q4_1: matmul_q4_1(p, begin, end); break;
    case W_Q5_0: matmul_q5_0(p, begin, end); break;
    case W_Q5_1: matmul_q5_1(p, begin, end); break;
    case W_Q4_K: matmul_q4_k(p, begin, end); break;
    case W_Q5_K: matmul_q5_k(p, begin, end); break;
    default: matmul_q6_k(p, begin, end);
    }
}

void unpack_blocks(enum kind kind, const void *w, int64_t K, int64_t n, float *row) {
    const uint8_t *first = (const uint8_t *)w + n * row_bytes(kind, K);
    switch (kind) {
    case W_Q8_0: unpack_q8_0(first, K, row); break;
    case W_Q4_0: unpack_q4_0(first, K, row); break;
    case W_Q4_1: unpack_q4_1(first, K, row); break;
    case W_Q5_0: unpack_q5_0(first, K, row); break;
    case W_Q5_1: unpack_q5_1(first, K, row); break;
    case W_Q4_K: unpack_q4_k(first, K, row); break;
    case W_Q5_K: unpack_q5_k(first, K, row); break;
    default: unpack_q6_k(first, K, row);
    }
}

// Unpacks W (N,K) to float32. A task is a row.
struct unpack_call {
    int64_t kind, N, K;
    const void *w;
    float *matrix;
};

static void unpack_rows(struct tasks *tasks, int64_t thread) {
    const struct unpack_call *call = tasks->call;
    (void)thread;
    for (int64_t n; (n = next_task(tasks)) < call->N;)
        unpack_blocks((enum kind)call->kind, call->w, call->K, n, call->matrix + n * call->K);
}

ENTRY(matvec_unpack_blocks, struct unpack_call) { parallel_for(unpack_rows, call, threads); }

// Sets `infinite` if a float16 number of a block, at byte `first` or, unless negative, `second`, is not finite. A task is a row.
struct scales_call {
    int64_t N, blocks, bytes, first, second;
    const uint8_t *w;
    int64_t *infinite;
};

INLINE int is_finite_half(const uint8_t *p) { return (p[1] & 0x7C) != 0x7C; }

static void check_rows(struct tasks *tasks, int64_t thread) {
    const struct scales_call *call = tasks->call;
    int64_t second = call->second < 0 ? call->first : call->second;
    (void)thread;
    for (int64_t n; (n = next_task(tasks)) < call->N;) {
        const uint8_t *row = call->w + n * call->blocks * call->bytes;
        int is_finite = 1;
        for (int64_t block = 0; block < call->blocks; block++, row += call->bytes)
            is_finite &= is_finite_half(row + call->first) & is_finite_half(row + second);
        if (!is_finite) __atomic_store_n(call->infinite, 1, __ATOMIC_RELAXED);
    }
}

ENTRY(matvec_check_scales, struct scales_call) { parallel_for(check_rows, call, threads); }
