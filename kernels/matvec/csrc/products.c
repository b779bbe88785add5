// Products with W in float32, bfloat16, int8 and int4, and preparation of their inputs.

#include "tile.h"

INLINE int64_t element_size(enum kind kind) { return kind == W_FLOAT32 ? 4 : kind == W_INT8 ? 1 : 2; }

INLINE wide load_weights(enum kind kind, const void *p, int64_t n) {
    return kind == W_FLOAT32 ? load_wide(p, n) : load_wide_bfloat16(p, n);
}

// Accumulates the products of inputs k to k + n - 1, n <= WIDE.
INLINE void accumulate_floats(const struct product *p, int rows, int columns, const uint8_t *const *w, const float *x, int64_t k,
                              int64_t n, const struct piece *piece, wide (*acc)[COLUMNS]) {
    int64_t offset = k * element_size(p->kind);
    wide weights[COLUMNS];
    UNROLL for (int j = 0; j < columns; j++) {
        prefetch_ahead(piece, w[j] + offset);
        weights[j] = load_weights(p->kind, w[j] + offset, n);
    }
    UNROLL for (int i = 0; i < rows; i++) {
        wide values = load_wide(x + i * p->x_row + k, n);
        UNROLL for (int j = 0; j < columns; j++) acc[i][j] = wide_fma(weights[j], values, acc[i][j]);
    }
}

INLINE void tile_floats(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t end = piece->end, k = piece->k;
    const uint8_t *w[COLUMNS];
    wide acc[MAX_ROWS][COLUMNS];
    UNROLL for (int j = 0; j < columns; j++) w[j] = (const uint8_t *)p->w + piece->ns[j] * p->K * element_size(p->kind);
    load_sums(piece, rows, columns, acc);
    const float *x = p->x + piece->first * p->x_row;
    for (; k + WIDE <= end; k += WIDE) accumulate_floats(p, rows, columns, w, x, k, WIDE, piece, acc);
    if (k < end) accumulate_floats(p, rows, columns, w, x, k, end - k, piece, acc);
    store_sums(p, rows, columns, piece, acc);
}

#ifdef __AVX512BF16__

// x and W in bfloat16: each lane accumulates the products of two neighbouring inputs.
INLINE void accumulate_bfloat16(const struct product *p, int rows, int columns, const uint16_t *const *w, const uint8_t *q,
                                int64_t k, int64_t n, const struct piece *piece, wide (*acc)[COLUMNS]) {
    bytes weights[COLUMNS];
    UNROLL for (int j = 0; j < columns; j++) {
        prefetch_ahead(piece, w[j] + k);
        weights[j] = load_bytes(w[j] + k, 2 * n);
    }
    UNROLL for (int i = 0; i < rows; i++) {
        bytes values = load_bytes(q + i * p->q_row + k * 2, 2 * n);
        UNROLL for (int j = 0; j < columns; j++)
            acc[i][j] = (wide)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)weights[j], (__m512bh)values);
    }
}

INLINE void tile_bfloat16(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t end = piece->end, k = piece->k;
    const uint16_t *w[COLUMNS];
    wide acc[MAX_ROWS][COLUMNS];
    UNROLL for (int j = 0; j < columns; j++) w[j] = (const uint16_t *)p->w + piece->ns[j] * p->K;
    load_sums(piece, rows, columns, acc);
    const uint8_t *q = p->q + piece->first * p->q_row;
    for (; k + 32 <= end; k += 32) accumulate_bfloat16(p, rows, columns, w, q, k, 32, piece, acc);
    if (k < end) accumulate_bfloat16(p, rows, columns, w, q, k, end - k, piece, acc);
    store_sums(p, rows, columns, piece, acc);
}

#endif

// Sums the elements of each of WIDE vectors: lane i gets the sum of x[i].
INLINE wide_ints sum_each(wide_ints *x) {
    UNROLL for (int step = 1; step < WIDE; step *= 2)
        UNROLL for (int i = 0; i < WIDE / step; i += 2) x[i / 2] = every(step, 0, x[i], x[i + 1]) + every(step, 1, x[i], x[i + 1]);
    return x[0];
}

// zero_point: sums of the offset times W, which tile_int8 subtracts from acc; 0 if x is signed.
INLINE void accumulate_int8(const struct product *p, int rows, int columns, const int8_t *const *w, const uint8_t *q, int64_t k,
                            int64_t n, const struct piece *piece, wide_ints (*acc)[COLUMNS], wide_ints *zero_point) {
    bytes weights[COLUMNS], offset = (bytes)(int8_t)p->offset;
    UNROLL for (int j = 0; j < columns; j++) {
        prefetch_ahead(piece, w[j] + k);
        weights[j] = load_bytes(w[j] + k, n);
        if (!p->is_signed) zero_point[j] = dot_add(zero_point[j], offset, weights[j]);
    }
    UNROLL for (int i = 0; i < rows; i++) {
        bytes values = load_bytes(q + i * p->q_row + k, n);
        if (p->is_signed) values ^= (bytes)(int8_t)-SIGNED;
        UNROLL for (int j = 0; j < columns; j++)
            acc[i][j] = p->is_signed ? dot_add_signed(acc[i][j], values, weights[j]) : dot_add(acc[i][j], values, weights[j]);
    }
}

INLINE void tile_int8(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t end = piece->end, k = piece->k, first = piece->first;
    const int8_t *w[COLUMNS];
    wide_ints acc[MAX_ROWS + 1][COLUMNS], *zero_point = acc[rows];
    UNROLL for (int j = 0; j < columns; j++) w[j] = (const int8_t *)p->w + piece->ns[j] * p->K;
    load_sums(piece, rows + 1, columns, (wide (*)[COLUMNS])acc);
    const uint8_t *q = p->q + first * p->q_row;
    for (; k + 4 * WIDE <= end; k += 4 * WIDE) accumulate_int8(p, rows, columns, w, q, k, 4 * WIDE, piece, acc, zero_point);
    if (k < end) accumulate_int8(p, rows, columns, w, q, k, end - k, piece, acc, zero_point);
    if (end < p->K) {
        save_sums(piece, rows + 1, columns, (wide (*)[COLUMNS])acc);
        return;
    }
    wide x_scales = wide_splat(1.0f);
    if (p->apply_x_scale) UNROLL for (int i = 0; i < rows; i++) x_scales[i] = p->x[(first + i) * p->x_row];
    UNROLL for (int j = 0; j < columns; j++) {
        wide_ints terms[WIDE];
        UNROLL for (int i = 0; i < WIDE; i++) terms[i] = i < rows ? acc[i][j] - zero_point[j] : (wide_ints)0;
        wide totals = __builtin_convertvector(sum_each(terms), wide) * ((const float *)p->scale)[piece->ns[j]] * x_scales;
        UNROLL for (int i = 0; i < rows; i++) p->y[(first + i) * p->y_row + piece->ns[j]] = totals[i];
    }
}

#ifdef __AVX512F__

// Interleaves 64 bytes, words 4h to 4h + 3 of eight groups, so that each lane of four bytes belongs to one group: lane g gets words
// 4h and 4h + 1 of group g, and lane 8 + g words 4h + 2 and 4h + 3.
INLINE bytes interleave_groups(bytes words) {
    return (bytes)__builtin_shufflevector((pairs)words, (pairs)words, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15,
                                          16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31);
}

// Returns the position of element e of group g in a block of q. The order is that of interleave_groups: the low nibbles of words 0
// to 3, their high nibbles, then the low and high nibbles of words 4 to 7.
INLINE int q_offset(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2, byte = e % 2;
    return word / 4 * 128 + nibble * 64 + word % 4 / 2 * 32 + g * 4 + word % 2 * 2 + byte;
}

typedef bytes unaligned_bytes __attribute__((aligned(1)));
typedef floats unaligned_floats __attribute__((aligned(4)));

// Returns scale x_scale sum(w q) + (shift sum(x) + acc) for a block. x: the groups' scales, then their sums. This is assembly,
// because clang would interleave the intrinsics of several rows, and the rows' sums would not fit into the registers.
INLINE wide add_block_int4(wide acc, const bytes *nibbles, wide scales, wide shifts, const unaligned_bytes *q,
                           const unaligned_floats *x) {
    wide_ints dot = (wide_ints)0;
    __asm__ volatile(
        "vpdpbusd %[x0], %[w0], %[dot]\n\t"
        "vpdpbusd %[x1], %[w1], %[dot]\n\t"
        "vpdpbusd %[x2], %[w2], %[dot]\n\t"
        "vpdpbusd %[x3], %[w3], %[dot]\n\t"
        "vmovups %[sums], %%ymm31\n\t"
        "vfmadd231ps %%zmm31, %[shifts], %[acc]\n\t"
        "vbroadcastf64x4 %[x_scales], %%zmm31\n\t"
        "vcvtdq2ps %[dot], %[dot]\n\t"
        "vmulps %%zmm31, %[dot], %[dot]\n\t"
        "vfmadd231ps %[scales], %[dot], %[acc]"
        : [acc] "+&v"(acc), [dot] "+&v"(dot)
        : [w0] "v"(nibbles[0]), [w1] "v"(nibbles[1]), [w2] "v"(nibbles[2]), [w3] "v"(nibbles[3]), [scales] "v"(scales),
          [shifts] "v"(shifts), [x0] "m"(q[0]), [x1] "m"(q[1]), [x2] "m"(q[2]), [x3] "m"(q[3]),
          [x_scales] "m"(x[0]), [sums] "m"(x[1]) : "xmm31");
    return acc;
}

// int4: y = sum over groups of scale x_scale sum(w q) + shift sum(x). Lanes g and 8 + g each hold half of group g's sum.
INLINE void tile_int4(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t blocks = ratio_up(p->K, BLOCK), end = ratio_up(piece->end, BLOCK);
    const uint8_t *q = p->q + piece->first * p->q_row;
    const float *x = p->x + piece->first * p->x_row;
    wide acc[MAX_ROWS][COLUMNS];
    load_sums(piece, rows, columns, acc);
    for (int64_t block = piece->k / BLOCK; block < end; block++)
        UNROLL for (int j = 0; j < columns; j++) {
            int64_t i_w = piece->ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + i_w * BLOCK / 2;
            bytes nibbles[4];
            UNROLL for (int h = 0; h < 2; h++) {
                prefetch_ahead(piece, w + h * 64);
                bytes words = interleave_groups(load_bytes(w + h * 64, 64));
                nibbles[2 * h] = words & 15;
                nibbles[2 * h + 1] = (bytes)((pairs)words >> 4) & 15;
            }
            floats scale = load_groups(p->scale, i_w), shift = load_groups(p->shift, i_w);
            wide scales, shifts;
            scales.lo = scale, scales.hi = scale, shifts.lo = shift, shifts.hi = splat(0.0f);
            UNROLL for (int i = 0; i < rows; i++)
                acc[i][j] = add_block_int4(acc[i][j], nibbles, scales, shifts,
                                           (const unaligned_bytes *)(q + i * p->q_row + block * BLOCK),
                                           (const unaligned_floats *)(x + i * p->x_row + block * 16));
        }
    store_sums(p, rows, columns, piece, acc);
}

#else

// add_words adds the products of 32 bytes, two words of each of eight groups, to the groups' sums. q_offset returns the position of
// element e of group g in a block of q: for every two words of the eight groups, their low nibbles, then their high nibbles.
#ifdef HAS_DOT
typedef wide_ints group_sums;

// Interleaves the words, so that each lane of four bytes belongs to one group.
INLINE bytes interleave_groups(bytes words) {
    return (bytes)__builtin_shufflevector((pairs)words, (pairs)words, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
}

INLINE group_sums add_words(group_sums sums, bytes w, bytes x) { return dot_add(sums, w, x); }
INLINE wide_ints sum_words(group_sums sums) { return sums; }

INLINE int q_offset(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2;
    return word / 2 * 64 + nibble * 32 + g * 4 + word % 2 * 2 + e % 2;
}
#else
typedef pairs group_sums;

INLINE bytes interleave_groups(bytes words) { return words; }
INLINE group_sums add_words(group_sums sums, bytes w, bytes x) { return sums + multiply_pairs(w, x); }

INLINE wide_ints sum_words(group_sums sums) {
    return __builtin_convertvector(sums.lo, wide_ints) + __builtin_convertvector(sums.hi, wide_ints);
}

INLINE int q_offset(int g, int e) {
    int nibble = e / 16, word = e % 16 / 2;
    return word / 2 * 64 + nibble * 32 + word % 2 * 16 + g * 2 + e % 2;
}
#endif

INLINE void tile_int4(const struct product *p, int rows, int columns, const struct piece *piece) {
    int64_t blocks = ratio_up(p->K, BLOCK), end = ratio_up(piece->end, BLOCK);
    const uint8_t *q = p->q + piece->first * p->q_row;
    const float *x = p->x + piece->first * p->x_row;
    wide acc[MAX_ROWS][COLUMNS];
    load_sums(piece, rows, columns, acc);
    for (int64_t block = piece->k / BLOCK; block < end; block++)
        UNROLL for (int j = 0; j < columns; j++) {
            int64_t i_w = piece->ns[j] * blocks + block;
            const uint8_t *w = (const uint8_t *)p->w + i_w * BLOCK / 2;
            group_sums dot[MAX_ROWS];
            UNROLL for (int i = 0; i < rows; i++) dot[i] = (group_sums)0;
            UNROLL for (int part = 0; part < 4; part++) {
                bytes words = interleave_groups(load_bytes(w + part * 32, 32));
                bytes low = words & 15, high = (bytes)((pairs)words >> 4) & 15;
                UNROLL for (int i = 0; i < rows; i++) {
                    const uint8_t *values = q + i * p->q_row + block * BLOCK + part * 64;
                    dot[i] = add_words(dot[i], low, load_bytes(values, 32));
                    dot[i] = add_words(dot[i], high, load_bytes(values + 32, 32));
                }
            }
            prefetch_ahead(piece, w);
            prefetch_ahead(piece, w + 64);
            floats scales = load_groups(p->scale, i_w), shifts = load_groups(p->shift, i_w);
            UNROLL for (int i = 0; i < rows; i++) {
                const float *scales_and_sums = x + i * p->x_row + block * 16;
                floats products = __builtin_convertvector(sum_words(dot[i]), floats) * load(scales_and_sums);
                acc[i][j] = wide_fma(products, scales, wide_fma(shifts, load(scales_and_sums + 8), acc[i][j]));
            }
        }
    store_sums(p, rows, columns, piece, acc);
}

#endif

INLINE void tile(const struct product *p, int rows, int columns, const struct piece *piece) {
    if (p->kind == W_INT8) tile_int8(p, rows, columns, piece);
    else if (p->kind == W_INT4) tile_int4(p, rows, columns, piece);
#ifdef __AVX512BF16__
    else if (p->kind == WX_BFLOAT16) tile_bfloat16(p, rows, columns, piece);
#endif
    else tile_floats(p, rows, columns, piece);
}

#define MATMUL(name, w_kind, w_bytes, x_bytes, signed_x) \
    static __attribute__((noinline)) void matmul_##name(const struct product *p, int64_t begin, int64_t end) { \
        struct product specialized = *p; \
        specialized.kind = w_kind, specialized.is_signed = signed_x; \
        matmul_range(&specialized, begin, end, tile, w_bytes, x_bytes); \
    }

MATMUL(float32, W_FLOAT32, 4 * BLOCK, 4, 0)
MATMUL(bfloat16, W_BFLOAT16, 2 * BLOCK, 4, 0)
#ifdef __AVX512BF16__
MATMUL(wx_bfloat16, WX_BFLOAT16, 2 * BLOCK, 2, 0)
#else
#define matmul_wx_bfloat16 matmul_bfloat16       // prepare_input has rounded x
#endif
MATMUL(int8, W_INT8, BLOCK, 1, 0)
#ifdef HAS_VNNI
#define matmul_signed_int8 matmul_int8           // VNNI multiplies unsigned x of 8 bits without saturation
#else
MATMUL(signed_int8, W_INT8, BLOCK, 1, 1)
#endif
MATMUL(int4, W_INT4, BLOCK / 2, 0, 0)   // x_bytes 0: dividing K into pieces would be slower

void matmul(const struct product *p, int64_t begin, int64_t end) {
    if (end - begin >= AMX_OUTPUTS && can_use_amx(p)) {
        matmul_amx(p, 0, begin, end);
        return;
    }
    switch (p->kind) {
    case W_FLOAT32: matmul_float32(p, begin, end); break;
    case W_BFLOAT16: matmul_bfloat16(p, begin, end); break;
    case WX_BFLOAT16: matmul_wx_bfloat16(p, begin, end); break;
    case W_INT8: p->offset == SIGNED ? matmul_signed_int8(p, begin, end) : matmul_int8(p, begin, end); break;
    case W_INT4: matmul_int4(p, begin, end); break;
    default: matmul_blocks(p, begin, end);
    }
}

// W stored by input: for each of COLUMN_TILE outputs, a tile has a sum per lane of matmul's accumulator. Input k is added to lane
// k % WIDE, and the lanes are added as in wide_hsum, so the result is bit-identical to matmul on the transpose. STEPS inputs of a
// lane are added while its sums are in registers.
enum { STEPS = 8, COLUMN_VECTORS = COLUMN_TILE / WIDE };

INLINE void add_lanes(int lanes, float (*sums)[COLUMN_TILE]) {
    for (; lanes > 1; lanes /= 2)
        for (int lane = 0; lane < lanes / 2; lane++)
            for (int n = 0; n < COLUMN_TILE; n++) sums[lane][n] += sums[lane + lanes / 2][n];
}

// Adds `steps` inputs, k, k + WIDE, ..., to the sums of one lane of each row.
INLINE void add_columns(enum kind kind, const struct product *p, int steps, const uint8_t *w, int64_t stride, int64_t k,
                        int64_t first, int64_t rows, int64_t width, float (*sums)[WIDE][COLUMN_TILE]) {
    wide weights[STEPS][COLUMN_VECTORS];
    UNROLL for (int i = 0; i < steps; i++)
        UNROLL for (int v = 0; v < COLUMN_VECTORS; v++) {
            int64_t n = v * WIDE < width ? width - v * WIDE : 0;
            weights[i][v] = load_weights(kind, w + i * WIDE * stride + v * WIDE * element_size(kind), n);
        }
    for (int64_t row = 0; row < rows; row++) {
        const float *x = p->x + (first + row) * p->x_row + k;
        float *sum = sums[row][k % WIDE];
        wide acc[COLUMN_VECTORS];
        UNROLL for (int v = 0; v < COLUMN_VECTORS; v++) memcpy(&acc[v], sum + v * WIDE, sizeof acc[v]);
        UNROLL for (int i = 0; i < steps; i++)
            UNROLL for (int v = 0; v < COLUMN_VECTORS; v++) acc[v] = wide_fma(weights[i][v], wide_splat(x[i * WIDE]), acc[v]);
        UNROLL for (int v = 0; v < COLUMN_VECTORS; v++) wide_store(sum + v * WIDE, acc[v]);
    }
}

INLINE void columns_tile(enum kind kind, const struct product *p, int64_t N, int64_t first, int64_t rows, int64_t n,
                         int64_t width) {
    float sums[MAX_ROWS][WIDE][COLUMN_TILE];
    const uint8_t *w = (const uint8_t *)p->w + n * element_size(kind);
    int64_t stride = N * element_size(kind), k = 0;
    memset(sums, 0, (size_t)rows * sizeof sums[0]);
    for (; k + STEPS * WIDE <= p->K; k += STEPS * WIDE)
        for (int64_t lane = 0; lane < WIDE; lane++) {
            UNROLL for (int i = 0; i < STEPS; i++) __builtin_prefetch(w + (k + lane + (STEPS + i) * WIDE) * stride, 0, 3);
            add_columns(kind, p, STEPS, w + (k + lane) * stride, stride, k + lane, first, rows, width, sums);
        }
    for (; k < p->K; k++) add_columns(kind, p, 1, w + k * stride, stride, k, first, rows, width, sums);
    for (int64_t row = 0; row < rows; row++) {
        add_lanes(WIDE, sums[row]);
        memcpy(p->y + (first + row) * p->y_row + n, sums[row][0], (size_t)width * sizeof(float));
    }
}

INLINE void columns_range(enum kind kind, const struct product *p, int64_t N, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += COLUMN_TILE)
        for (int64_t row = 0; row < p->R; row += MAX_ROWS) {
            int64_t rows = smaller(p->R - row, MAX_ROWS);
            if (end - n >= COLUMN_TILE) columns_tile(kind, p, N, row, rows, n, COLUMN_TILE);
            else columns_tile(kind, p, N, row, rows, n, end - n);
        }
}

void matmul_by_columns(const struct product *p, int64_t N, int64_t begin, int64_t end) {
    if (p->kind == W_FLOAT32) columns_range(W_FLOAT32, p, N, begin, end);
    else columns_range(W_BFLOAT16, p, N, begin, end);
}

// Sparse inputs. sparse_tile collects the nonzero inputs of each CHUNK, and multiplies INPUTS of them for all outputs of a tile
// before the next INPUTS: long pieces of few rows of W cause fewer TLB misses than short pieces of many. At most REGISTER_SUMS
// vectors of sums, of all rows of a tile together, are in registers at the same time.
enum { CHUNK = 512, INPUTS = 16, MAX_VECTORS = 8, REGISTER_SUMS = WIDE == 16 ? 24 : 8 };

// Rounds x as a product of this kind does.
INLINE float round_input(enum kind kind, float x) {
    if (kind != WX_BFLOAT16) return x;
    return from_bfloat16(to_bfloat16(splat(x)))[0];
}

struct nonzero {                         // the inputs of a chunk that are nonzero in any row, and these inputs of each row
    int64_t count;
    int32_t indices[CHUNK + INPUTS];
    float x[MAX_ROWS][CHUNK];
};

INLINE void find_nonzero(enum kind kind, const struct product *p, int rows, int64_t first, int64_t k, struct nonzero *nonzero) {
    int64_t n = 0, end = smaller(k + CHUNK, p->K);
    const float *x = p->x + first * p->x_row;
    for (; k < end; k++) {
        int is_nonzero = 0;
        UNROLL for (int i = 0; i < rows; i++) {
            float value = x[i * p->x_row + k];
            is_nonzero |= value != 0.0f;
            nonzero->x[i][n] = value;
        }
        nonzero->indices[n] = (int32_t)k;
        n += is_nonzero;
    }
    if (kind == WX_BFLOAT16)
        UNROLL for (int i = 0; i < rows; i++)
            for (int64_t j = 0; j < n; j++) nonzero->x[i][j] = round_input(kind, nonzero->x[i][j]);
    for (int64_t i = n; i < n + INPUTS && n; i++) nonzero->indices[i] = nonzero->indices[n - 1];
    nonzero->count = n;
}

// Adds the products of nonzero inputs `first` to end - 1 to the sums of `width` outputs, at most `vectors` vectors, and prefetches
// the weights of the inputs that follow. w: the weights of the first output.
INLINE void add_nonzero(enum kind kind, int rows, int vectors, const uint8_t *w, int64_t N, int64_t width,
                        const struct nonzero *nonzero, int64_t first, int64_t end, float (*sums)[SPARSE_TILE]) {
    wide acc[MAX_ROWS][MAX_VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int c = 0; c < vectors; c++) memcpy(&acc[i][c], sums[i] + c * WIDE, sizeof acc[i][c]);
    for (int64_t j = first; j < end; j++) {
        const uint8_t *row = w + nonzero->indices[j] * N * element_size(kind);
        const uint8_t *later = w + nonzero->indices[j + INPUTS] * N * element_size(kind);
        UNROLL for (int64_t byte = 0; byte < vectors * WIDE * element_size(kind); byte += 64)
            __builtin_prefetch(later + byte, 0, 2);
        UNROLL for (int c = 0; c < vectors; c++) {
            if (c * WIDE >= width) break;
            wide weights = load_weights(kind, row + c * WIDE * element_size(kind), width - c * WIDE);
            UNROLL for (int i = 0; i < rows; i++) acc[i][c] = wide_fma(weights, wide_splat(nonzero->x[i][j]), acc[i][c]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int c = 0; c < vectors; c++) wide_store(sums[i] + c * WIDE, acc[i][c]);
}

// Returns the number of vectors of sums per row: a power of two.
INLINE int sparse_vectors(int rows) { return rows * 8 <= REGISTER_SUMS ? 8 : rows * 4 <= REGISTER_SUMS ? 4 : 2; }

// Computes outputs n to n + width - 1.
INLINE void sparse_tile(enum kind kind, const struct product *p, int rows, int64_t N, int64_t first, int64_t n, int64_t width) {
    int vectors = sparse_vectors(rows);
    const uint8_t *w = (const uint8_t *)p->w + n * element_size(kind);
    float sums[MAX_ROWS][SPARSE_TILE];
    struct nonzero nonzero;
    memset(sums, 0, (size_t)rows * sizeof sums[0]);
    for (int64_t k = 0; k < p->K; k += CHUNK) {
        find_nonzero(kind, p, rows, first, k, &nonzero);
        for (int64_t j = 0; j < nonzero.count; j += INPUTS) {
            int64_t end = smaller(j + INPUTS, nonzero.count), o = 0;
            for (; o + vectors * WIDE <= width; o += vectors * WIDE)
                add_nonzero(kind, rows, vectors, w + o * element_size(kind), N, vectors * WIDE, &nonzero, j, end,
                            (float (*)[SPARSE_TILE])(sums[0] + o));
            if (o < width)
                add_nonzero(kind, rows, vectors, w + o * element_size(kind), N, width - o, &nonzero, j, end,
                            (float (*)[SPARSE_TILE])(sums[0] + o));
        }
    }
    for (int64_t i = 0; i < rows; i++) memcpy(p->y + (first + i) * p->y_row + n, sums[i], (size_t)width * sizeof(float));
}

INLINE void sparse_range(enum kind kind, const struct product *p, int64_t N, int64_t begin, int64_t end) {
    int64_t tiles = ratio_up(p->R, MAX_ROWS);
    for (int64_t n = begin; n < end; n += SPARSE_TILE)
        for (int64_t tile = 0, first = 0, n_rows; tile < tiles; tile++, first += n_rows) {
            n_rows = (p->R - first) / (tiles - tile);
            WITH_ROWS(n_rows, sparse_tile(kind, p, rows, N, first, n, smaller(SPARSE_TILE, end - n)));
        }
}

void matmul_sparse(const struct product *p, int64_t N, int64_t begin, int64_t end) {
    if (p->kind == W_FLOAT32) sparse_range(W_FLOAT32, p, N, begin, end);
    else if (p->kind == W_BFLOAT16) sparse_range(W_BFLOAT16, p, N, begin, end);
    else sparse_range(WX_BFLOAT16, p, N, begin, end);
}

// W stored by output, summed in the order of the sparse product: each lane sums one output, input after input. A block, PAIRS pairs
// of neighbouring inputs of WIDE outputs, is transposed in registers, so that a vector has the weights of one pair for all outputs.
// The rows of x are rounded once for IN_ORDER_TILES tiles of W, IN_ORDER_INPUTS inputs at a time.
enum { PAIRS = WIDE, PREFETCH_BLOCKS = 4, IN_ORDER_INPUTS = 512, IN_ORDER_TILES = 16 };

INLINE void load_inputs(int rounds, const float *x, int64_t n, float *inputs) {
    for (int64_t k = 0; k < n; k += 8) {
        floats values = load(x + k);
        store(inputs + k, rounds ? from_bfloat16(to_bfloat16(values)) : values);
    }
}

// Adds the products of inputs k to k + n - 1, n <= 2 PAIRS, to each row's sums of WIDE outputs. next: prefetch distance in bytes.
INLINE void add_block(const uint16_t *const *w, int rows, int64_t k, int64_t n, int64_t next, const float (*x)[IN_ORDER_INPUTS],
                      wide *acc) {
    wide_ints pairs_of[PAIRS];
    UNROLL for (int o = 0; o < WIDE; o++) {
        __builtin_prefetch((const char *)(w[o] + k) + next, 0, 2);
        load_first(&pairs_of[o], w[o] + k, 2 * n, 4 * WIDE, 1);
    }
    transpose_wide(pairs_of);
    UNROLL for (int pair = 0; pair < PAIRS; pair++) {
        if (2 * pair >= n) break;
        wide even = __builtin_bit_cast(wide, pairs_of[pair] << 16);
        wide odd = __builtin_bit_cast(wide, pairs_of[pair] & (int32_t)0xFFFF0000);
        UNROLL for (int i = 0; i < rows; i++) acc[i] = wide_fma(even, wide_splat(x[i][2 * pair]), acc[i]);
        UNROLL for (int i = 0; i < rows; i++) acc[i] = wide_fma(odd, wide_splat(x[i][2 * pair + 1]), acc[i]);
    }
}

// Adds the products of inputs k to k + size - 1 to outputs n to n + WIDE - 1, at most end - 1.
INLINE void in_order_tile(const struct product *p, int rows, int64_t n, int64_t end, int64_t first, int64_t k, int64_t size,
                          const float (*x)[IN_ORDER_INPUTS], wide *sums) {
    const uint16_t *w[WIDE];
    wide acc[MAX_ROWS];
    int64_t block = 2 * PAIRS, last = size - PREFETCH_BLOCKS * block;
    UNROLL for (int o = 0; o < WIDE; o++) w[o] = (const uint16_t *)p->w + (n + o < end ? n + o : end - 1) * p->K + k;
    UNROLL for (int i = 0; i < rows; i++) acc[i] = k ? sums[i] : wide_splat(0.0f);
    for (int64_t done = 0; done < size; done += block) {
        int64_t next = 2 * (PREFETCH_BLOCKS * block + (done < last ? 0 : WIDE * p->K - size));
        if (size - done >= block) add_block(w, rows, done, block, next, (const float (*)[IN_ORDER_INPUTS])&x[0][done], acc);
        else add_block(w, rows, done, size - done, next, (const float (*)[IN_ORDER_INPUTS])&x[0][done], acc);
    }
    UNROLL for (int i = 0; i < rows; i++) {
        sums[i] = acc[i];
        if (k + size < p->K) continue;
        for (int64_t l = 0; l < WIDE && n + l < end; l++) p->y[(first + i) * p->y_row + n + l] = acc[i][l];
    }
}

INLINE void in_order_rows(const struct product *p, int rows, int64_t begin, int64_t end, int64_t first) {
    float x[MAX_ROWS][IN_ORDER_INPUTS];
    wide sums[IN_ORDER_TILES][MAX_ROWS];
    for (int64_t k = 0; k < p->K; k += IN_ORDER_INPUTS) {
        int64_t size = smaller(p->K - k, IN_ORDER_INPUTS);
        UNROLL for (int i = 0; i < rows; i++) load_inputs(p->kind == WX_BFLOAT16, p->x + (first + i) * p->x_row + k, size, x[i]);
        for (int64_t tile = 0; begin + tile * WIDE < end; tile++)
            in_order_tile(p, rows, begin + tile * WIDE, end, first, k, size, (const float (*)[IN_ORDER_INPUTS])x, sums[tile]);
    }
}

void matmul_in_order(const struct product *p, int64_t begin, int64_t end) {
    int64_t tiles = ratio_up(p->R, MAX_ROWS);
    for (int64_t n = begin; n < end; n += IN_ORDER_TILES * WIDE) {
        int64_t last = smaller(n + IN_ORDER_TILES * WIDE, end);
        for (int64_t tile = 0, n_rows, first = 0; tile < tiles; tile++, first += n_rows) {
            n_rows = (p->R - first) / (tiles - tile);
            WITH_ROWS(n_rows, in_order_rows(p, rows, n, last, first));
        }
    }
}

// Rounds 8 numbers of x to bfloat16. Writes them to q, or to `rounded` if the CPU has no bfloat16 dot products.
INLINE void round_to_bfloat16(const float *x, float *rounded, uint8_t *q) {
    bfloats half = to_bfloat16(load(x));
#ifdef __AVX512BF16__
    (void)rounded, memcpy(q, &half, sizeof half);
#else
    (void)q, store(rounded, from_bfloat16(half));
#endif
}

// Quantizes a row x (K): q = round(x / scale) + offset, where the scale is the row's largest magnitude / levels. Returns the scale,
// NaN if x has a NaN. K is a multiple of 8.
INLINE float quantize_row(const float *x, uint8_t *q, int64_t K, int64_t levels, int64_t offset) {
    floats largest = splat(0.0f);
    ints is_nan = (ints)0;
    for (int64_t k = 0; k < K; k += 8) {
        floats values = load(x + k);
        is_nan |= values != values;
        if (offset) values = __builtin_elementwise_abs(values);
        largest = max(values, largest);
    }
    float top = max_magnitude(largest, is_nan);
    for (int64_t k = 0; k < K; k += 8) {
        ints rounded = __builtin_convertvector(round_even(load(x + k) / top * (float)levels), ints) + (int32_t)offset;
        rounded = __builtin_elementwise_max(__builtin_elementwise_min(rounded, (ints)255), (ints)0);
        uint8_t VECTOR(8) eight = __builtin_convertvector(rounded, uint8_t VECTOR(8));
        memcpy(q + k, &eight, sizeof eight);
    }
    return top / (float)levels;
}

// Quantizes a block of a row x (K) for an int4 product, in steps of 1/127 of each group's largest magnitude. q: the integers in the
// order of q_offset; y: the eight groups' scales, then their sums, NaN if the group has a NaN. K is a multiple of 8.
INLINE void quantize_block(const float *x, uint8_t *q, float *y, int64_t K, int64_t block) {
    for (int g = 0; g < 8; g++) {
        int64_t first = block * BLOCK + g * GROUP, vectors = K - first >= GROUP ? 4 : K - first > 0 ? (K - first) / 8 : 0;
        floats values[4], largest = splat(0.0f);
        ints is_nan = (ints)0;
        for (int v = 0; v < 4; v++) {
            values[v] = v < vectors ? load(x + first + v * 8) : splat(0.0f);
            is_nan |= values[v] != values[v];
            largest = max(__builtin_elementwise_abs(values[v]), largest);
        }
        float top = max_magnitude(largest, is_nan);
        uint32_t total = 0;              // unsigned, because NaN converts to INT32_MIN, whose sums overflow
        int32_t integers[GROUP];
        for (int v = 0; v < 4; v++) {
            ints rounded = __builtin_convertvector(round_even(values[v] * (127.0f / top)), ints);
            memcpy(integers + v * 8, &rounded, sizeof rounded);
        }
        for (int e = 0; e < GROUP; e++) {
            total += (uint32_t)integers[e];
            q[block * BLOCK + q_offset(g, e)] = (uint8_t)integers[e];
        }
        y[block * 16 + g] = top / 127.0f;
        y[block * 16 + 8 + g] = (float)(int32_t)total * (top / 127.0f);
    }
}

// Quantizes 256 numbers of a row x (K) for a product with GGUF's blocks, in steps of 1/127 of each sub-block's largest magnitude.
// q: the integers; y: the sub-blocks' scales, then their sums, NaN if the sub-block has a NaN; both in the order of sub_block_lane.
// K is a multiple of 32; numbers after the end of the row count as 0.
INLINE void quantize_sub_blocks(const float *x, uint8_t *q, float *y, int64_t K, int64_t block) {
    x += block * BLOCK, q += block * BLOCK, y += block * 2 * SUB_BLOCKS;
    for (int n = 0; n < SUB_BLOCKS; n++) {
        int is_inside = block * BLOCK + n * SUB_BLOCK < K;
        floats low = is_inside ? load(x + n * SUB_BLOCK) : splat(0.0f);
        floats high = is_inside ? load(x + n * SUB_BLOCK + 8) : splat(0.0f);
        float top = max_magnitude(max(__builtin_elementwise_abs(low), __builtin_elementwise_abs(high)),
                                  (low != low) | (high != high));
        ints halves[2] = {__builtin_convertvector(round_even(low * (127.0f / top)), ints),
                          __builtin_convertvector(round_even(high * (127.0f / top)), ints)};
        int8_t integers[SUB_BLOCK];      // 0 for NaN
        int32_t total = 0;
        UNROLL for (int e = 0; e < SUB_BLOCK; e++) total += integers[e] = (int8_t)halves[e / 8][e % 8];
        float step = top / 127.0f;
        int lane = sub_block_lane(n);
        UNROLL for (int c = 0; c < 4; c++) memcpy(q + lane / WIDE * 16 * WIDE + c * 4 * WIDE + lane % WIDE * 4, integers + 4 * c, 4);
        y[lane] = step;
        y[SUB_BLOCKS + lane] = (float)total * step;
    }
}

void prepare_input(enum kind kind, const float *x, int64_t K, int64_t first, int64_t n, int64_t levels, int64_t offset,
                   float *floats, uint8_t *q) {
    if (kind == WX_BFLOAT16) for (int64_t k = first; k < first + n; k += 8) round_to_bfloat16(x + k, floats + k, q + 2 * k);
    if (kind == W_INT8) *floats = quantize_row(x, q, K, levels, offset);
    if (kind == W_INT4)
        for (int64_t block = first / BLOCK; block * BLOCK < first + n; block++) quantize_block(x, q, floats, K, block);
    if (kind >= W_Q8_0)
        for (int64_t block = first / BLOCK; block * BLOCK < first + n; block++) quantize_sub_blocks(x, q, floats, K, block);
}
