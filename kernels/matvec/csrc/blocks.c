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
// s and t belong to a group, of 32 or, in Q6_K, of 16. Source of the layouts: ggml, src/ggml-common.h and the package gguf.
//
// Blocks of 32 are unpacked to floats in registers and multiplied by the float32 x. k-quants are unpacked to the integers s q,
// which fit into 13 bits, and multiplied by an x of 15 bits: a block's products are summed exactly, and then scaled.

#include "tile.h"
#include "../../native/csrc/threads.h"

enum {
    SMALL_BLOCK = 32,
    PART = 64,                           // k-quants: elements unpacked at a time
    WORDS = 2 * WIDE,                    // integers of 16 bits in a vector
    VECTORS = PART / WORDS,              // of a part
    ROWS_TOGETHER = 64,                  // rows of x that stay in the cache beside W
};

typedef uint8_t VECTOR(16) bytes16;
typedef uint8_t VECTOR(32) bytes32;
typedef int8_t VECTOR(32) integers32;
typedef uint8_t VECTOR(WORDS) narrow;
typedef int32_t VECTOR(16) ints16;

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

// Prefetches the block that is piece->ahead bytes further on.
INLINE void prefetch_block(enum kind kind, const struct piece *piece, const uint8_t *w) {
    UNROLL for (int64_t byte = 0; byte < block_bytes(kind); byte += 64) prefetch_ahead(piece, w + byte);
}

// Blocks of 32

// 16 where bit e of four bytes is set, for elements e = 0 to 31
INLINE integers32 fifth_bits(const uint8_t *p) {
    uint8_t VECTOR(4) bits;
    memcpy(&bits, p, sizeof bits);
    bytes32 repeated = __builtin_shufflevector(bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                               2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    bytes32 mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                    1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (integers32)((repeated & mask) != 0) & 16;
}

// Low nibbles of 16 bytes, then their high nibbles
INLINE integers32 nibbles(const uint8_t *p) {
    bytes16 both;
    memcpy(&both, p, sizeof both);
    bytes16 low = both & 15, high = both >> 4;
    return (integers32)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                               16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// The integers of a block, with 0 in the middle of their range where the block has no minimum
INLINE integers32 small_integers(enum kind kind, const uint8_t *block) {
    integers32 q;
    switch (kind) {
    case W_Q8_0: memcpy(&q, block + 2, sizeof q); return q;
    case W_Q4_0: return nibbles(block + 2) - 8;
    case W_Q4_1: return nibbles(block + 4);
    case W_Q5_0: return (nibbles(block + 6) | fifth_bits(block + 2)) - 16;
    default: return nibbles(block + 8) | fifth_bits(block + 4);
    }
}

INLINE void unpack_small(enum kind kind, const uint8_t *block, wide *w) {
    integers32 q = small_integers(kind, block);
    wide scale = wide_splat(load_half(block)), shift = wide_splat(0.0f);
    int has_shift = kind == W_Q4_1 || kind == W_Q5_1;
    if (has_shift) shift = wide_splat(load_half(block + 2));
    UNROLL for (int v = 0; v < SMALL_BLOCK / WIDE; v++) {
        int8_t VECTOR(WIDE) some;
        memcpy(&some, (const char *)&q + v * WIDE, sizeof some);
        wide integers = __builtin_convertvector(some, wide);
        w[v] = has_shift ? wide_fma(integers, scale, shift) : integers * scale;
    }
}

INLINE void tile_small(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t blocks = p->K / SMALL_BLOCK;
    wide acc[MAX_ROWS][COLUMNS], weights[SMALL_BLOCK / WIDE];
    load_sums(piece, rows, columns, acc);
    const float *x = p->x + piece->first * p->x_row;
    for (int64_t block = piece->k / SMALL_BLOCK; block < piece->end / SMALL_BLOCK; block++)
        UNROLL for (int j = 0; j < columns; j++) {
            const uint8_t *w = (const uint8_t *)p->w + (piece->ns[j] * blocks + block) * block_bytes(p->kind);
            prefetch_block(p->kind, piece, w);
            unpack_small(p->kind, w, weights);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int v = 0; v < SMALL_BLOCK / WIDE; v++) {
                    wide values = load_wide(x + i * p->x_row + block * SMALL_BLOCK + v * WIDE, WIDE);
                    acc[i][j] = wide_fma(weights[v], values, acc[i][j]);
                }
        }
    store_sums(p, rows, columns, piece, acc);
}

// k-quants

// A block's scales: s of each group, twice in 32 bits, as a factor of two integers of 16 bits; t of each group; d and m.
struct scales {
    ints16 s;                            // Q4_K, Q5_K: the first eight
    ints t;
    float d, m;
};

INLINE ints16 twice(ints16 x) { return (x & 0xFFFF) | x << 16; }

// Q4_K and Q5_K: eight s and eight t of 6 bits in 12 bytes
INLINE void read_six_bits(const uint8_t *p, struct scales *scales) {
    uint32_t words[3], s[4] = {0}, t[2];
    memcpy(words, p, sizeof words);
    s[0] = words[0] & 0x3F3F3F3F, s[1] = (words[2] & 0x0F0F0F0F) | (words[0] >> 2 & 0x30303030);
    t[0] = words[1] & 0x3F3F3F3F, t[1] = (words[2] >> 4 & 0x0F0F0F0F) | (words[1] >> 2 & 0x30303030);
    bytes16 s_bytes;
    uint8_t VECTOR(8) t_bytes;
    memcpy(&s_bytes, s, sizeof s_bytes);
    memcpy(&t_bytes, t, sizeof t_bytes);
    scales->s = twice(__builtin_convertvector(s_bytes, ints16));
    scales->t = __builtin_convertvector(t_bytes, ints);
}

INLINE struct scales read_scales(enum kind kind, const uint8_t *block) {
    struct scales scales = {.t = (ints)0, .m = 0.0f};
    if (kind == W_Q6_K) {
        int8_t VECTOR(16) s;
        memcpy(&s, block + 192, sizeof s);
        scales.s = twice(__builtin_convertvector(s, ints16));
        scales.d = load_half(block + 208);
        return scales;
    }
    read_six_bits(block + 4, &scales);
    scales.d = load_half(block), scales.m = load_half(block + 2);
    return scales;
}

// s for a vector of Q4_K or Q5_K, which is within group g, and of Q6_K, which starts with group g
INLINE pairs factor_of_group(const struct scales *scales, int g) { return (pairs)(wide_ints)(scales->s[g]); }

INLINE pairs factor_of_16(const struct scales *scales, int g) {
#ifdef __AVX512F__
    wide_ints low = (wide_ints)(scales->s[g]), high = (wide_ints)(scales->s[g + 1]);
    return (pairs)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    return factor_of_group(scales, g);
#endif
}

INLINE pairs load_words(const uint8_t *p) {
    narrow x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, pairs);
}

// s q (Q6_K: s (q - 32)) of elements 64 part to 64 part + 63 of a block
INLINE void unpack_part(enum kind kind, const uint8_t *block, const struct scales *scales, int part, pairs *w) {
    UNROLL for (int v = 0; v < VECTORS / 2; v++) {
        pairs low, high;
        if (kind == W_Q6_K) {
            const uint8_t *four_bits = block + part / 2 * 64 + v * WORDS;
            pairs first = load_words(four_bits), second = load_words(four_bits + 32);
            pairs two_bits = load_words(block + 128 + part / 2 * 32 + v * WORDS) >> part % 2 * 4;
            low = (part % 2 ? first >> 4 : first & 15) | (two_bits & 3) << 4;
            high = (part % 2 ? second >> 4 : second & 15) | (two_bits >> 2 & 3) << 4;
            int g = part * 4 + v * WORDS / 16;
            w[v] = (low - 32) * factor_of_16(scales, g), w[VECTORS / 2 + v] = (high - 32) * factor_of_16(scales, g + 2);
            continue;
        }
        pairs four_bits = load_words(block + (kind == W_Q4_K ? 16 : 48) + part * 32 + v * WORDS);
        low = four_bits & 15, high = four_bits >> 4;
        if (kind == W_Q5_K) {
            pairs bits = load_words(block + 16 + v * WORDS) >> 2 * part;
            low |= (bits & 1) << 4, high |= (bits & 2) << 3;
        }
        w[v] = low * factor_of_group(scales, 2 * part);
        w[VECTORS / 2 + v] = high * factor_of_group(scales, 2 * part + 1);
    }
}

// Adds the products of integers of 16 bits to sums of 32 bits.
INLINE wide_ints add_products(wide_ints sums, pairs x, pairs w) {
#if defined __AVX512F__
    __asm__("vpdpwssd %1, %2, %0" : "+v"(sums) : "vm"(x), "v"(w));       // clang makes two instructions of the intrinsic
    return sums;
#elif defined __AVX2__
    return sums + (wide_ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#else
    int16x8_t x_halves[2], w_halves[2];
    int32x4_t four_sums[2];
    memcpy(x_halves, &x, sizeof x);
    memcpy(w_halves, &w, sizeof w);
    memcpy(four_sums, &sums, sizeof sums);
    UNROLL for (int half = 0; half < 2; half++) {
        four_sums[0] = vmlal_s16(four_sums[0], vget_low_s16(x_halves[half]), vget_low_s16(w_halves[half]));
        four_sums[1] = vmlal_high_s16(four_sums[1], x_halves[half], w_halves[half]);
    }
    memcpy(&sums, four_sums, sizeof sums);
    return sums;
#endif
}

// y = sum over blocks of d x_scale sum(s q x_integer) - m sum over groups of t sum(x)
INLINE void tile_k(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t blocks = p->K / BLOCK;
    wide acc[MAX_ROWS][COLUMNS];
    load_sums(piece, rows, columns, acc);
    const uint8_t *q = p->q + piece->first * p->q_row;
    const float *x = p->x + piece->first * p->x_row;
    for (int64_t block = piece->k / BLOCK; block < piece->end / BLOCK; block++)
        UNROLL for (int j = 0; j < columns; j++) {
            const uint8_t *w = (const uint8_t *)p->w + (piece->ns[j] * blocks + block) * block_bytes(p->kind);
            prefetch_block(p->kind, piece, w);
            struct scales scales = read_scales(p->kind, w);
            wide_ints dot[MAX_ROWS];
            UNROLL for (int i = 0; i < rows; i++) dot[i] = (wide_ints)0;
            UNROLL for (int part = 0; part < BLOCK / PART; part++) {
                pairs weights[VECTORS];
                unpack_part(p->kind, w, &scales, part, weights);
                UNROLL for (int i = 0; i < rows; i++)
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        pairs values;
                        memcpy(&values, q + i * p->q_row + 2 * (block * BLOCK + part * PART + v * WORDS), sizeof values);
                        dot[i] = add_products(dot[i], values, weights[v]);
                    }
            }
            floats shift = __builtin_convertvector(scales.t, floats) * -scales.m;
            UNROLL for (int i = 0; i < rows; i++) {
                const float *sums_and_scale = x + i * p->x_row + block * 16;
                wide factor = wide_splat(sums_and_scale[8] * scales.d);
                acc[i][j] = wide_fma(__builtin_convertvector(dot[i], wide), factor, acc[i][j]);
                if (p->kind == W_Q6_K) continue;
#ifdef __AVX512F__
                wide shifts, sums;
                shifts.lo = shift, shifts.hi = splat(0.0f);
                sums.lo = load(sums_and_scale), sums.hi = splat(0.0f);
                acc[i][j] = wide_fma(shifts, sums, acc[i][j]);
#else
                acc[i][j] = wide_fma(shift, load(sums_and_scale), acc[i][j]);
#endif
            }
        }
    store_sums(p, rows, columns, piece, acc);
}

// Each kind has functions of its own, with the kind as a constant.
#define BLOCKS(name, w_kind, tile) \
    static __attribute__((noinline)) void matmul_##name(const struct product *p, int64_t begin, int64_t end) { \
        struct product specialized = *p; \
        specialized.kind = w_kind; \
        for (int64_t r = 0; r < p->R; r += ROWS_TOGETHER) { \
            specialized.R = p->R - r < ROWS_TOGETHER ? p->R - r : ROWS_TOGETHER; \
            specialized.x = p->x + r * p->x_row, specialized.q = p->q + r * p->q_row, specialized.y = p->y + r * p->y_row; \
            matmul_range(&specialized, begin, end, tile, block_bytes(w_kind) * BLOCK / block_size(w_kind), \
                         is_small(w_kind) ? 4 : 2); \
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
    UNROLL for (int part = 0; part < BLOCK / PART; part++) {
        pairs weights[VECTORS];
        unpack_part(kind, block, &scales, part, weights);
        UNROLL for (int v = 0; v < VECTORS; v++)
            UNROLL for (int half = 0; half < 2; half++) {
                int16_t VECTOR(WIDE) words = half ? weights[v].hi : weights[v].lo;
                float shift = scales.m * (float)scales.t[2 * part + v / (VECTORS / 2)];
                wide_store(y + part * PART + v * WORDS + half * WIDE, __builtin_convertvector(words, wide) * scales.d - shift);
            }
    }
}

BLOCKS(q8_0, W_Q8_0, tile_small)
BLOCKS(q4_0, W_Q4_0, tile_small)
BLOCKS(q4_1, W_Q4_1, tile_small)
BLOCKS(q5_0, W_Q5_0, tile_small)
BLOCKS(q5_1, W_Q5_1, tile_small)
BLOCKS(q4_k, W_Q4_K, tile_k)
BLOCKS(q5_k, W_Q5_K, tile_k)
BLOCKS(q6_k, W_Q6_K, tile_k)

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
    const uint8_t *first = (const uint8_t *)w + n * (K / block_size(kind)) * block_bytes(kind);
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

// Rounds rows x (R,K) for products with k-quants: q (R,K) of 16 bits, and 16 floats of y for each block. A task is a row.
struct words_call {
    int64_t R, K;
    const float *x;
    uint8_t *q;
    float *y;
};

static void round_rows(struct tasks *tasks, int64_t thread) {
    const struct words_call *call = tasks->call;
    (void)thread;
    for (int64_t r; (r = next_task(tasks)) < call->R;)
        prepare_input(W_Q4_K, call->x + r * call->K, call->K, 0, call->K, 0, 0, call->y + r * (call->K / BLOCK * 16),
                      call->q + r * 2 * call->K);
}

ENTRY(matvec_round_to_words, struct words_call) { parallel_for(round_rows, call, threads); }
